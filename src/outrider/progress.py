"""Progress of long-running work, and messages about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

from outrider.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

PERIOD = 3.5  # seconds between two messages; with delays, one appears at least every 5 seconds
# (steps done, all steps, what is running); all steps: 0 if unknown, 1.0 if the first is a share
Report = Callable[[float, float, str], None]


@cache
def console() -> Console:
    """Return the terminal on standard error, one for all messages, so that none of them breaks a progress bar."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


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


class _Pace:
    """The remaining time. What precedes the first finished step, such as compiling, predicts nothing."""

    def __init__(self) -> None:
        self._start = self._latest = inf
        self._first: tuple[float, float] | None = None  # time and steps at the first report with another finished step

    def left(self, done: float, total: float) -> str:
        """Return the remaining time as text, empty if it is unknown."""
        now = time.monotonic()
        if done < self._latest:  # other work
            self._start, self._first = done, None
        self._latest = done
        if self._first is None and done > self._start:
            self._first = (now, done)
        if self._first is None or done <= self._first[1] or not total:
            return ""
        seconds = (now - self._first[0]) / (done - self._first[1]) * (total - done)
        return f"{timedelta(seconds=round(seconds))} left"


@contextmanager
def shown(name: str = "") -> Iterator[Report]:
    """Show a progress bar with the remaining time on a terminal, elsewhere a line at the start and every few seconds.

    Yields the function that updates it.
    """
    from rich import progress

    pace, started, printed = _Pace(), time.monotonic(), -inf
    text = progress.TextColumn("{task.fields[count]}  {task.fields[left]}  {task.description}", markup=False)
    terminal = console()
    with progress.Progress(
        progress.BarColumn(bar_width=24), text, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bar:
        task = bar.add_task(printable(name), total=None, count="", left="")

        def report(done: float, total: float, what: str) -> None:
            nonlocal printed
            share = f"{done / total:.1%}" if isinstance(total, float) else f"{done}/{total}"
            count, left = share if total else str(done), pace.left(done, total)
            label = printable(": ".join(filter(None, (name, what))))
            bar.update(task, completed=done, total=total or None, count=count, left=left, description=label)
            now = time.monotonic()
            if not terminal.is_terminal and now - printed >= PERIOD + (now - started) / 100:  # rarer in long work
                terminal.print(" ".join(filter(None, (count, left, label))), markup=False, soft_wrap=True)
                printed = now

        yield report


def described(values: Mapping[str, Any]) -> str:
    """Format values by name."""
    return " ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items())
