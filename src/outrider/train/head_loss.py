"""What losses of heads on a frozen target have in common: cached rows, and a mean over depths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.train.capture import FeatureCache
from outrider.train.soft_entropy import SoftEntropy, soft_entropy

ALL_SHOWN = 6  # depths, each with a value in the training curve; if there are more, only those at powers of two


@dataclass
class HeadLoss(ABC):
    """Loss of ``head``, and its measurement. ``last``: index of the hidden state after the final norm."""

    head: Any
    cache: FeatureCache
    last: int
    _: KW_ONLY
    seed: int = 0
    dtype: torch.dtype = torch.float32  # of the arithmetic
    entropy: SoftEntropy = soft_entropy

    @abstractmethod
    def __call__(self, rows: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of the cached rows with these indices [B], and parts of it to plot."""

    @abstractmethod
    def measure(self) -> tuple[dict[str, Any], Any]:
        """Return values for the training curve, and all measurements on held-out rows."""

    def read(self, rows: Sequence[int]) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return tokens [R, S], the head's input features, each [R, S, H], and the target's last features, on its device."""
        states = getattr(self.head, "hidden_states", ())
        ids, found = self.cache.read(rows, sorted({*states, self.last}), next(self.head.parameters()).device)
        return ids, [found[layer] for layer in states], found[self.last]


def weighted(
    losses: Sequence[Tensor], hits: Sequence[Tensor], weights: Sequence[float], name: str
) -> tuple[Tensor, dict[str, Any]]:
    """Return the mean of the losses of all depths with these weights, and parts of it to plot.

    ``hits``: shares of equal likeliest tokens; ``name``: what the curve calls a depth.
    """
    total = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
    parts = numbered(name, [loss.detach() for loss in losses]) | numbered("hit", hits)
    return total, {"loss": total.detach(), **parts}


def numbered(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return the values of the depths for the training curve, named by their numbers from 1 on."""
    numbers = [number for number in range(1, len(values) + 1) if len(values) <= ALL_SHOWN or number & (number - 1) == 0]
    return {f"{name}_{number}": values[number - 1] for number in numbers}
