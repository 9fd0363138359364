"""Measure the time of each phase of a step. ``ClockedRunner`` and guard.py enter the phases: the round has no timing code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from outrider.runner import ModelRunner
from outrider.runner.graphs import wait_for
from outrider.types import Context, PhaseTimes, Proposal, Scores, Verdict


class PhaseClock:
    """Add elapsed time to the current phase, a field of ``PhaseTimes``."""

    def __init__(self, device: torch.device) -> None:
        """``device``: the target's."""
        self._device = device
        self._times, self._since = PhaseTimes(), 0.0
        self._phase: str | None = None  # None: the time is not counted

    def enter(self, phase: str | None) -> None:
        """End the current phase and start ``phase``."""
        now = perf_counter()
        if self._phase is not None:
            setattr(self._times, self._phase, getattr(self._times, self._phase) + now - self._since)
        self._phase, self._since = phase, now

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Enter a phase for the block, then return to the previous one."""
        before = self._phase
        self.enter(phase)
        try:
            yield
            wait_for(self._device)  # otherwise later phases would be charged with this one's work
        finally:
            self.enter(before)

    def take(self) -> PhaseTimes:
        """Return the times since the last call."""
        self.enter(self._phase)
        times, self._times = self._times, PhaseTimes()
        return times


class ClockedRunner:
    """A runner whose scoring is timed. The time between ``score`` and ``commit`` counts as verification."""

    def __init__(self, inner: ModelRunner, clock: PhaseClock) -> None:
        self._inner, self._clock = inner, clock

    def score(self, context: Context, proposal: Proposal, hidden: tuple[int, ...]) -> Scores:
        with self._clock.phase("score"):
            scores = self._inner.score(context, proposal, hidden)
        self._clock.enter("verify")
        return scores

    def commit(self, context: Context, verdict: Verdict) -> None:
        self._clock.enter("host")
        self._inner.commit(context, verdict)
