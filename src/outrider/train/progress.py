"""Progress bar with remaining time on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

LINE_EVERY_S = 20.0


def describe(point: dict[str, Any]) -> str:
    """Format the values of one point of the curve."""
    return " ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in point.items())


class Progress:
    """Shows a fraction and the latest values; a context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bar: RichProgress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            console = Console(stderr=True)
            self._bar = RichProgress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"), console=console)
            self._task = self._bar.add_task(name, total=1.0, numbers="")
        self._started = self._printed = time.monotonic()
        self._first: float | None = None

    def update(self, fraction: float, point: dict[str, Any]) -> None:
        """Show the progress of the run."""
        is_long = "loss" in point and "bpb" not in point
        brief: dict[str, Any] = {key: point[key] for key in ("step", "loss") if key in point} if is_long else point
        if self._bar is not None:
            numbers = describe(brief)
            self._bar.update(self._task, completed=fraction, numbers=numbers)
            return
        now = time.monotonic()
        if self._first is None:  # earlier time, such as compiling, does not predict the rest
            self._first, self._started = fraction, now
        if now - self._printed >= LINE_EVERY_S or "bpb" in point:
            speed = (fraction - self._first) / max(now - self._started, 1e-9)
            left = f"{(1 - fraction) / speed / 60:.1f} min" if speed > 0 else "?"
            clock = time.strftime("%H:%M:%S")
            print(f"{clock} {self.name} {fraction:6.1%} left {left} | {describe(brief)}", file=sys.stderr, flush=True)
            self._printed = now

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
