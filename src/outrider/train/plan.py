"""Training length and learning rates."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 1729


def step_seed(seed: int, step: int) -> int:
    """Return the seed of the draws of one step or pass, so that a resumed run draws what an uninterrupted one does."""
    return seed * 1_000_003 + step


@dataclass(frozen=True)
class TrainingPlan:
    """Training length and learning rates of one model.

    Progress runs from 0 to 1 and is the larger of the token and the time fraction; `seq_lens` holds
    (progress until which it is used, sequence length) pairs in order.
    """

    max_tokens: int
    batch_tokens: int
    seq_lens: tuple[tuple[float, int], ...]
    minutes: float | None = None
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    warmup: float = 0.01
    decay: float = 0.45  # share of the run in which the learning rates fall linearly
    end: float = 0.01  # lowest factor of the learning rates in the decay
    eval_every_s: float = 600.0
    save_every_s: float = 120.0
    seed: int = SEED
    pass_tokens: int | None = None  # maximum per pass, or one row: a step adds the gradients of its passes; None: no maximum
