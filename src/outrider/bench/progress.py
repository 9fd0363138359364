"""Where a benchmark stands. Knows nothing of what is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a benchmark stands."""

    done: int
    total: int
    seconds_left: float | None  # None until something is measured
    what: str
