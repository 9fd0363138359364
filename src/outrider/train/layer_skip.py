"""Train a model for early exit (LayerSkip: Elhoushi et al. 2024, arXiv 2404.16710, section 4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.train.decoder import Decoder
from outrider.train.options import LayerSkip
from outrider.train.precision import arithmetic


def drop_rates(layers: int, max_drop: float, progress: float | None = None) -> list[float]:
    """Return the dropout of each layer: exponential in depth and, with ``progress`` (0 to 1), in time (equations 2 and 3)."""
    over_time = 1.0 if progress is None else math.exp(progress * math.log(2)) - 1
    span = max(layers - 1, 1)
    return [over_time * (math.exp(depth * math.log(2) / span) - 1) * max_drop for depth in range(layers)]


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
        rows = max(1, int(len(ids) * self.options.exit_share))
        with arithmetic(ids.device, self.dtype):
            states = self.decoder.hidden_states(text, self.runs(len(ids), pass_index, progress))
            losses = {count - 1: self.decoder.token_loss(states[-1], labels)}
            for depth in self.exits(step, progress):
                losses[depth] = self.decoder.token_loss(states[depth][:rows], labels[:rows])
        weights = exit_weights(count, self.options.exit_scale)
        total = sum(weights[depth] for depth in losses)
        loss = torch.stack([each * (weights[depth] / total) for depth, each in losses.items()]).sum()
        final = losses.pop(count - 1)
        return loss, {"loss": final.detach()} | {f"exit_{depth + 1}": each.detach() for depth, each in losses.items()}

    def exits(self, step: int, progress: float) -> list[int]:
        """Return the early exits trained in a step, as layer indices."""
        layers = range(1, len(self.decoder.layers) - 1)  # equation 6 gives the exit after the first layer weight 0
        open_now = [depth for depth in layers if progress >= self.options.grow_at or depth % 2 == 0]
        turns = max(1, min(self.options.rotation or len(open_now), len(open_now)))
        return [depth for place, depth in enumerate(open_now) if place % turns == step % turns]

    def runs(self, rows: int, pass_index: int, progress: float) -> Tensor:
        """Return bool [L, B]: the rows that each layer runs for; others are dropped, or the layer is not grown yet."""
        count = len(self.decoder.layers)
        rates = drop_rates(count, self.options.max_drop, progress if self.options.from_scratch else None)
        drawn = np.random.default_rng((self.seed, pass_index, 1)).random((count, 1 if self.options.whole_steps else rows))
        runs = torch.from_numpy(drawn >= np.array(rates)[:, None]).expand(count, rows).clone()
        if progress < self.options.grow_at:
            runs[1::2] = False
        return runs
