"""Logits -> probabilities -> token: one place, for draft and target alike.  (INTERFACE SKETCH, being implemented)"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.types import Request


class Sampler:
    """The sampler set of B requests, built once per batch composition. ``start``: logits[:, j] follows draft start + j - 1."""

    def __init__(self, requests: Sequence[Request], vocab_size: int, device: torch.device | str = "cpu", coupled: bool = False) -> None: ...

    @property
    def is_deterministic(self) -> bool:
        """Every row is greedy, or noise is coupled to (seed, position): tokens() says it all, no coin is needed."""
        raise NotImplementedError

    def tokens(self, logits: Tensor, drafts: Tensor | None = None, parents: Tensor | None = None, start: int = 0) -> Tensor:
        """[B, M, V] -> int64 [B, M]."""
        raise NotImplementedError

    def probs(self, logits: Tensor, drafts: Tensor | None = None, parents: Tensor | None = None, start: int = 0) -> Tensor:
        """[B, M, V] -> float32 [B, M, V]; greedy rows are one-hots."""
        raise NotImplementedError

    def categorical(self, probs: Tensor) -> Tensor:
        """types.Randomness with each request's own generator."""
        raise NotImplementedError

    def bernoulli(self, probs: Tensor) -> Tensor:
        raise NotImplementedError
