"""Show a race on a terminal: both texts while they are generated, coloured by token origin, and their speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.cli.console import STYLES, TokenPainter, legend

if TYPE_CHECKING:
    from outrider.bench.race import Step

SHOWN = 8.0  # seconds of the replay of a short race
PATIENCE = 4.0  # seconds; a race that ends earlier is replayed slowly
FRAMES = 20  # per second
SIDE_BY_SIDE = 100  # minimum columns for lanes side by side
MOST_LINES, LEAST_LINES = 16, 3  # lines of text per lane
FRAME = 2  # lines of a panel's border, or columns of border and padding
TURNS = "the lanes take turns on the same processor; each clock counts its own rounds"
EXTRA_LINES = 4  # lines below the lanes, including the prompt


@dataclass(frozen=True)
class ShownRound:
    """Text that one round added to a lane, and the lane's statistics afterwards."""

    lane: str
    pieces: list[tuple[str, str]]  # text and origin
    clock: float  # seconds
    num_tokens: int
    tok_s: float  # after the first tokens; 0 before
    is_last: bool


def shown_rounds(steps: Iterable[Step], painters: dict[str, TokenPainter]) -> Iterator[ShownRound]:
    """Convert the steps of a race to coloured pieces of text and statistics."""
    for step in steps:
        lane = step.lane
        pieces = painters[lane.name].pieces(step.emission)
        yield ShownRound(lane.name, pieces, lane.clock, len(lane.output), lane.stats.tok_s, lane.finish_reason is not None)


@dataclass
class LaneView:
    """One lane's text and speed."""

    title: str
    text: Text = field(default_factory=Text)
    last: ShownRound | None = None

    def add(self, round_: ShownRound) -> None:
        for piece, origin in round_.pieces:
            self.text.append(piece.expandtabs(4).replace("\r", ""), STYLES[origin])
        self.last = round_

    def panel(self, console: Console, width: int, lines: int | None) -> Panel:
        """Return the lane as a panel with the last ``lines`` lines of its text, or all of them for None."""
        wrapped = list(self.text.wrap(console, width - 2 * FRAME))
        body = Text("\n").join(wrapped if lines is None else wrapped[-lines:])
        figures = "processing the prompt"
        if self.last is not None:
            figures = f"{self.last.num_tokens} tokens in {self.last.clock:.2f} s"
            if self.last.tok_s:
                figures = f"{self.last.tok_s:.0f} tok/s, {figures}"
        is_over = self.last is not None and self.last.is_last
        return Panel(
            body,
            title=Text(self.title, style="bold"),
            subtitle=Text(figures, style="bold" if is_over else ""),
            title_align="left",
            subtitle_align="right",
            width=width,
            height=None if lines is None else lines + FRAME,
            border_style="green" if is_over else "dim",
        )


class RaceView:
    """View of both lanes, side by side if the terminal is wide enough."""

    def __init__(self, console: Console, titles: dict[str, str], prompt: str) -> None:
        """``titles``: lane -> title, in display order."""
        self.console, self.prompt = console, prompt
        self.lanes = {name: LaneView(title) for name, title in titles.items()}
        self.note = ""

    def show(self, rounds: Iterator[ShownRound]) -> None:
        """Show a race live, or replay it slowly if it is too short to watch. Prints the complete texts at the end."""
        self.note = "running"
        with Live(self._picture(self._lines()), console=self.console, auto_refresh=False, transient=True) as live:
            recorded, is_over = taken(rounds, PATIENCE)  # drawing meanwhile would slow the lanes
            self.note = ""
            if is_over:
                self._play_back(live, recorded)
            else:
                self._follow(live, recorded, rounds)
        self.console.print(self._picture(lines=None))

    def _play_back(self, live: Live, rounds: list[ShownRound]) -> None:
        slowed = SHOWN / max([1e-9, *(round_.clock for round_ in rounds)])
        self.note = f"shown {slowed:.0f} times slower than it ran"
        started, upcoming = time.monotonic(), sorted(rounds, key=lambda round_: round_.clock)
        while upcoming:
            at = (time.monotonic() - started) / slowed
            while upcoming and upcoming[0].clock <= at:
                self._add(upcoming.pop(0))
            live.update(self._picture(self._lines()), refresh=True)
            time.sleep(1 / FRAMES)

    def _follow(self, live: Live, recorded: list[ShownRound], rounds: Iterator[ShownRound]) -> None:
        drawn = 0.0
        for round_ in recorded:
            self._add(round_)
        for round_ in rounds:
            self._add(round_)
            if time.monotonic() - drawn >= 1 / FRAMES:  # drawn between rounds, so that no lane's clock counts it
                live.update(self._picture(self._lines()), refresh=True)
                drawn = time.monotonic()

    def _add(self, round_: ShownRound) -> None:
        self.lanes[round_.lane].add(round_)

    def _lines(self) -> int:
        """Return the lines of text per lane with which everything fits on the screen."""
        free = self.console.height - EXTRA_LINES - len(self._prompt().wrap(self.console, self.console.width))
        if self.console.width < SIDE_BY_SIDE:
            free //= len(self.lanes)
        return max(min(free - FRAME, MOST_LINES), LEAST_LINES)

    def _picture(self, lines: int | None) -> RenderableType:
        width = self.console.width
        below = [legend(), Text("; ".join(filter(None, [TURNS, self.note])), style="dim")]
        if width < SIDE_BY_SIDE:
            return Group(self._prompt(), *(lane.panel(self.console, width, lines) for lane in self.lanes.values()), *below)
        each = width // len(self.lanes)
        grid = Table.grid()
        grid.add_row(*(lane.panel(self.console, each, lines) for lane in self.lanes.values()))
        return Group(self._prompt(), grid, *below)

    def _prompt(self) -> Text:
        """Return the end of the prompt, shortened to a few lines."""
        lines = self.prompt.expandtabs(4).strip().splitlines()[-3:]
        return Text("\n".join(line[-300:] for line in lines), style="dim")


def taken(
    rounds: Iterator[ShownRound], seconds: float, clock: Callable[[], float] = time.monotonic
) -> tuple[list[ShownRound], bool]:
    """Return the rounds of the next ``seconds``, and whether the race ended."""
    started, found = clock(), []
    for round_ in rounds:
        found.append(round_)
        if clock() - started > seconds:
            return found, False
    return found, True
