"""Training loop: schedule, checkpoints, curve, progress. Independent of losses and models."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.files import replaced, write_whole
from outrider.heads.checkpoint import named_errors
from outrider.memory import require_disk
from outrider.progress import described, shown
from outrider.train import optim
from outrider.train.claims import advise_to_resume, damaged_file_errors, exclusive
from outrider.train.plan import TrainingPlan, step_seed
from outrider.train.precision import arithmetic_dtype
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

# (batch, step, pass_index, progress) -> the loss, and parts of it to plot (floats or 0-d tensors). ``pass_index``: index of the
# pass, which seeds its random numbers, because each pass of a step draws its own.
Loss = Callable[[Tensor, int, int, float], tuple[Tensor, dict[str, Any]]]
CHANGEABLE_SETTINGS = {  # settings that a resumed run may change, and their options
    "max_tokens": "--epochs",
    "batch_tokens": "--batch-tokens",
    "minutes": "--minutes",
    "muon_lr": "--muon-lr",
    "adam_lr": "--adam-lr",
}
WEIGHT_COPIES_PER_CHECKPOINT = 3  # the weights, and at most two states of the optimizer
MIN_TRAIN_TO_SAVE_RATIO = 20.0  # seconds of training before the next checkpoint per second of saving the last one


class Batches(Protocol):
    """Source of rows (ids or indices); `rows_drawn` is its whole state."""

    rows_drawn: dict[str, int]

    def batch(self, step: int, rows: int, seq_len: int) -> Tensor:
        """Return the batch of one step: [rows, ...]."""
        ...


def checkpoint_room(model: nn.Module, checkpoint: Path) -> int:
    """Return the free bytes that a run needs on disk: for one checkpoint that replaces the last one, or for the first two."""
    weights = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    return WEIGHT_COPIES_PER_CHECKPOINT * weights * (1 if checkpoint.exists() else 2)


@dataclass
class Trainer:
    """One run: trains until it ends or is interrupted, from its last checkpoint if there is one."""

    name: str
    model: nn.Module
    batches: Batches
    loss: Loss
    plan: TrainingPlan
    folder: Path
    evaluate: Callable[[bool], dict[str, Any]] | None = None  # argument: the long evaluation at the end

    def __post_init__(self) -> None:
        """Raise ``OutriderError`` for a damaged checkpoint."""
        self.device = next(self.model.parameters()).device
        self.optimizers = optim.build(self.model, self.plan, arithmetic_dtype(self.device))
        self.step = self.tokens = 0
        self.curve: list[dict[str, Any]] = []
        self.elapsed = 0.0  # seconds of all steps
        self.interrupted = False
        self._known: int | None = None  # time of the checkpoint that this run has read or written
        self._restore()

    @property
    def checkpoint(self) -> Path:
        """Return the file that a run resumes from."""
        return self.folder / "checkpoint.pt"

    @property
    def progress(self) -> float:
        """Return the finished share of the run: the larger of the token and the time fraction."""
        by_time = self.elapsed / (60 * self.plan.minutes) if self.plan.minutes else 0.0
        return min(1.0, max(self.tokens / self.plan.max_tokens, by_time))

    def _time_of_checkpoint(self) -> int | None:
        return self.checkpoint.stat().st_mtime_ns if self.checkpoint.exists() else None

    def _diverged(self, what: str) -> OutriderError:
        advice = "lower the learning rates (--muon-lr, --adam-lr)"
        if self.checkpoint.exists():
            advice += f"; {self.checkpoint} is the last good checkpoint, delete it to start again"
        return OutriderError(f"{what}: {advice}")

    def save(self) -> None:
        """Write a checkpoint atomically. Raises ``OutriderError`` if the last update spoiled the weights."""
        for name, weight in self.model.named_parameters():
            if not torch.isfinite(weight).all():
                raise self._diverged(f"non-finite values in {name} after step {self.step}")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rows_drawn": self.batches.rows_drawn,
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "curve": self.curve,
            "pace": {name: getattr(self.plan, name) for name in CHANGEABLE_SETTINGS},
        }
        with named_errors(self.checkpoint), replaced(self.checkpoint) as unfinished:
            torch.save(state, unfinished)
        self._known = self._time_of_checkpoint()
        write_whole(self.folder / "curve.json", json.dumps(self.curve))

    def _restore(self) -> None:
        """Continue from the checkpoint if there is one that this run does not know.

        Raises ``OutriderError`` if it is truncated or of another run.
        """
        if (found := self._time_of_checkpoint()) in (None, self._known):
            return
        self._known = found
        with damaged_file_errors(self.checkpoint):
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                planned = [group["base_lr"] for group in optimizer.param_groups]
                optimizer.load_state_dict(saved)
                for group, rate in zip(optimizer.param_groups, planned, strict=True):
                    group["base_lr"] = rate  # a lower rate may be why the run is resumed
            self.batches.rows_drawn.update(state["rows_drawn"])
            self.step, self.tokens, self.curve = state["step"], state["tokens"], state["curve"]
            self.elapsed = state["elapsed"]
            changed = [CHANGEABLE_SETTINGS[name] for name, value in state["pace"].items() if value != getattr(self.plan, name)]
        if changed:
            message = "%s: resuming with another %s: the weights will differ from those of a run in one piece"
            logger.warning(message, self.name, " and ".join(changed))

    def train_step(self) -> dict[str, Any]:
        """Run one update; return its point of the curve."""
        plan, before, started = self.plan, self.progress, time.monotonic()
        optim.set_lr(self.optimizers, optim.lr_factor(before, plan))
        seq_len = next(length for until, length in plan.seq_lens if before <= until)
        rows = max(1, plan.batch_tokens // seq_len)
        ids = self.batches.batch(self.step, rows, seq_len).to(self.device)
        torch.manual_seed(step_seed(plan.seed, self.step))  # for the model's dropout, also after an interruption
        per_pass = rows if plan.pass_tokens is None else max(1, plan.pass_tokens // seq_len)
        parts = self._accumulate(ids.chunk(math.ceil(rows / per_pass)), before)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += rows * seq_len
        self.elapsed += time.monotonic() - started
        point = {key: round(value, 4) for key, value in parts.items()}
        return {"step": self.step, "tokens": self.tokens, "seconds": round(self.elapsed, 1), **point}

    def _accumulate(self, passes: Sequence[Tensor], progress: float) -> dict[str, float]:
        """Add the gradients of a step's passes, each weighted by its share of the rows. Return the parts of the mean loss."""
        total, found = sum(map(len, passes)), defaultdict[str, float](float)
        for index, ids in enumerate(passes):
            share = len(ids) / total
            loss, parts = self.loss(ids, self.step, self.step * len(passes) + index, progress)
            if not torch.isfinite(loss):  # an update with it would spoil the next checkpoint
                raise self._diverged(f"non-finite loss {loss.item()} at step {self.step + 1}")
            (loss * share).backward()
            for key, value in parts.items():
                found[key] += share * float(value)
        return found

    def run(self) -> None:
        """Train until done. Raises ``KeyboardInterrupt`` if interrupted; a checkpoint is written either way.

        Raises ``OutriderError`` if the disk has no room for two checkpoints, of which one replaces the other.
        The final measurement follows the checkpoint, so that an interruption ends it at once and a resumed run repeats it.
        """
        with exclusive(self.folder):
            room = checkpoint_room(self.model, self.checkpoint)
            require_disk(self.folder, room, "the checkpoints take", "train a smaller model or give another folder (--work)")
            self._restore()  # another process may have trained since this run was made
            self._train()
            with advise_to_resume():
                if self.progress < 1.0 or self.interrupted:
                    raise KeyboardInterrupt
                logger.info("%s: measuring on held-out text", self.name)
                self.curve[-1] |= self._evaluate(final=True) | {"final": True}
                self.save()

    def _train(self) -> None:
        """Train until done or interrupted, and write a checkpoint."""
        evaluated = saved = self.elapsed
        seconds_of_save = 0.0
        self.model.train()
        previous = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        measured: dict[str, Any] = {}
        try:
            with shown(self.name) as report:
                while self.progress < 1.0 and not self.interrupted:
                    point = self.train_step()
                    if self.elapsed - evaluated > self.plan.eval_every_s:
                        measured = self._evaluate(final=False)
                        point |= measured
                        evaluated = self.elapsed
                    self.curve.append(point)
                    report(
                        self.progress, 1.0, described({key: point[key] for key in ("step", "loss") if key in point} | measured)
                    )
                    if self.elapsed - saved > max(self.plan.save_every_s, MIN_TRAIN_TO_SAVE_RATIO * seconds_of_save):
                        started = time.monotonic()
                        self.save()
                        seconds_of_save, saved = time.monotonic() - started, self.elapsed
                self.save()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _evaluate(self, final: bool) -> dict[str, Any]:
        if self.evaluate is None:
            return {}
        self.model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            found = self.evaluate(final)
        self.model.train()
        return found

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:  # a step of a large model takes a minute
            raise KeyboardInterrupt
        self.interrupted = True
        logger.warning("stopping after this step; again: at once, without the work since the last checkpoint")
