"""Training loop: schedule, checkpoints, curve, progress. Independent of losses and models."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.files import write_whole
from outrider.heads.checkpoint import replaced
from outrider.train import optim
from outrider.train.clock import MAX_GAP_S, RunningClock
from outrider.train.plan import Plan
from outrider.train.precision import run_dtype
from outrider.train.progress import Progress
from outrider.types import OutriderError, first_line, is_out_of_memory

logger = logging.getLogger(__name__)


class Batches(Protocol):
    """Source of rows (ids or indices); `rows_drawn` is its whole state."""

    rows_drawn: dict[str, int]

    def batch(self, step: int, rows: int, seq_len: int) -> Tensor:
        """Return the batch of one step: [rows, ...]."""
        ...


class Loss(Protocol):
    """Loss of one batch, with parts to plot (floats or 0-d tensors)."""

    def __call__(self, ids: Tensor, step: int, progress: float, /) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a batch."""
        ...


@dataclass
class Job:
    """One run: model, data, loss, evaluation and folder."""

    name: str
    model: nn.Module
    batches: Batches
    loss: Loss
    plan: Plan
    folder: Path
    evaluate: Callable[[bool], dict[str, Any]] | None = None  # argument: the long evaluation at the end


class Trainer:
    """Runs a job until it ends or is interrupted, from its last checkpoint if there is one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = next(job.model.parameters()).device
        self.optimizers = optim.build(job.model, job.plan, run_dtype(job.folder, self.device))
        self.step = self.tokens = 0
        self.curve: list[dict[str, Any]] = []
        self.max_gap = math.inf if job.plan.count_pauses else MAX_GAP_S
        self.clock = RunningClock(0.0, self.max_gap)
        self.interrupted = False
        if self.checkpoint.exists():
            self._restore()

    @property
    def checkpoint(self) -> Path:
        """Return the file that a run resumes from."""
        return self.job.folder / "checkpoint.pt"

    @property
    def progress(self) -> float:
        """Return the finished share of the run: the larger of the token and the time fraction."""
        plan = self.job.plan
        by_time = self.clock.elapsed / (60 * plan.minutes) if plan.minutes else 0.0
        return min(1.0, max(self.tokens / plan.max_tokens, by_time))

    def save(self) -> None:
        """Write a checkpoint atomically."""
        state = {
            "model": self.job.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rows_drawn": self.job.batches.rows_drawn,
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.clock.elapsed,
            "curve": self.curve,
        }
        with replaced(self.checkpoint) as unfinished:
            torch.save(state, unfinished)
        write_whole(self.job.folder / "curve.json", json.dumps(self.curve))

    def _restore(self) -> None:
        """Continue from the checkpoint. Raises ``OutriderError`` if it is truncated or of another run."""
        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            self.job.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                planned = [group["base_lr"] for group in optimizer.param_groups]
                optimizer.load_state_dict(saved)
                for group, rate in zip(optimizer.param_groups, planned, strict=True):
                    group["base_lr"] = rate  # a lower rate may be why the run is resumed
            self.job.batches.rows_drawn.update(state["rows_drawn"])
            self.step, self.tokens, self.curve = state["step"], state["tokens"], state["curve"]
            self.clock = RunningClock(state["elapsed"], self.max_gap)
        except Exception as error:  # damaged and foreign files raise many kinds of exceptions
            if isinstance(error, OSError) or is_out_of_memory(error):
                raise
            why = first_line(error)
            raise OutriderError(f"cannot resume from {self.checkpoint} ({why}): delete it to start again") from error

    def train_step(self) -> dict[str, Any]:
        """Run one update; return its point of the curve."""
        plan, before = self.job.plan, self.progress
        optim.set_lr(self.optimizers, optim.lr_factor(before, plan))
        seq_len = next(length for until, length in plan.seq_lens if before <= until)
        rows = max(1, plan.batch_tokens // seq_len)
        ids = self.job.batches.batch(self.step, rows, seq_len).to(self.device)
        torch.manual_seed(plan.seed * 1_000_003 + self.step)  # for the model's dropout, also after an interruption
        loss, parts = self.job.loss(ids, self.step, before)
        if not torch.isfinite(loss):  # an update with it would spoil the next checkpoint
            raise OutriderError(
                f"non-finite loss {loss.item()} at step {self.step + 1}: lower the learning rates (--muon-lr, --adam-lr);"
                f" {self.checkpoint} is the last good checkpoint, delete it to start again"
            )
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += rows * seq_len
        self.clock.tick()
        point = {key: round(float(value), 4) for key, value in parts.items()}
        return {"step": self.step, "tokens": self.tokens, "seconds": round(self.clock.elapsed, 1), **point}

    def run(self, max_steps: int | None = None) -> bool:
        """Train until done (True), or interrupted or out of steps (False); a checkpoint is written either way.

        The final measurement follows the checkpoint, so that an interruption ends it at once and a resumed run repeats it.
        """
        plan = self.job.plan
        previous = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        steps_left = max_steps if max_steps is not None else -1
        evaluated = saved = self.clock.elapsed
        self.job.model.train()
        try:
            with Progress(self.job.name) as bar:
                while self.progress < 1.0 and not self.interrupted and steps_left != 0:
                    point = self.train_step()
                    steps_left -= 1
                    if self.clock.elapsed - evaluated > plan.eval_every_s:
                        point |= self._evaluate(final=False)
                        evaluated = self.clock.elapsed
                    self.curve.append(point)
                    bar.update(self.progress, point)
                    if self.clock.elapsed - saved > plan.save_every_s:
                        self.save()
                        saved = self.clock.elapsed
                self.save()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.progress < 1.0 or self.interrupted:
            return False
        if "final" not in self.curve[-1]:
            logger.info("%s: measuring on held-out text", self.job.name)
            self.curve[-1] |= self._evaluate(final=True) | {"final": True}
            self.save()
        return True

    def _evaluate(self, final: bool) -> dict[str, Any]:
        if self.job.evaluate is None:
            return {}
        self.job.model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = self.job.evaluate(final)
        self.job.model.train()
        return found

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
