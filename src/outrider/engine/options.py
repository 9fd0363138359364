"""Options of drafting and verification. Imports no torch, so that the command line can read the declarations fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError
from outrider.method_text import split_method
from outrider.options import INT32, METHOD, MODELS, CheckedOptions, Flag, Keyed, Objects, Source, Text, Whole, has, option
from outrider.registry import AUTO, DEFAULT_METHOD, PROPOSERS, VERIFIERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from outrider.engine.policy import LengthPolicy
    from outrider.proposers.base import Proposer
    from outrider.verifiers.base import Verifier

    ModelSource = str | Path | PreTrainedModel
    TokenizerSource = str | Path | PreTrainedTokenizerBase

VERIFIER = Text(f"one of {', '.join(VERIFIERS)}")
# Attributes that the engine reads from a proposer. The base class provides all except ``propose``.
PROPOSER_ATTRIBUTES = (
    *("name", "needs_hidden", "drafts_trees", "max_drafts", "auto_drafts", "drafts_ahead", "reads_text_only", "memory"),
    *("propose", "prefill", "fork", "commit", "release", "retire", "warmup", "num_nodes"),
)
is_tokenizer = has("encode", "decode", "convert_ids_to_tokens")  # the methods in use, which tokenizers.Tokenizer lacks
A_MODEL = "a folder, a hub id or a loaded transformers model"
MODEL = Objects(A_MODEL, has("forward", "config"), Source())
HEADS = Objects(A_MODEL, has("forward"), Source())  # heads have no config
TOKENIZER = Objects("a folder, a hub id or a transformers tokenizer", is_tokenizer, Source())


@dataclass(frozen=True)
class DraftLength:
    """A number of drafts, at least 0, or "auto". Accepts numbers as text, because flags and plans are text."""

    expected: str = "a whole number, at least 0, or auto"

    def read(self, value: Any) -> int | str:
        if isinstance(value, str):
            text = value.strip().lower()
            if text == AUTO:
                return AUTO
            value = int(text)
        return int(Whole(0, INT32).read(value))  # a number of thousands of digits cannot be logged


@dataclass(frozen=True)
class Speculation(CheckedOptions):
    """Options of drafting and verification.

    Raises ``OutriderError`` for a value of the wrong type or out of bounds.
    """

    target: ModelSource | None = option(
        MODEL,
        None,
        "Folder, hub id or GGUF file of the target (default: the embedded model).",
        panel=MODELS,
        in_plan=True,
    )
    tokenizer: TokenizerSource | None = option(
        TOKENIZER, None, "Tokenizer of the target (default: the one in its folder; a loaded model has none)."
    )
    draft: ModelSource | None = option(
        HEADS, None, "Folder, hub id or GGUF file of a draft model, or of heads.", panel=MODELS, in_plan=True
    )
    download_draft: bool = option(
        Flag(),
        False,
        "Download the drafter known for the target if none is found on this machine (method auto).",
        panel=MODELS,
        in_plan=True,
    )
    drafts: Mapping[str, ModelSource] = option(
        Keyed("a mapping from names to models", MODEL), dict, "Drafts that belong to the target, by name."
    )
    method: str = option(
        Text("a method: name, name:option=value or two names joined by a plus"),
        AUTO,
        f"Drafting method: {', '.join(PROPOSERS)}, or two joined by a plus; append :option=value for options; auto: what is "
        f"found for the target on this machine, else {DEFAULT_METHOD}.",
        panel=METHOD,
        in_plan=True,
    )
    num_draft_tokens: int | str | LengthPolicy = option(
        Objects(f"{DraftLength.expected} or a LengthPolicy", has("next_lengths", "observe", "release"), DraftLength()),
        AUTO,
        "Drafts per round (K); 0 is plain decoding; auto adapts K each round to measured costs and acceptance.",
        panel=METHOD,
        letter="k",
        in_plan=True,
    )
    verifier: str | Verifier = option(
        Objects(f"{VERIFIER.expected} or a Verifier", has("verify", "lossless", "handles_trees", "target_input"), VERIFIER),
        "block",
        "Acceptance rule: block, rejection, exact, or typical, which is lossy.",
        panel=MODELS,
        in_plan=True,
    )
    proposer: Proposer | None = option(
        Objects("a Proposer, made from a subclass of outrider.Proposer", has(*PROPOSER_ATTRIBUTES)),
        None,
        "Custom proposer, instead of a method.",
    )
    draft_tokenizer: TokenizerSource | None = option(
        TOKENIZER, None, "Tokenizer of the draft (default: the one in its folder)."
    )
    method_options: Mapping[str, Any] = option(Keyed("a mapping from names to values"), dict, "Options of the method, by name.")
    same_text: bool = option(
        Flag(), False, "Emit the same tokens with and without drafts, at a small cost.", panel=MODELS, in_plan=True
    )
    grammar_drafts: bool = option(
        Flag(),
        True,
        "Draft the tokens that a request's grammar determines.",
        panel=METHOD,
        in_plan=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method != AUTO:
            PROPOSERS.get(split_method(self.method)[0])
        verifier = VERIFIERS.get(self.verifier) if isinstance(self.verifier, str) else self.verifier
        if self.same_text and not verifier.lossless:
            raise OutriderError("same_text=True needs a lossless verifier, and this one is lossy: omit one of the two")
