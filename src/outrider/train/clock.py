"""Active time of a run, without pauses (a stopped process, a sleeping laptop)."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_GAP_S = 5.0
PAUSE = 4.0  # multiple of the usual gap above which a gap is a pause, whatever the step time
MEMORY = 0.9  # decay of earlier gaps


class RunningClock:
    """Sums the time between ticks; each gap is limited to the larger of `max_gap` seconds and several usual gaps."""

    def __init__(self, elapsed: float = 0.0, max_gap: float = MAX_GAP_S, now: Callable[[], float] = time.monotonic) -> None:
        self.elapsed = elapsed
        self.max_gap = max_gap
        self._now = now
        self._last = now()
        self._usual = 0.0  # recent seconds per gap

    def tick(self) -> float:
        """Count the time since the last tick and return the total in seconds."""
        current = self._now()
        counted = min(current - self._last, max(self.max_gap, PAUSE * self._usual))
        self._usual = MEMORY * self._usual + (1 - MEMORY) * counted if self._usual else counted
        self.elapsed += counted
        self._last = current
        return self.elapsed
