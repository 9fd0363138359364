"""Cross entropy against a target's whole distribution, with the gradient computed in the forward pass.

Reading and writing vocabulary-wide logits at every position and depth dominates the training of heads. So the target's
distribution is computed once for all depths, and one function returns loss, hits and gradient while the logits are in cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 19  # numbers
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Teacher:
    """The target's distributions at positions [B, T]."""

    probs: Tensor  # [B, T, Vd]: its distribution over the draft vocabulary
    best: Tensor  # [B, T, 1]: probability of its likeliest token; infinite if that is outside the draft vocabulary

    def at(self, places: slice) -> Teacher:
        """Return these positions only."""
        return Teacher(self.probs[:, places], self.best[:, places])


def teacher_of(target_logits: Tensor, draft_ids: Tensor | None = None) -> Teacher:
    """Return the distributions of logits [B, T, V] over the draft vocabulary ``draft_ids`` [Vd] (None: all)."""
    wanted = target_logits if draft_ids is None else target_logits[..., draft_ids]
    probs = wanted.softmax(-1)
    best = probs.amax(-1, keepdim=True)
    if draft_ids is not None:
        is_drafted = wanted.amax(-1, keepdim=True) == target_logits.amax(-1, keepdim=True)
        best = best.masked_fill(~is_drafted, float("inf"))
    return Teacher(probs, best)


def with_gradient(logits: Tensor, probs: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean cross entropy of logits [B, T, Vd], the share of equal likeliest tokens, and the gradient [B, T, Vd].

    Ties count as equal.
    """
    numbers, wanted = logits.float(), probs.float()
    highest = numbers.amax(-1, keepdim=True)
    hits = numbers.masked_fill(probs < best, float("-inf")).amax(-1, keepdim=True) == highest
    shares = (numbers - highest).exp()
    total = shares.sum(-1, keepdim=True)
    entropy = highest + total.log() - (wanted * numbers).sum(-1, keepdim=True)
    gradient = (shares / total - wanted) / highest.numel()
    return entropy.mean(), hits.float().mean(), gradient.to(logits.dtype)


def in_blocks(logits: Tensor, probs: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of ``with_gradient``, computed for a few positions at a time on a CPU, whose caches they then fit."""
    if logits.device.type != "cpu" or logits.numel() <= BLOCK:
        return with_gradient(logits, probs, best)
    count, gradient, total = max(1, BLOCK // logits.shape[-1]), torch.empty_like(logits), torch.zeros(2)
    for row in zip(logits, probs, best, gradient, strict=True):
        for some, wanted, highest, slope in zip(*(each.split(count) for each in row), strict=True):
            share = len(some) / logits.shape[:-1].numel()
            entropy, hits, found = with_gradient(some, wanted, highest)
            total += share * torch.stack((entropy, hits))
            torch.mul(found, share, out=slope)
    return total[0], total[1], gradient


class _SoftEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Teacher, kernel: Kernel) -> tuple[Tensor, Tensor]:
        entropy, hits, gradient = kernel(logits, teacher.probs, teacher.best)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return entropy, hits

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * slope, None, None


SoftEntropy = Callable[[Tensor, Teacher], tuple[Tensor, Tensor]]


def soft_entropy(logits: Tensor, teacher: Teacher, kernel: Kernel = in_blocks) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of logits [B, T, Vd] against the target, and the share of equal greedy tokens."""
    entropy, hits = _SoftEntropy.apply(logits, teacher, kernel)  # type: ignore[no-untyped-call]
    return entropy, hits


def compiled() -> SoftEntropy:
    """Return the compiled version: one loop over the vocabulary, a minute of compiling that pays on longer runs."""
    return partial(soft_entropy, kernel=torch.compile(with_gradient, dynamic=False))
