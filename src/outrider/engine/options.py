"""What a user may choose about drafting and judging. Imports no torch: the command line reads these declarations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.method_text import split_method
from outrider.options import METHOD, MODELS, Either, Flag, Keyed, Objects, Source, Text, Whole, check, has_methods, option
from outrider.registry import AUTO, PROPOSERS, VERIFIERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from outrider.engine.policy import LengthPolicy
    from outrider.proposers.base import Proposer
    from outrider.verifiers.base import Verifier

    ModelSource = str | Path | PreTrainedModel
    TokenizerSource = str | Path | PreTrainedTokenizerBase

is_tokenizer = has_methods("encode", "decode", "convert_ids_to_tokens")  # what is used; not a bare tokenizers.Tokenizer


@dataclass(frozen=True)
class DraftLength:
    """A number of drafts from 0 on, or "auto"; text of a number too, since flags and plans are written as text."""

    expected: str = "a whole number, at least 0, or auto"
    flag_type: Any = str

    def read(self, value: Any) -> int | str:
        if isinstance(value, str):
            text = value.strip().lower()
            if text == AUTO:
                return AUTO
            value = int(text)
        return Whole(0).read(value)


@dataclass(frozen=True)
class TokenizerLike:
    """A folder, a hub id or a loaded tokenizer."""

    expected: str = "a folder, a hub id or a transformers tokenizer"
    flag_type: Any = None

    def read(self, value: Any) -> Any:
        if isinstance(value, type) or not is_tokenizer(value):
            if callable(getattr(value, "forward", None)):
                raise TypeError("a model")
            return Source().read(value)
        return value


@dataclass(frozen=True)
class Speculation:
    """Which target, how to draft for it and how to judge the drafts.

    Raises ``OutriderError`` for a value of the wrong type or out of bounds.
    """

    target: ModelSource | None = option(
        Source(),
        None,
        "Model whose text is wanted: a folder or a hub id (default: the embedded model).",
        panel=MODELS,
        in_plan=True,
    )
    tokenizer: TokenizerSource | None = option(
        TokenizerLike(), None, "Tokenizer of the target (default: the one in its folder; a loaded model has none)."
    )
    draft: ModelSource | None = option(
        Source(heads=True), None, "What drafts, a small model or heads: a folder or a hub id.", panel=MODELS, in_plan=True
    )
    drafts: Mapping[str, ModelSource] = option(
        Keyed("a mapping from names to models", Source()), dict, "Drafts that come with the target, by name."
    )
    method: str = option(
        Text("a method: name, name:option=value or two names joined by a plus"),
        AUTO,
        f"Where drafts come from: {', '.join(PROPOSERS)}, with :option=value after the name where wanted, or two methods joined "
        "by a plus; auto: the draft if there is one, else n-grams of the text itself.",
        panel=METHOD,
        in_plan=True,
    )
    num_draft_tokens: int | str | LengthPolicy = option(
        Either(DraftLength(), has_methods("next_lengths", "observe", "release"), "a LengthPolicy"),
        AUTO,
        "Drafts of a round (K); 0 is plain decoding; auto: chosen each round from what drafts gain and cost.",
        panel=METHOD,
        letter="k",
        in_plan=True,
    )
    verifier: str | Verifier = option(
        Either(Text(f"one of {', '.join(VERIFIERS)}"), has_methods("verify"), "a Verifier"),
        "block",
        "Acceptance rule: block, rejection, exact, or typical, which is lossy.",
        panel=MODELS,
        in_plan=True,
    )
    proposer: Proposer | None = option(
        Objects("a Proposer", has_methods("propose", "commit", "release")), None, "A proposer of your own."
    )
    draft_tokenizer: TokenizerSource | None = option(
        TokenizerLike(), None, "Tokenizer of the draft, where its folder has none."
    )
    method_options: Mapping[str, Any] = option(Keyed("a mapping from names to values"), dict, "Options of the method, by name.")
    same_text: bool = option(
        Flag(), False, "The same tokens with and without drafts, at a small cost.", panel=MODELS, in_plan=True
    )

    def __post_init__(self) -> None:
        check(self)
        if self.method != AUTO:
            PROPOSERS.get(split_method(self.method)[0])
        if isinstance(self.verifier, str):
            VERIFIERS.get(self.verifier)
