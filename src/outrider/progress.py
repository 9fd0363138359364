"""Progress of long-running work, and messages about it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

PERIOD = 3.5  # seconds between two messages; with delays, one appears at least every 5 seconds


@dataclass(frozen=True)
class Progress:
    """Progress of a benchmark."""

    done: int
    total: int
    seconds_left: float | None  # None before the first measurement
    what: str


@contextmanager
def reported_every(period: float, report: Callable[[float], None]) -> Iterator[None]:
    """Call ``report`` with the elapsed seconds every ``period`` seconds, from another thread, until the block ends."""
    started, ended = monotonic(), threading.Event()

    def run() -> None:
        while not ended.wait(period):
            report(monotonic() - started)

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def logged(logger: logging.Logger, what: str, expected: float) -> Iterator[None]:
    """Log ``what`` when the block starts, its progress every few seconds, and its duration if it succeeds.

    ``expected``: its usual duration in seconds. Progress records have the attribute ``is_progress``, so that a terminal can
    show only the last one.
    """

    def report(elapsed: float) -> None:
        left = expected - elapsed
        rest = f"about {left:.0f} s left" if left >= 1 else "longer than usual"
        logger.info("%s: %.0f s, %s", what, elapsed, rest, extra={"is_progress": True})

    started = monotonic()
    logger.info("%s: about %.0f s", what, expected)
    with reported_every(PERIOD, report):
        yield
    logger.info("%s: done in %.0f s", what, monotonic() - started)
