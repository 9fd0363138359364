"""Training a model so that its first layers draft for it (LayerSkip: Elhoushi et al. 2024, arXiv 2404.16710, section 4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.train.decoder import Decoder
from outrider.train.precision import arithmetic


@dataclass(frozen=True)
class LayerSkip:
    """Layer dropout that grows with depth, the early-exit loss, and which exits a step trains.

    With ``grow_at`` only every second layer is trained until that share of the run, for a model that begins from nothing. The
    others start as the identity (their output projections are zero): half the work, and adding them changes nothing then.
    """

    max_drop: float = 0.1  # of the last layer (p_max)
    exit_scale: float = 1.0  # e_scale of equation 6; the larger, the sooner exits agree and the more the last layer gives up
    rotation: int | None = None  # every so-manyth exit in a step, in rotation (C_rot,R); None: one exit a step
    exit_share: float = 1.0  # of the rows that the exit loss looks at
    from_scratch: bool = False  # dropout grows over the run, too: for a model that was not trained before
    whole_steps: bool = (
        False  # a layer is dropped for all rows of a step at once: steps keep the one shape compiled layers want
    )
    grow_at: float = 0.0


def drop_rates(layers: int, max_drop: float, progress: float | None = None) -> list[float]:
    """Dropout of each layer: exponential in depth and, where ``progress`` (0 to 1) is given, in time (equations 2 and 3)."""
    over_time = 1.0 if progress is None else math.exp(progress * math.log(2)) - 1
    span = max(layers - 1, 1)
    return [over_time * (math.exp(depth * math.log(2) / span) - 1) * max_drop for depth in range(layers)]


def exit_weights(layers: int, scale: float) -> list[float]:
    """Loss weight of each exit, growing with depth; the last is the model itself (equation 6)."""
    early = [scale * depth * (depth + 1) / 2 for depth in range(layers - 1)]
    return [*early, layers - 1 + scale * sum(range(layers - 1))]


@dataclass
class EarlyExitLoss:
    """Cross entropy with layer dropout and early exits in rotation, by the model's own final norm and head.

    The weights of the exits active in a step add up to one with that of the last layer, which is always active.
    """

    decoder: Decoder
    how: LayerSkip
    dtype: torch.dtype = torch.float32  # of the arithmetic
    seed: int = 0

    def __call__(self, ids: Tensor, step: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Loss of ids [B, S + 1]."""
        text, labels, count = ids[:, :-1], ids[:, 1:], len(self.decoder.layers)
        rows = max(1, int(len(ids) * self.how.exit_share))
        with arithmetic(ids.device, self.dtype):
            states = self.decoder.hidden_states(text, self.runs(len(ids), step, progress))
            losses = {count - 1: self.decoder.token_loss(states[-1], labels)}
            for depth in self.exits(step, progress):
                losses[depth] = self.decoder.token_loss(states[depth][:rows], labels[:rows])
        weights = exit_weights(count, self.how.exit_scale)
        total = sum(weights[depth] for depth in losses)
        loss = torch.stack([each * (weights[depth] / total) for depth, each in losses.items()]).sum()
        final = losses.pop(count - 1)
        return loss, {"loss": final.detach()} | {f"exit_{depth + 1}": each.detach() for depth, each in losses.items()}

    def exits(self, step: int, progress: float) -> list[int]:
        """The early exits, counted as layers from 0, that a step trains."""
        layers = range(1, len(self.decoder.layers) - 1)  # equation 6 gives an exit behind the first layer no weight
        open_now = [depth for depth in layers if progress >= self.how.grow_at or depth % 2 == 0]
        turns = max(1, min(self.how.rotation or len(open_now), len(open_now)))
        return [depth for place, depth in enumerate(open_now) if place % turns == step % turns]

    def runs(self, rows: int, step: int, progress: float) -> Tensor:
        """Which layers a step runs for which rows: bool [L, B]; the others are dropped by chance, or not grown yet."""
        count = len(self.decoder.layers)
        rates = drop_rates(count, self.how.max_drop, progress if self.how.from_scratch else None)
        drawn = np.random.default_rng((self.seed, step, 1)).random((count, 1 if self.how.whole_steps else rows))
        runs = torch.from_numpy(drawn >= np.array(rates)[:, None]).expand(count, rows).clone()
        if progress < self.how.grow_at:
            runs[1::2] = False
        return runs
