"""Expected acceptance of a draft from both models' logits over a text, without generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

ROWS = 2  # held-out rows per pass: logits of a large vocabulary are wide
LENGTHS = (1, 2, 3, 4, 6, 8)  # draft lengths for which a mean acceptance length is reported


def acceptance(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return per position of [..., V] whether greedy decoding accepts, and the acceptance probability at temperature 1."""
    size = min(target_logits.shape[-1], draft_logits.shape[-1])
    target_logits, draft_logits = target_logits[..., :size].float(), draft_logits[..., :size].float()
    overlap = torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1)
    return (target_logits.argmax(-1) == draft_logits.argmax(-1)).float(), overlap


def in_rounds(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, ...]:
    """Return ``acceptance`` [B, S] of rounds [B, N, K]: each position followed by enough others starts one.

    Easy and hard passages thus keep their correlation instead of being treated as independent positions.
    """
    return tuple(each.unfold(1, min(max(LENGTHS), each.shape[1]), 1) for each in acceptance(target_logits, draft_logits))


def summary(batches: Iterable[tuple[Tensor, ...]]) -> dict[str, Any]:
    """Return the acceptance of rounds of K drafts, greedy and sampled: its mean, by depth, and as mean acceptance lengths.

    ``batches``: greedy and sampled acceptance [..., K] of rounds. A mean acceptance length is the expected number of tokens of
    a round of k drafts: 1 + sum over j of P(j in a row are accepted).
    """
    found: dict[str, Any] = {}
    for name, parts in zip(("greedy", "sampled"), zip(*batches, strict=True), strict=True):
        accepted = torch.cat([part.flatten(0, -2) for part in parts]).cpu()
        alive, size = accepted.cumprod(-1).mean(0), accepted.shape[1]
        found[name] = {
            "acceptance": round(float(accepted.mean()), 4),
            "by_depth": [round(float(mean), 4) for mean in accepted.mean(0)],
            "mean_acceptance_length": {k: round(1 + float(alive[:k].sum()), 3) for k in sorted({*LENGTHS, size}) if k <= size},
        }
    return found
