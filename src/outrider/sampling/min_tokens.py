"""Check token masks, and mask the tokens that end an output until it has ``min_tokens`` tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from outrider.sampling.grammar_masks import banned_tokens
from outrider.sampling.penalties import drafts_before_rows
from outrider.types import OutriderError, Request, SamplingParams


def check_masks(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Raise ``OutriderError`` for a token id outside the vocabulary, and if bias and masks leave no token.

    It creates no tensors of the vocabulary's size: a server checks requests in the thread of its event loop.
    """
    allowed, banned = params.allowed_token_ids, banned_tokens(params)
    largest = max([*params.logit_bias, *params.banned_token_ids, *(allowed or ())], default=0)
    if largest >= vocab_size:
        raise OutriderError(
            f"invalid token id {largest} in a bias or mask: expected an id of the vocabulary, 0 to {vocab_size - 1}"
        )

    def leaves_none(barred: set[int]) -> bool:
        return barred.issuperset(allowed) if allowed is not None else len(barred) == vocab_size

    if leaves_none(banned):
        raise OutriderError("logit_bias, allowed_token_ids and banned_token_ids leave no token: expected at least one")
    if params.min_tokens and leaves_none(banned | _ending(params, eos_token_ids, vocab_size)):
        raise OutriderError("min_tokens and the token masks leave no token: expected one that does not end the output")


def _ending(params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> set[int]:
    """Return the tokens of the vocabulary that end an output."""
    return {token for token in (*eos_token_ids, *params.stop_token_ids) if token < vocab_size}


class MinTokens:
    """Masks of requests with ``min_tokens``."""

    def __init__(
        self, requests: Sequence[Request], eos_token_ids: Collection[int], vocab_size: int, device: torch.device
    ) -> None:
        """The requests must have passed ``check_masks``."""
        self._requests = [
            (
                b,
                request,
                torch.tensor(sorted(_ending(request.params, eos_token_ids, vocab_size)), dtype=torch.long, device=device),
            )
            for b, request in enumerate(requests)
            if request.params.min_tokens > 0
        ]

    @property
    def is_empty(self) -> bool:
        """Return whether every output has its ``min_tokens``."""
        return not any([request.num_output_tokens < request.params.min_tokens for _, request, _ in self._requests])

    def apply_(self, scores: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, widths: Sequence[int]) -> None:
        """Mask tokens in the first ``widths[b]`` rows of scores [B, M, V], in place. ``drafts`` are not read."""
        num_drafts = drafts_before_rows(parents, start, scores.shape[1], len(scores))
        for b, request, ending in self._requests:
            num_left = request.params.min_tokens - request.num_output_tokens
            for row, num_before in enumerate(num_drafts[b][: widths[b]]):
                if num_before < num_left:
                    scores[b, row].index_fill_(0, ending, -math.inf)
