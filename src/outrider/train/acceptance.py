"""How much of a draft would be accepted, computed from both models' logits over a text; nothing is generated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LENGTHS = (1, 2, 3, 4, 6, 8)  # of drafts, for which a mean acceptance length is told


def acceptance(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """At each place of [..., V]: whether greedy decoding accepts, and the chance that sampling at temperature 1 does."""
    size = min(target_logits.shape[-1], draft_logits.shape[-1])
    target_logits, draft_logits = target_logits[..., :size].float(), draft_logits[..., :size].float()
    overlap = torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1)
    return (target_logits.argmax(-1) == draft_logits.argmax(-1)).float(), overlap


def expected_tau(accepted: Tensor, k: int) -> float:
    """Mean acceptance length with k drafts a round: 1 + the sum over j of the chance that j in a row are accepted.

    ``accepted`` [B, S] are chances place by place; every place that k places follow begins a round, so that good and bad
    stretches of a text count as they come and not as if places were independent.
    """
    places = accepted.shape[1] - k + 1
    if places < 1:
        return float("nan")
    alive, total = torch.ones(len(accepted), places), 1.0
    for ahead in range(k):
        alive = alive * accepted[:, ahead : ahead + places]
        total += float(alive.mean())
    return total


def summary(pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Mean acceptance and mean acceptance length, greedy and sampled, over batches of what ``acceptance`` gives."""
    greedy, sampled = (torch.cat(each).cpu() for each in zip(*pairs, strict=True))
    found: dict[str, Any] = {}
    for name, accepted in (("greedy", greedy), ("sampled", sampled)):
        lengths = [k for k in LENGTHS if k < accepted.shape[1]]
        tau = {k: round(expected_tau(accepted, k), 3) for k in lengths}
        found[name] = {"acceptance": round(float(accepted.mean()), 4), "expected_tau": tau}
    return found
