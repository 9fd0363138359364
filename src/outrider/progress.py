"""Progress of long-running work, and messages about it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PERIOD = 3.5  # seconds between two messages; with delays, one appears at least every 5 seconds
LINE_EVERY_S = 20.0  # seconds between two lines of ``reporting`` in a log
SPEED_PERIOD_S = 600.0  # seconds from which a terminal's remaining time is estimated
Report = Callable[[float, dict[str, Any]], None]  # (finished share, latest values by name)


@dataclass(frozen=True)
class Progress:
    """Progress of a benchmark, a search or an audit."""

    done: int
    total: int  # 0 if unknown
    seconds_left: float | None  # None before the first measurement
    what: str


@contextmanager
def reported_every(period: float, report: Callable[[float], None]) -> Iterator[None]:
    """Call ``report`` with the elapsed seconds every ``period`` seconds, from another thread, until the block ends."""
    started, ended = time.monotonic(), threading.Event()

    def run() -> None:
        while not ended.wait(period):
            report(time.monotonic() - started)

    thread = threading.Thread(target=run, name="progress", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if thread.is_alive():  # not if it could not be started
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

    started = time.monotonic()
    logger.info("%s: about %.0f s", what, expected)
    with reported_every(PERIOD, report):
        yield
    logger.info("%s: done in %.0f s", what, time.monotonic() - started)


@contextmanager
def reporting(name: str) -> Iterator[Report]:
    """Show a progress bar with the remaining time on a terminal, plain lines elsewhere. Yields the function that updates it."""
    if not sys.stderr.isatty():
        yield _lines(name)
        return
    from rich import progress
    from rich.console import Console

    times = (progress.TaskProgressColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    columns = ("{task.description}", progress.BarColumn(), *times, "{task.fields[numbers]}")
    # By default the speed is that of the last 30 s, which a step of a large model exceeds.
    with progress.Progress(*columns, console=Console(stderr=True), speed_estimate_period=SPEED_PERIOD_S) as bar:
        task = bar.add_task(name, total=1.0, numbers="")
        yield lambda share, point: bar.update(task, completed=share, numbers=_described(point))


def _lines(name: str) -> Report:
    """Return a function that prints a line every 20 seconds, and at each measurement of bits per byte."""
    first: tuple[float, float] | None = None  # time and share of the first call: compiling before it predicts nothing
    printed = time.monotonic()

    def report(share: float, point: dict[str, Any]) -> None:
        nonlocal first, printed
        now = time.monotonic()
        first = first or (now, share)
        if now - printed >= LINE_EVERY_S or "bpb" in point:
            speed = (share - first[1]) / max(now - first[0], 1e-9)
            left = f"{(1 - share) / speed / 60:.1f} min" if speed > 0 else "?"
            clock = time.strftime("%H:%M:%S")
            print(f"{clock} {name} {share:6.1%} left {left} | {_described(point)}", file=sys.stderr, flush=True)
            printed = now

    return report


def _described(point: dict[str, Any]) -> str:
    """Format a point of the curve: of a training step its number and loss, else all values."""
    if "loss" in point and "bpb" not in point:
        point = {key: point[key] for key in ("step", "loss") if key in point}
    return " ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in point.items())
