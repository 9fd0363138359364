"""Display of a race on terminals of several widths."""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from outrider.cli import race_view
from outrider.cli.race_view import RaceView, ShownRound, taken

TITLES = {"plain": "plain", "speculative": "draft k=4"}
ACCEPTED = "\x1b[32m"


def rounds(num: int = 12, seconds: float = 0.01) -> Iterator[ShownRound]:
    """Yield rounds of two lanes with the text "w0 w1 ...", the second lane twice as fast."""
    for at in range(num):
        word = f"w{at} "
        yield ShownRound("plain", [(word, "plain")], (at + 1) * seconds, at + 1, 100.0, at == num - 1)
        yield ShownRound("speculative", [(word, "accepted")], (at + 1) * seconds / 2, at + 1, 200.0, at == num - 1)


def console(width: int, height: int = 24) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width, height=height, color_system="standard", highlight=False)


def drawn(view: RaceView, each: Iterator[ShownRound]) -> str:
    view.show(each)
    return str(view.console.file.getvalue())  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_view, "SHOWN", 0.3)


@pytest.mark.parametrize(("width", "are_beside"), [(60, False), (80, False), (120, True), (200, True)])
def test_lanes_are_side_by_side_on_wide_terminals(width: int, are_beside: bool) -> None:
    text = drawn(RaceView(console(width), TITLES, "Once"), rounds())
    titles = [line for line in text.splitlines() if "─" in line and ("plain" in line or "draft k=4" in line)]
    assert titles and all(("plain" in line and "draft k=4" in line) == are_beside for line in titles)
    assert f"{ACCEPTED}w0" in text and "Once" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 12), (120, 24), (200, 50)])
def test_only_the_last_frame_may_exceed_the_window(width: int, height: int) -> None:
    view = RaceView(console(width, height), TITLES, "a prompt\n" * 9)
    for round_ in rounds(600):
        view._add(round_)
    shown = view.console.render_lines(view._picture(view._lines()), pad=False)
    whole = view.console.render_lines(view._picture(None), pad=False)
    assert len(shown) < height or height < 16
    assert len(whole) > len(shown)
    assert max(sum(segment.cell_length for segment in line) for line in whole) <= width
    said = "".join(segment.text for line in whole for segment in line)
    assert said.count("w0 ") == said.count("w599") == 2


def test_a_short_race_is_replayed_slowly_with_a_note() -> None:
    started = time.monotonic()
    text = drawn(RaceView(console(80), TITLES, "x"), rounds(seconds=0.001))
    assert time.monotonic() - started >= 0.3
    assert "shown 25 times slower than it ran" in text
    assert "the lanes take turns on the same processor" in text and "100 tok/s" in text and "200 tok/s" in text


def test_an_empty_frame_is_shown_before_the_first_round() -> None:
    view = RaceView(console(80), TITLES, "x")
    seen: list[str] = []

    def watched() -> Iterator[ShownRound]:
        seen.append(view.console.file.getvalue())  # type: ignore[attr-defined]
        yield from rounds()

    drawn(view, watched())
    assert "processing the prompt" in seen[0] and "running" in seen[0]


def test_a_long_race_is_shown_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_view, "PATIENCE", 0.0)
    text = drawn(RaceView(console(80), TITLES, "x"), rounds())
    assert "slower than it ran" not in text and text.count("w11") >= 2


def test_recorded_rounds_are_separated_from_later_ones() -> None:
    each, times = rounds(3), iter(range(100))
    found, is_over = taken(each, 2.0, lambda: float(next(times)))
    assert not is_over and len(found) == 3 and len(list(each)) == 3
    assert taken(rounds(3), 2.0, lambda: 0.0)[1]


def test_brackets_are_not_markup_and_tabs_are_expanded() -> None:
    view = RaceView(console(80), TITLES, "[/bold]")
    text = drawn(view, iter([ShownRound("plain", [("a[/b]\tx[red]", "bonus")], 0.1, 1, 0.0, True)]))
    assert "a[/b]   x[red]" in text and "[/bold]" in text
