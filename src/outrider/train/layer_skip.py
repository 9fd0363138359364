"""Train a model for early exit (LayerSkip: Elhoushi et al. 2024, arXiv 2404.16710, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.train.decoder import Decoder
from outrider.train.options import LayerSkip
from outrider.train.precision import arithmetic


def drop_rates(layers: int, max_drop: float) -> list[float]:
    """Return the dropout of each layer, exponential in depth (equation 2)."""
    span = max(layers - 1, 1)
    return [(math.exp(depth * math.log(2) / span) - 1) * max_drop for depth in range(layers)]


def exit_weights(layers: int, scale: float) -> list[float]:
    """Return the loss weight of each exit, increasing with depth; the last is the model itself (equation 6)."""
    early = [scale * depth * (depth + 1) / 2 for depth in range(layers - 1)]
    return [*early, layers - 1 + scale * sum(range(layers - 1))]


@dataclass
class EarlyExitLoss:
    """Cross entropy with layer dropout and early exits in rotation, with the model's final norm and head.

    The weights active in a step, including the last layer's, are normalised to sum to one.
    """

    decoder: Decoder
    options: LayerSkip
    dtype: torch.dtype = torch.float32  # of the arithmetic
    seed: int = 0

    def __call__(self, ids: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of ids [B, S + 1]."""
        text, labels, count = ids[:, :-1], ids[:, 1:], len(self.decoder.layers)
        with arithmetic(ids.device, self.dtype):
            states = self.decoder.hidden_states(text, self.runs(len(ids), pass_index, progress))
            losses = {count - 1: self.decoder.token_loss(states[-1], labels)}
            for depth in self.exits(step, progress):
                losses[depth] = self.exit_loss(states[depth], labels)
        weights = exit_weights(count, self.options.exit_scale)
        total = sum(weights[depth] for depth in losses)
        loss = torch.stack([each * (weights[depth] / total) for depth, each in losses.items()]).sum()
        final = losses.pop(count - 1)
        return loss, {"loss": final.detach()} | {f"exit_{depth + 1}": each.detach() for depth, each in losses.items()}

    def exit_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of an early exit with these hidden states [B, S, H]."""
        return self.decoder.token_loss(hidden, labels)

    def exits(self, step: int, progress: float) -> list[int]:
        """Return the early exits trained in a step, as layer indices."""
        # Equation 6 gives the exit after the first layer weight 0.
        return in_turn(range(1, len(self.decoder.layers) - 1), self.options.rotation, step)

    def runs(self, rows: int, pass_index: int, progress: float) -> Tensor:
        """Return bool [L, B]: the rows that each layer runs for; others are dropped."""
        rates = drop_rates(len(self.decoder.layers), self.options.max_drop)
        drawn = np.random.default_rng((self.seed, pass_index, 1)).random((len(rates), rows))
        return torch.from_numpy(drawn >= np.array(rates)[:, None])


def in_turn(depths: Sequence[int], rotation: int | None, step: int) -> list[int]:
    """Return every ``rotation``-th of the exits, other ones in the next step (None: one exit)."""
    turns = max(1, min(rotation or len(depths), len(depths)))
    return list(depths[step % turns :: turns])
