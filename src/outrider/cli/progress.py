"""Progress bar with the remaining time, for commands that measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.cli.console import err

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.progress import Progress as State


@contextmanager
def progress() -> Iterator[Callable[[State], None]]:
    """Show a progress bar on a terminal, or a line per run elsewhere. Yields the callback that updates it."""
    from rich.progress import BarColumn, Progress, TextColumn

    text = TextColumn("{task.completed}/{task.total}  {task.fields[left]}  {task.description}", markup=False)
    columns = (BarColumn(bar_width=24), text)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None, left="")

        def report(state: State) -> None:
            left = "" if state.seconds_left is None else f"{clock(state.seconds_left)} left"
            bar.update(task, completed=state.done, total=state.total, left=left, description=state.what)
            if not err.is_terminal:
                err.print(f"{state.done}/{state.total} {left} {state.what}", markup=False, soft_wrap=True)

        yield report


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
