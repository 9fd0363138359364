"""Mask the tokens that end an output until it has ``min_tokens`` tokens, at each committed and drafted position."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from outrider.sampling.grammar_masks import token_mask
from outrider.sampling.penalties import drafts_before_rows
from outrider.types import OutriderError, Request, SamplingParams


def check_min_tokens(params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
    """Raise ``OutriderError`` if ``min_tokens`` is set and the token masks allow only tokens that end the output."""
    if params.min_tokens == 0:
        return
    mask = token_mask(params, vocab_size)
    others = torch.ones(vocab_size, dtype=torch.bool) if mask is None else mask
    others[_ending(params, eos_token_ids, vocab_size)] = False
    if not bool(others.any()):
        raise OutriderError("min_tokens and the token masks leave no token: expected one that does not end the output")


def _ending(params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> Tensor:
    """Return the tokens that end an output, int64 [N]."""
    found = torch.tensor(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=torch.long)
    return found[found < vocab_size]


class MinTokens:
    """Masks of requests with ``min_tokens``."""

    def __init__(
        self, requests: Sequence[Request], eos_token_ids: Collection[int], vocab_size: int, device: torch.device
    ) -> None:
        """The requests must have passed ``check_min_tokens``."""
        self._requests = [
            (b, request, _ending(request.params, eos_token_ids, vocab_size).to(device))
            for b, request in enumerate(requests)
            if request.params.min_tokens > 0
        ]

    @property
    def is_empty(self) -> bool:
        """Return whether every output has its ``min_tokens``."""
        return not any([request.num_output_tokens < request.params.min_tokens for _, request, _ in self._requests])

    def apply_(self, scores: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, counts: Sequence[int]) -> None:
        """Mask tokens in the first ``counts[b]`` rows of scores [B, M, V], in place. ``drafts`` are not read."""
        num_drafts = drafts_before_rows(parents, start, scores.shape[1], len(scores))
        for b, request, ending in self._requests:
            num_left = request.params.min_tokens - request.num_output_tokens
            for row, num_before in enumerate(num_drafts[b][: counts[b]]):
                if num_before < num_left:
                    scores[b, row].index_fill_(0, ending, -math.inf)
