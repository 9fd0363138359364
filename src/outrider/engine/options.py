"""Options of drafting and verification. Imports no torch, so that the command line can read the declarations fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError
from outrider.method_text import split_method
from outrider.options import (
    INT32,
    METHOD,
    MODELS,
    SOURCE,
    CheckedOptions,
    Kind,
    boolean,
    has,
    keyed,
    objects,
    option,
    text,
    whole,
)
from outrider.registry import AUTO, DEFAULT_METHOD, PROPOSERS, VERIFIERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from outrider.engine.policy import LengthPolicy
    from outrider.proposers.base import Proposer
    from outrider.verifiers.base import Verifier

    ModelSource = str | Path | PreTrainedModel
    TokenizerSource = str | Path | PreTrainedTokenizerBase

VERIFIER = text(f"one of {', '.join(VERIFIERS)}")
# Attributes of ``Proposer``, which the engine uses. The base class provides all except ``propose``.
PROPOSER_ATTRIBUTES = (
    *("name", "needs_hidden", "max_drafts", "auto_drafts", "drafts_ahead", "is_model_free"),
    *("memory", "propose", "start", "prefill", "fork", "commit", "release", "retire", "prepare", "num_nodes"),
)
POLICY_ATTRIBUTES = ("prices", "start", "next_lengths", "observe", "release")  # of ``LengthPolicy``
is_tokenizer = has("encode", "decode", "convert_ids_to_tokens")  # the methods in use, which tokenizers.Tokenizer lacks
A_MODEL = "a folder, a hub id or a loaded transformers model"
MODEL = objects(A_MODEL, has("forward", "config"), SOURCE)
HEADS = objects(A_MODEL, has("forward"), SOURCE)  # heads have no config
TOKENIZER = objects("a folder, a hub id or a transformers tokenizer", is_tokenizer, SOURCE)


def _draft_length(value: Any) -> Any:
    """Read a number of drafts, or "auto". Accepts numbers as text, because flags and plans are text."""
    if isinstance(value, str):
        name = value.strip().lower()
        if name == AUTO:
            return AUTO
        value = int(name)
    return whole(0, INT32).read(value)  # a number of thousands of digits cannot be logged


DRAFT_LENGTH = Kind("a whole number, at least 0, or auto", _draft_length)


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
        boolean(),
        False,
        "Download the drafter known for the target if none is found on this machine (method auto).",
        panel=MODELS,
        in_plan=True,
    )
    drafts: Mapping[str, ModelSource] = option(
        keyed("a mapping from names to models", MODEL), dict, "Drafts that belong to the target, by name."
    )
    method: str = option(
        text("a method: name, name:option=value or two names joined by a plus"),
        AUTO,
        f"Drafting method: {', '.join(PROPOSERS)}, or two joined by a plus; append :option=value for options; auto: what is "
        f"found for the target on this machine, else {DEFAULT_METHOD}.",
        panel=METHOD,
        in_plan=True,
    )
    num_draft_tokens: int | str | LengthPolicy = option(
        objects(f"{DRAFT_LENGTH.expected} or a LengthPolicy", has(*POLICY_ATTRIBUTES), DRAFT_LENGTH),
        AUTO,
        "Drafts per round (K); 0 is plain decoding; auto adapts K each round to measured costs and acceptance.",
        panel=METHOD,
        letter="k",
        in_plan=True,
    )
    verifier: str | Verifier = option(
        objects(f"{VERIFIER.expected} or a Verifier", has("verify", "lossless", "supports_trees", "target_input"), VERIFIER),
        "block",
        "Acceptance rule: block, rejection, exact, or typical, which is lossy.",
        panel=MODELS,
        in_plan=True,
    )
    proposer: Proposer | None = option(
        objects("a Proposer, made from a subclass of outrider.Proposer", has(*PROPOSER_ATTRIBUTES)),
        None,
        "Custom proposer, instead of a method.",
    )
    draft_tokenizer: TokenizerSource | None = option(
        TOKENIZER, None, "Tokenizer of the draft (default: the one in its folder)."
    )
    method_options: Mapping[str, Any] = option(keyed("a mapping from names to values"), dict, "Options of the method, by name.")
    same_text: bool = option(
        boolean(), False, "Emit the same tokens with and without drafts, at a small cost.", panel=MODELS, in_plan=True
    )
    grammar_drafts: bool = option(
        boolean(),
        True,
        "Draft the tokens that a request's grammar determines or makes likely.",
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
