"""Cross entropy against a target's whole distribution, its gradient taken on the way.

A head's logits are as wide as the vocabulary at every place and step of depth: reading and writing them is most of what its
training does. So what the target says is made a distribution once for all steps, and one function finds the loss, the hits and
the gradient while the logits are at hand, instead of a second pass backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Said:
    """What the target says at places [B, T]."""

    probs: Tensor  # [B, T, Vd]: its distribution over the tokens that are drafted
    best: Tensor  # [B, T, 1]: the probability of its likeliest token; infinite where that one is not drafted

    def at(self, places: slice) -> Said:
        """Of these places only."""
        return Said(self.probs[:, places], self.best[:, places])


def said_by(target_logits: Tensor, draft_ids: Tensor | None = None) -> Said:
    """Of logits [B, T, V], of which the tokens ``draft_ids`` [Vd] are drafted (None: all)."""
    wanted = target_logits if draft_ids is None else target_logits[..., draft_ids]
    probs = wanted.softmax(-1)
    best = probs.amax(-1, keepdim=True)
    if draft_ids is not None:
        is_drafted = wanted.amax(-1, keepdim=True) == target_logits.amax(-1, keepdim=True)
        best = best.masked_fill(~is_drafted, float("inf"))
    return Said(probs, best)


def with_gradient(logits: Tensor, probs: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross entropy of logits [B, T, Vd], the share of places where both name the same token, the gradient [B, T, Vd].

    Of tokens that are equally likely any one counts.
    """
    numbers, wanted = logits.float(), probs.float()
    highest = numbers.amax(-1, keepdim=True)
    hits = numbers.masked_fill(probs < best, float("-inf")).amax(-1, keepdim=True) == highest
    shares = (numbers - highest).exp()
    total = shares.sum(-1, keepdim=True)
    entropy = highest + total.log() - (wanted * numbers).sum(-1, keepdim=True)
    gradient = (shares / total - wanted) / highest.numel()
    return entropy.mean(), hits.float().mean(), gradient.to(logits.dtype)


class _SoftEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, said: Said, kernel: Kernel) -> tuple[Tensor, Tensor]:
        entropy, hits, gradient = kernel(logits, said.probs, said.best)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return entropy, hits

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * slope, None, None


SoftEntropy = Callable[[Tensor, Said], tuple[Tensor, Tensor]]


def soft_entropy(logits: Tensor, said: Said, kernel: Kernel = with_gradient) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of logits [B, T, Vd] against what the target says, and the share of equal greedy tokens."""
    entropy, hits = _SoftEntropy.apply(logits, said, kernel)  # type: ignore[no-untyped-call]
    return entropy, hits


def compiled() -> SoftEntropy:
    """The same as one loop over the vocabulary: a minute of compiling that pays on longer runs."""
    return partial(soft_entropy, kernel=torch.compile(with_gradient, dynamic=False))
