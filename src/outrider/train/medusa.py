"""Loss of Medusa heads on a frozen target, and accuracy per head (Cai et al. 2024, Medusa-1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.medusa import Accuracies, MedusaHeads
from outrider.train.capture import FeatureCache
from outrider.train.precision import arithmetic
from outrider.train.soft_entropy import SoftEntropy, soft_entropy, teacher_of

NUM_RANKS = 10  # candidates per head whose accuracy is measured


@dataclass
class MedusaLoss:
    """Cross entropy of head i against the target i + 1 positions later, weighted by ``decay`` ** i.

    The label is the target's distribution from its hidden states.
    """

    heads: MedusaHeads
    output: nn.Linear
    cache: FeatureCache
    layer: int  # index of the hidden state after the final norm
    decay: float = 0.8
    dtype: torch.dtype = torch.float32  # of the arithmetic
    entropy: SoftEntropy = soft_entropy

    def __call__(self, rows: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of the cached rows with these indices [B]."""
        ids, hidden = self._read(rows.tolist())
        count, length = self.heads.shape.num_heads, ids.shape[1]
        total, parts = hidden.new_zeros(()), dict[str, Any]()
        with arithmetic(ids.device, self.dtype):
            teacher = teacher_of(self.output(hidden[:, 1:]), self.heads.token_map)  # after each token except the first
            for head in range(count):
                # At token t the head predicts token t + head + 2, and entry i of the teacher is the target's after token i + 1.
                labels_at = slice(head, head + length - count - 1)
                own = self.heads.one(head, hidden[:, : length - count - 1])  # [B, T, V]
                loss, hit = self.entropy(own, teacher.at(labels_at))
                total = total + self.decay**head * loss
                parts |= {f"head_{head + 1}": loss.detach(), f"hit_{head + 1}": hit}
        return total, {"loss": total.detach(), **parts}

    def _read(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids, features = self.cache.read(rows, [self.layer], self.output.weight.device)
        return ids, features[self.layer]

    @torch.no_grad()
    def measure(self) -> Accuracies:
        """Return [head][rank]: share of held-out positions where the candidate of that rank is the target's likeliest token."""
        count, ranks = self.heads.shape.num_heads, min(NUM_RANKS, self.heads.shape.vocab_size)
        hits, total = torch.zeros(count, ranks), 0
        for row in self.cache.held_out:
            ids, hidden = self._read([row])
            target_tokens = self.output(hidden[0, 1:]).argmax(-1)
            places = ids.shape[1] - count - 1
            best = self.heads.candidates(hidden[0, :places], count, ranks)  # [T, heads, ranks]
            for head in range(count):
                hits[head] += (best[:, head] == target_tokens[head : head + places, None]).float().sum(0).cpu()
            total += places
        return tuple(tuple(round(value, 4) for value in row) for row in (hits / max(total, 1)).tolist())
