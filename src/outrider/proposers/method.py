"""What describes a drafting method before anything is loaded: its options, the drafts it takes, its checks, its portable form.

What runs each round is the ``Proposer`` (base.py) that ``MethodSpec.build`` makes. A method is one file with both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from outrider.heads.checkpoint import MODEL, DraftKind, kinds_of
from outrider.proposers.base import Proposer
from outrider.proposers.portable import Portable
from outrider.types import Finding, OutriderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.proposers.recognition import Recognised, TargetFiles
    from outrider.runner import ModelRunner

Config = TypeVar("Config")


@dataclass(frozen=True)
class NoOptions:
    """The configuration of a method that has nothing to choose."""


@dataclass(frozen=True)
class Setting:
    """What a proposer is built from: the target and what the user gave."""

    target: ModelRunner
    tokenizer: PreTrainedTokenizerBase | None = None
    draft: object = None  # a folder, a hub id or a loaded model, for methods that take a draft
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own, by name
    drafts: Mapping[str, object] = field(default_factory=dict)  # those that come with the target, by name

    @classmethod
    def without_target(cls, **given: Any) -> Setting:
        """A setting of options and drafts alone: its ``target`` is None."""
        return cls(cast("ModelRunner", None), **given)

    def of(self, method: MethodSpec) -> Setting:
        """The setting as a method sees it: ``draft`` is the one that it drafts with, and no longer among the options.

        Raises ``OutriderError`` as ``chosen_draft`` does.
        """
        if not method.takes_draft:
            return self
        options = {name: value for name, value in self.options.items() if name != "draft"}
        draft = chosen_draft(method, self.options.get("draft"), self.draft, self.drafts)
        return replace(self, draft=draft, options=options)

    def config(self, kind: type[Config], **measured: Any) -> Config:
        """The options as the method's configuration; text is read as its type says.

        ``measured``: values that stand in the place of defaults, where they are not None. Raises ``OutriderError`` for an
        option that it does not know or refuses.
        """
        known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise OutriderError(f"the method has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
        hints = get_type_hints(kind)
        given = {name: value for name, value in measured.items() if value is not None} | dict(self.options)
        try:
            return kind(**{name: _read(value, hints[name]) for name, value in given.items()})
        except (TypeError, ValueError) as error:
            raise OutriderError(f"an option of the method has a value of the wrong type: {error}") from error


def _read(value: Any, hint: Any) -> Any:
    """Text as the number, truth value or tuple that the hint asks for, lists as tuples; anything else as it is.

    In a tuple commas part the values, in one of tuples slashes the rows: ``0.6,0.2/0.5,0.1``.
    """
    kinds = get_args(hint) if get_origin(hint) is not tuple and get_args(hint) else (hint,)
    inner = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), None)
    if inner is not None and isinstance(value, (list, tuple)):
        return tuple(_read(each, inner) for each in value)
    if not isinstance(value, str) or str in kinds:
        return value
    if type(None) in kinds and value.lower() in ("auto", "none"):
        return None
    if inner is not None:
        return tuple(_read(each, inner) for each in value.split("/" if get_origin(inner) is tuple else ","))
    if bool in kinds and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if int in kinds else float(value)


def chosen_draft(method: MethodSpec, named: object, general: object, drafts: Mapping[str, object]) -> object:
    """What a method drafts with: the draft ``named`` for it, else the ``general`` one, else its own among ``drafts``.

    A name of ``drafts`` means that one; None is the one in the target's checkpoint. Raises ``OutriderError`` where there
    is none, or one of another kind than the method's.
    """
    name, kind = method.name, method.drafts_with
    source = general if named is None else named
    if source is None:
        source = drafts.get(method.own_draft or "")
    elif isinstance(source, str):
        source = drafts.get(source, source)
    if source is None and method.comes_with_target:
        return None
    if source is None:
        lack = f", and {method.own_draft!r} is not among those that come with this target" if drafts else ""
        raise OutriderError(f"method {name!r} needs {kind}{lack}: give {name}:draft=<folder or hub id>, or --draft")
    found = kinds_of(Path(source)) if isinstance(source, (str, Path)) else []
    if found and kind not in found:
        raise OutriderError(
            f"{source} holds {found[0]}, and method {name!r} needs {kind}: use method {found[0].name!r} with it"
        )
    return source


class MethodSpec(ABC):
    """A drafting method by name. The registry names an instance; ``build`` makes its proposer for a target."""

    proposer: type[Proposer]
    options: type = NoOptions  # the dataclass of its options
    takes_draft: bool = False  # whether it looks at the draft that the user names
    drafts_with: DraftKind = MODEL  # the kind of draft that it takes
    comes_with_target: bool = False  # whether, if none is named, it takes the draft in the target's own checkpoint
    own_draft: str | None = None  # the name under which a draft for it may come with the target
    precedence: int = 0  # of several drafts in one place, or methods for one draft, that of the highest is taken by itself

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def max_drafts(self) -> int:
        """The longest path of any of its proposers; 0 for plain decoding."""
        return self.proposer.max_drafts

    @property
    def drafts_trees(self) -> bool:
        return self.proposer.drafts_trees

    @property
    def reads_text_only(self) -> bool:
        """Whether ``build`` and the proposer look at options and committed tokens alone: at no target and no draft."""
        return self.proposer.reads_text_only

    @abstractmethod
    def build(self, setting: Setting) -> Proposer:
        """Make the proposer for a target. Raises ``OutriderError`` where it does not fit the target."""

    def recognise(self, folder: Path, target: TargetFiles) -> Recognised | None:
        """Return what a folder holds for this method, and None for anything else: then it is never taken by itself.

        ``folder``: a folder, a single file of weights, or the target's own folder if the method ``comes_with_target``. Reads
        names, configs and headers, no weights. Raises ``OutriderError`` for a draft of its kind that does not fit the target.
        """
        return None

    def drafts_in(self, options: Mapping[str, Any], general: object, drafts: Mapping[str, object]) -> list[object]:
        """What it will draft with, before anything is loaded. Raises ``OutriderError`` as ``chosen_draft`` does."""
        found = chosen_draft(self, options.get("draft"), general, drafts) if self.takes_draft else None
        return [] if found is None else [found]

    def portable(self, setting: Setting) -> Portable:
        """What it is in terms that other engines have too. No model is loaded: ``setting.target`` is None.

        Raises ``OutriderError`` for options that it refuses, and where a draft is missing.
        """
        setting.config(self.options)
        return Portable()

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Check from files and configs whether the method fits the target, before ``build`` loads anything."""
        yield from ()

    def alternatives(self, setting: Setting) -> list[str]:
        """Options, written after the method's name, that are easily mistaken for those given: the doctor tries them too."""
        return []
