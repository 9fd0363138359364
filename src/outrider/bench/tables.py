"""Format a benchmark document as tables for a terminal with 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.bench.breakdown import main_part
from outrider.bench.documents import Cell, condition, headline, is_plain, label

if TYPE_CHECKING:
    from rich.table import Table

AGREES = 0.1  # measurements within this share of the formula need no explanation


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Speed and acceptance; what the formula expects and how tokens arrive; where texts loop, speed over the whole texts."""
    found = [_speeds(result), _reasons(result)]
    return [*found, _whole_texts(result)] if any(cell.get("before_loops") for cell in result["cells"]) else found


def _speeds(result: Mapping[str, Any]) -> Table:
    precision = result.get("weights") or result["dtype"]
    title = f"{result['target']} on {result['device']}, {precision}; ms per round: draft + score + other"
    view = _table(title, "tok/s", "speedup", "95%", "tok/pass", "alpha", "ms", "same")
    _fill(view, [headline(cell) for cell in result["cells"]], _speed_row)
    return view


def _whole_texts(result: Mapping[str, Any]) -> Table:
    title = (
        "loops: share of the tokens that are in loops; before: tokens before the first one,\n"
        "which the tables above are about. Over the whole texts, loops included:"
    )
    view = _table(title, "loops", "before", "tok/s", "speedup", "95%", "tok/pass", "alpha")
    _fill(view, result["cells"], _whole_row)
    return view


def _whole_row(cell: Cell) -> list[str]:
    share = cell.get("loop_share")
    return ["" if share is None else f"{share:.0%}", str(cell.get("tokens_before_loops", "")), *_speed_row(cell)[:5]]


def _speed_row(cell: Cell) -> list[str]:
    ms, plain = cell["ms"], is_plain(cell)
    return [
        f"{cell['tok_s']:.1f}",
        number(cell["speedup"], 2),
        "" if plain else span(cell["speedup_interval"]),
        f"{cell['mean_acceptance_length']:.2f}",
        "" if plain else f"{cell['acceptance_rate']:.2f}",
        f"{ms['draft']:.1f}+{ms['score']:.1f}+{ms['verify'] + ms['host']:.1f}",
        "" if plain or cell["same_text"] is None else f"{cell['same_text']:.0%}",
    ]


def _reasons(result: Mapping[str, Any]) -> Table:
    title = (
        "speedup after the first token: formula, measured, largest difference;\n"
        "ms to the first token, between tokens (p50/p95); error of predicted plain"
    )
    view = _table(title, "c", "formula", "measured", "mostly", "first", "between", "plain")
    _fill(view, [headline(cell) for cell in result["cells"]], _reason_row)
    return view


def _reason_row(cell: Cell) -> list[str]:
    first, between, error = cell["time_to_first_token_ms"], cell["inter_token_ms"], cell["prediction_error_percent"]
    return [
        number(cell["cost_ratio"], 3),
        number(cell["expected_speedup"], 2),
        "" if is_plain(cell) else number(cell["decode_speedup"], 2),
        reason(cell),
        number(first and first["p50"], 0),
        f"{between['p50']:.1f}/{between['p95']:.1f}" if between else "",
        "" if error is None else f"{error:+.0f}%",
    ]


def reason(cell: Cell) -> str:
    """Return the largest part of the difference to the formula, if the difference exceeds a tenth."""
    expected, measured, difference = cell["expected_speedup"], cell["decode_speedup"], cell["difference"]
    if not expected or not measured or not difference or abs(measured / expected - 1) <= AGREES:
        return ""
    name = main_part(difference)
    return f"{name} {difference[name]:+.2f}"


def span(interval: Sequence[float] | None) -> str:
    """``1.41-1.52``"""
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def add_row(view: Table, entries: Sequence[str]) -> None:
    """Return a table row without interpreting markup in names."""
    from rich.text import Text

    view.add_row(*map(Text, entries))


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    view = Table(title=Text(title), title_justify="left", box=box.SIMPLE, pad_edge=False, padding=0)
    view.add_column("workload", overflow="fold")
    view.add_column("method", no_wrap=True)
    for name in columns:
        view.add_column(name, justify="right", no_wrap=True)
    return view


def _fill(view: Table, cells: Sequence[Cell], row: Callable[[Cell], list[str]]) -> None:
    """Return a table with one line per cell and a rule between conditions."""
    previous = None
    for cell in cells:
        group = condition(cell)
        if previous not in (None, group):
            view.add_section()
        add_row(view, [group if group != previous else "", label(cell), *row(cell)])
        previous = group
