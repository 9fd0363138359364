"""The target's loss: next token at the last layer, plus LayerSkip's dropout and early exits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from . import model as models
from .config import LayerSkip


@dataclass
class TargetLoss:
    """Cross entropy with layer dropout and one early exit a step in rotation (Elhoushi et al. 2024).

    The exits use the model's own final norm and head; an exit's weight grows with its depth and the
    weights of the exits active in a step add up to one.
    """

    model: LlamaForCausalLM
    layer_skip: LayerSkip
    dtype: torch.dtype
    seed: int
    token_loss: models.Compiled = models.token_loss

    def __call__(self, ids: Tensor, step: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Loss of ids [B, S + 1]."""
        layers = len(self.model.model.layers)
        skipped = self.skipped(layers, step, progress)
        exits = [depth for depth in range(1, layers - 1) if progress >= self.layer_skip.grow_at or depth % 2 == 0]
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            states = models.hidden_states(self.model, ids[:, :-1], skipped)
            final = self.token_loss(self.model, states[-1], ids[:, 1:])
            if not exits:
                return final, {"loss": final.detach()}
            depth = exits[step % len(exits)]
            rows = max(1, int(len(ids) * self.layer_skip.exit_share))
            early = self.token_loss(self.model, states[depth][:rows], ids[:rows, 1:])
        weights = models.exit_weights(layers, self.layer_skip.exit_scale)
        share = weights[depth] / (weights[depth] + weights[-1])
        loss = (1 - share) * final + share * early
        return loss, {"loss": final.detach(), f"exit_{depth + 1}": early.detach()}

    def skipped(self, layers: int, step: int, progress: float) -> set[int]:
        """The layers this step leaves out: dropped by chance, or not grown yet."""
        rng = np.random.default_rng((self.seed, step, 1))
        rates = models.drop_rates(layers, self.layer_skip.max_drop, progress)
        dropped = {depth for depth, rate in enumerate(rates) if rng.random() < rate}
        if progress < self.layer_skip.grow_at:
            dropped |= set(range(1, layers, 2))
        return dropped
