"""Time that a run really had: pauses (a stopped process, a laptop that slept) do not count."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_GAP_S = 5.0
PAUSE = 4.0  # times a usual gap: what is longer is a pause, however long the steps of a large model take
MEMORY = 0.9  # of what gaps were before


class RunningClock:
    """Sums the time between ticks, of each gap no more than `max_gap` seconds and several usual gaps, whichever is more."""

    def __init__(self, elapsed: float = 0.0, max_gap: float = MAX_GAP_S, now: Callable[[], float] = time.monotonic) -> None:
        self.elapsed = elapsed
        self.max_gap = max_gap
        self._now = now
        self._last = now()
        self._usual = 0.0  # seconds of a gap, lately

    def tick(self) -> float:
        """Count the time since the last tick and return the total in seconds."""
        current = self._now()
        counted = min(current - self._last, max(self.max_gap, PAUSE * self._usual))
        self._usual = MEMORY * self._usual + (1 - MEMORY) * counted if self._usual else counted
        self.elapsed += counted
        self._last = current
        return self.elapsed
