"""Signs of life from work that takes longer than anybody waits in silence. Knows clocks and loggers, not the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

PERIOD = 3.5  # seconds between two reports: with what is late, a user sees one at least every five


@contextmanager
def reported_every(period: float, report: Callable[[float], None]) -> Iterator[None]:
    """Call ``report`` with the seconds elapsed, every ``period`` seconds from a helper thread, until the block ends."""
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
    """Log ``what`` as the block begins, then its progress every few seconds, and the seconds it took where it succeeds.

    ``expected``: the seconds it usually takes. Progress records carry ``is_progress``, so that a screen may show only the last.
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
