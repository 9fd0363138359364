"""Progress bar with remaining time on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[float, dict[str, Any]], None]  # (finished share, a point of the curve)
LINE_EVERY_S = 20.0


@contextmanager
def reporting(name: str) -> Iterator[Report]:
    """Context manager: return a function that shows the finished share and the latest values."""
    if not sys.stderr.isatty():
        yield _lines(name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[numbers]}"), console=Console(stderr=True)) as bar:
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
