"""Time that a run really had: pauses (a stopped process, a laptop that slept) do not count."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_GAP_S = 5.0


class RunningClock:
    """Sums the time between ticks, counting no gap for more than `max_gap` seconds."""

    def __init__(self, elapsed: float = 0.0, max_gap: float = MAX_GAP_S, now: Callable[[], float] = time.monotonic) -> None:
        self.elapsed = elapsed
        self.max_gap = max_gap
        self._now = now
        self._last = now()

    def tick(self) -> float:
        """Count the time since the last tick and return the total in seconds."""
        current = self._now()
        self.elapsed += min(current - self._last, self.max_gap)
        self._last = current
        return self.elapsed
