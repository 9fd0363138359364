"""Sampling parameters of a request. Imports no torch, because the command line reads these declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Protocol

from outrider.errors import OutriderError
from outrider.options import (
    BIASES,
    INT32,
    SAMPLING,
    TEXTS,
    CheckedOptions,
    boolean,
    has,
    number,
    objects,
    option,
    token_ids,
    whole,
)

if TYPE_CHECKING:
    from torch import Tensor


class Matcher(Protocol):
    """Grammar state of one request."""

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> Tensor | None:
        """Return the tokens allowed after the output and the drafts of ``path``, as bool [V] on the CPU.

        None if no mask exists, because these drafts break the grammar or end the text; no token if none can follow them. An
        exception ends the request if ``path`` is empty; otherwise it counts as no token.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by any number of requests."""

    def matcher(self) -> Matcher:
        """Return a matcher for a new request."""
        ...


@dataclass(frozen=True)
class SamplingParams(CheckedOptions):
    """Sampling parameters of a request, which apply to the draft's and the target's distribution alike.

    Order of application: logit bias and token masks, ``min_tokens``, grammar, penalties, temperature, top-k, top-p, min-p. The
    default temperature, 0 (greedy), is also that of the command line, except for ``chat`` and ``compare``, and of the server.
    As in vLLM, end-of-text tokens and ``stop_token_ids`` have probability 0 at the first ``min_tokens`` positions, also with
    ``ignore_eos``, and a stop string ends the output only if a later token completes it. Numpy scalars and arrays, 0-d and 1-d
    tensors are converted to Python numbers. None stands for the default; of ``max_tokens``, for the end of the context. Raises
    ``OutriderError`` for any other type, a value out of bounds, ``min_tokens`` above ``max_tokens``, and ``min_tokens`` or
    ``ignore_eos`` with a grammar.
    """

    max_tokens: int = option(whole(1, INT32), 256, "Maximum number of tokens to generate.", panel=SAMPLING)
    temperature: float = option(number(0, 1e6), 0.0, "Temperature; 0 is greedy decoding.", panel=SAMPLING, letter="t")
    top_k: int = option(whole(-1, INT32), 0, "Keep the k most likely tokens; 0 or -1 keeps all.", panel=SAMPLING)
    top_p: float = option(
        number(above=0, at_most=1), 1.0, "Keep the most likely tokens up to this total probability.", panel=SAMPLING
    )
    min_p: float = option(
        number(0, 1), 0.0, "Drop tokens less likely than this fraction of the most likely one.", panel=SAMPLING
    )
    repetition_penalty: float = option(
        number(0.01, 100), 1.0, "Penalty on tokens of prompt and output; 1 is off.", panel=SAMPLING
    )  # as in CTRL (Keskar et al. 2019)
    presence_penalty: float = option(
        number(-2, 2), 0.0, "Penalty on tokens that occur in the output; 0 is off.", panel=SAMPLING
    )  # as in the OpenAI API
    frequency_penalty: float = option(
        number(-2, 2), 0.0, "Penalty on tokens, times their count in the output; 0 is off.", panel=SAMPLING
    )
    logit_bias: Mapping[int, float] = option(BIASES, dict, "Token id -> number added to its logit.")
    allowed_token_ids: Sequence[int] | None = option(token_ids(True), None, "Tokens that may be generated; None: all.")
    banned_token_ids: Sequence[int] = option(token_ids(), (), "Tokens that are never generated.")
    stop: str | Sequence[str] = option(
        TEXTS, (), "Stop string, which ends the answer and is not part of it; repeatable.", panel=SAMPLING
    )
    include_stop_str_in_output: bool = option(boolean(), False, "Keep the stop string or stop token in the text that it ends.")
    stop_token_ids: Sequence[int] = option(token_ids(), (), "Tokens that end the output.")
    min_tokens: int = option(
        whole(0, INT32), 0, "Minimum number of tokens before an end-of-text token, stop token or stop string.", panel=SAMPLING
    )
    ignore_eos: bool = option(boolean(), False, "Continue after the end-of-text token.", panel=SAMPLING)
    skip_special_tokens: bool = option(boolean(), True, "Leave special tokens out of the text.")
    seed: int | None = option(
        whole(-(2**63), 2**64 - 1),
        None,
        "Sampling seed. The same seed gives the same text; with drafts only with --same-text, or for a single sequence with "
        "a fixed method and K.",
        panel=SAMPLING,
    )
    n: int = option(whole(1, 16384), 1, "Samples per prompt.")
    grammar: Grammar | None = option(objects("a Grammar", has("matcher")), None, "Grammar that the output must match.")
    logprobs: int | None = option(
        whole(0, INT32), None, "Return log-probabilities of each token and of this many most likely ones; None: none."
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is None:
                default = each.default if each.default_factory is MISSING else each.default_factory()
                object.__setattr__(self, each.name, INT32 if each.name == "max_tokens" else default)
        super().__post_init__()
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.min_tokens > self.max_tokens:
            above = f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}"
            raise OutriderError(f"{above}: lower min_tokens or raise max_tokens")
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos=True" if self.ignore_eos else f"min_tokens={self.min_tokens}"
            raise OutriderError(f"{name} cannot be combined with a grammar: the grammar ends the text")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
