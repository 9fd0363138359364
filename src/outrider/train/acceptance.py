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


def mean_acceptance_length(accepted: Tensor, k: int) -> float:
    """Return the expected tokens per round of k drafts: 1 + sum over j of P(j in a row are accepted).

    ``accepted`` [B, S] are probabilities per position; every position followed by k others starts a round, so that easy and
    hard passages keep their correlation instead of being treated as independent positions.
    """
    if accepted.shape[1] < k:
        return float("nan")
    return 1 + float(accepted.unfold(1, k, 1).cumprod(-1).mean((0, 1)).sum())


def summary(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return mean acceptance and mean acceptance length, greedy and sampled, over batches of ``acceptance`` results."""
    found: dict[str, Any] = {}
    for name, parts in zip(("greedy", "sampled"), zip(*pairs, strict=True), strict=True):
        accepted = torch.cat(parts).cpu()
        lengths = {k: round(mean_acceptance_length(accepted, k), 3) for k in LENGTHS if k < accepted.shape[1]}
        found[name] = {"acceptance": round(float(accepted.mean()), 4), "mean_acceptance_length": lengths}
    return found


def chain_summary(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return the values of ``summary`` for rounds of K drafts, [B, A, K] each, and the mean acceptance of each depth."""
    found: dict[str, Any] = {}
    for name, parts in zip(("greedy", "sampled"), zip(*pairs, strict=True), strict=True):
        accepted = torch.cat(parts).flatten(0, 1).cpu()
        alive = accepted.cumprod(-1).mean(0)
        lengths = {k: round(1 + float(alive[:k].sum()), 3) for k in LENGTHS if k <= accepted.shape[1]}
        by_depth = [round(float(mean), 4) for mean in accepted.mean(0)]
        found[name] = {"acceptance": round(float(accepted.mean()), 4), "by_depth": by_depth, "mean_acceptance_length": lengths}
    return found
