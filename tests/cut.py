"""Interrupt training runs after a number of steps."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.train.trainer import Trainer


def cut_after(steps: int, trainer: Trainer) -> Trainer:
    """Return the trainer, whose next run is interrupted, like by Ctrl-C, at the end of this many steps."""
    whole, last = trainer.train_step, trainer.step + steps

    def train_step() -> dict[str, Any]:
        point = whole()
        trainer.interrupted = trainer.step >= last
        return point

    trainer.train_step = train_step  # type: ignore[method-assign]
    return trainer


def run_until(steps: int, trainer: Trainer) -> None:
    """Run the trainer, and interrupt it at the end of this many steps."""
    with pytest.raises(KeyboardInterrupt):
        cut_after(steps, trainer).run()
