"""Description of a drafting method: its options, the drafts that it uses, its checks and its portable form.

``MethodSpec.build`` creates the ``Proposer`` (base.py) that drafts in each round. One file contains both for a method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from outrider.heads.checkpoint import MODEL, DraftKind, kinds_of
from outrider.hub import local_gguf
from outrider.options import CheckedOptions, declared, path_or_text
from outrider.proposers.base import Proposer
from outrider.proposers.portable import Form, Portable
from outrider.types import Finding, OutriderError
from outrider.weight_files import on_this_machine

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from outrider.runner import ModelRunner

Config = TypeVar("Config", bound=CheckedOptions)


class Recognised(NamedTuple):
    """A draft that fits a target."""

    what: str  # description in messages, such as "draft model"
    share: float | None = None  # number of weights / the target's; None for heads
    num_bytes: int | None = None  # its size, if its files hold more than the draft; None: that of the files


@dataclass(frozen=True)
class TargetFiles:
    """A target whose files are on this machine, loaded or not."""

    name: str  # a folder, a hub id or a GGUF file
    folder: Path  # or the GGUF file
    config: PreTrainedConfig  # of its language model
    trusts_code: bool = False  # the option ``trust_remote_code``

    @classmethod
    def read(cls, name: str, folder: Path, trusts_code: bool = False) -> TargetFiles:
        """Read the config of a folder or GGUF file. Raises ``OutriderError`` if it has no readable one."""
        from outrider.runner.loading import load_config, text_config  # which imports transformers

        return cls(name, folder, text_config(load_config(folder)), trusts_code)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        from outrider.runner.loading import num_layers

        return num_layers(self.config)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)


@dataclass(frozen=True)
class Setting:
    """Arguments of ``MethodSpec.build``: the target, and what the user specified."""

    target: ModelRunner
    tokenizer: PreTrainedTokenizerBase | None = None
    draft: object = None  # a folder, a hub id or a loaded model, for methods that use a draft
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the method, by name
    drafts: Mapping[str, object] = field(default_factory=dict)  # drafts that come with the target, by name

    @classmethod
    def without_target(cls, **given: Any) -> Setting:
        """Return a setting of options and drafts only; its ``target`` is None."""
        return cls(cast("ModelRunner", None), **given)

    def with_draft_of(self, method: MethodSpec) -> Setting:
        """Return the setting for one method: ``draft`` is its ``chosen_draft``, and the option ``draft`` is removed.

        A GGUF file that a hub id names is downloaded. Raises ``OutriderError`` if that fails, and as ``chosen_draft`` and
        ``check_kind`` do.
        """
        if not method.takes_draft:
            return self
        options = {name: value for name, value in self.options.items() if name != "draft"}
        draft = local_gguf(chosen_draft(method, self.options.get("draft"), self.draft, self.drafts))
        check_kind(method, draft)
        return replace(self, draft=draft, options=options)

    def config(self, kind: type[Config], **measured: Any) -> Config:
        """Return the options as an instance of ``kind``; text is converted to the types of its options.

        ``measured``: values that replace the defaults of ``kind``, unless None. Raises ``OutriderError`` for an unknown option
        and for an invalid value.
        """
        known = declared(kind)
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise OutriderError(f"the method has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
        given = {name: known[name].from_text(v) if isinstance(v, str) else v for name, v in self.options.items()}
        return kind(**{name: value for name, value in measured.items() if value is not None} | given)


def chosen_draft(method: MethodSpec, named: object, general: object, drafts: Mapping[str, object]) -> object:
    """Return the draft of a method: the one ``named`` for it, else the ``general`` one, else its own among ``drafts``.

    A name in ``drafts`` stands for that draft. None means the draft in the target's checkpoint. Raises ``OutriderError`` if
    there is no draft.
    """
    name, kind = method.name, method.drafts_with
    source = general if named is None else named
    if source is None:
        source = drafts.get(method.own_draft or "")
    elif isinstance(source, str):
        source = drafts.get(source, path_or_text(source))
    if source is None and not method.comes_with_target:
        lack = f", and {method.own_draft!r} is not among those that come with this target" if drafts else ""
        raise OutriderError(f"method {name!r} needs {kind}{lack}: give {name}:draft=<folder or hub id>, or --draft")
    return source


def check_kind(method: MethodSpec, source: object) -> None:
    """Raise ``OutriderError`` if a draft's files are on this machine and are of a kind of another method."""
    kind = method.drafts_with
    found = kinds_of(on_this_machine(source) or Path(source)) if isinstance(source, (str, Path)) else []
    if found and kind not in found:
        raise OutriderError(
            f"{source} holds {found[0]}, and method {method.name!r} needs {kind}: use method {found[0].name!r} with it"
        )


class MethodSpec:
    """A drafting method. The registry contains an instance; ``build`` creates its proposer for a target."""

    proposer: type[Proposer]
    options: type[CheckedOptions] = CheckedOptions  # the dataclass of its options
    exported: Form = Form.CUSTOM  # its description for other engines
    takes_draft: bool = False  # whether it uses a draft that the user can name
    drafts_with: DraftKind = MODEL  # the kind of draft that it uses
    comes_with_target: bool = False  # whether it uses the draft in the target's checkpoint if none is named
    own_draft: str | None = None  # name of its draft among those that come with a target
    precedence: int = 0  # method auto uses the found draft with the highest precedence; 0: never

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def max_drafts(self) -> int:
        """Maximum path length of its proposers; 0 for plain decoding."""
        return self.proposer.max_drafts

    @property
    def is_model_free(self) -> bool:
        """Whether ``build`` and the proposer use options and committed tokens only, but no target and no draft."""
        return self.proposer.is_model_free

    def build(self, setting: Setting) -> Proposer:
        """Create the proposer for a target, by default from its options only.

        Raises ``OutriderError`` if the method does not fit the target.
        """
        return cast("Any", self.proposer)(setting.config(self.options))

    def recognise(self, folder: Path, target: TargetFiles) -> Recognised | None:
        """Return a description of the draft in a folder, or None if there is none of this method's kind.

        ``folder``: a folder, a single weight file, or the target's own folder if the method ``comes_with_target``. Reads names,
        configs and headers, but no weights. Raises ``OutriderError`` for a draft of its kind that does not fit the target.
        """
        return None

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ``OutriderError`` for options that are invalid for every target."""
        own = {name: value for name, value in options.items() if not (self.takes_draft and name == "draft")}
        Setting.without_target(options=own).config(self.options)

    def drafts_in(self, options: Mapping[str, Any], general: object, drafts: Mapping[str, object]) -> list[object]:
        """Return the drafts that it will load, without a download. Raises ``OutriderError`` as ``with_draft_of`` does."""
        draft = chosen_draft(self, options.get("draft"), general, drafts) if self.takes_draft else None
        check_kind(self, draft)
        return [] if draft is None else [draft]

    def portable(self, setting: Setting) -> Portable:
        """Describe the method for other engines. ``setting.target`` is None, as no model is loaded.

        Raises ``OutriderError`` for invalid options and a missing draft.
        """
        setting = setting.with_draft_of(self)
        source = None if setting.draft is None else str(setting.draft)
        return Portable(self.exported, source, setting.config(self.options))

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Check from files and configs whether the method fits the target, before ``build`` loads anything."""
        yield from ()

    def alternatives(self, setting: Setting) -> list[str]:
        """Return options (``name=value``) that are easily confused with the given ones; ``outrider doctor`` tries them too."""
        return []
