"""Progress of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Progress of a benchmark."""

    done: int
    total: int
    seconds_left: float | None  # None before the first measurement
    what: str
