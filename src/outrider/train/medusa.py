"""Loss of Medusa heads on a frozen target, and accuracy per head (Cai et al. 2024, Medusa-1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.medusa import Accuracies, MedusaHeads
from outrider.train.head_loss import HeadLoss, numbered, weighted
from outrider.train.precision import arithmetic
from outrider.train.soft_entropy import teacher_of

DECAY = 0.8  # weight of each head relative to the one before
NUM_RANKS = 10  # candidates per head whose accuracy is measured


@dataclass
class MedusaLoss(HeadLoss):
    """Cross entropy of head i against the target i + 1 positions later, weighted by ``DECAY`` ** i.

    The label is the target's distribution from its hidden states.
    """

    head: MedusaHeads
    output: nn.Linear

    def __call__(self, rows: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        ids, _, hidden = self.read(rows.tolist())
        count, length = self.head.shape.num_heads, ids.shape[1]
        losses, hits = list[Tensor](), list[Tensor]()
        with arithmetic(ids.device, self.dtype):
            teacher = teacher_of(self.output(hidden[:, 1:]), self.head.token_map)  # after each token except the first
            for head in range(count):
                # At token t the head predicts token t + head + 2, and entry i of the teacher is the target's after token i + 1.
                labels_at = slice(head, head + length - count - 1)
                own = self.head.one(head, hidden[:, : length - count - 1])  # [B, T, V]
                loss, hit = self.entropy(own, teacher.at(labels_at))
                losses.append(loss)
                hits.append(hit)
        return weighted(losses, hits, [DECAY**head for head in range(count)], "head")

    @torch.no_grad()
    def measure(self) -> tuple[dict[str, Any], Accuracies]:
        """Return [head][rank]: share of held-out positions where the candidate of that rank is the target's likeliest token."""
        count, ranks = self.head.shape.num_heads, min(NUM_RANKS, self.head.shape.vocab_size)
        hits, total = torch.zeros(count, ranks), 0
        for row in self.cache.held_out:
            ids, _, hidden = self.read([row])
            target_tokens = self.output(hidden[0, 1:]).argmax(-1)
            places = ids.shape[1] - count - 1
            best = self.head.candidates(hidden[0, :places], count, ranks)  # [T, heads, ranks]
            for head in range(count):
                hits[head] += (best[:, head] == target_tokens[head : head + places, None]).float().sum(0).cpu()
            total += places
        found = tuple(tuple(round(value, 4) for value in row) for row in (hits / max(total, 1)).tolist())
        return numbered("held", [row[0] for row in found]), found
