"""Format a benchmark document as tables for a terminal with 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from outrider.bench.breakdown import PARTS, main_part
from outrider.bench.documents import Cell, at, busy_label, condition, distinct, headline, is_plain, label
from outrider.errors import printable

MANY_WORKLOADS = 3  # minimum number of workloads for a table of workloads x methods
TOLERANCE = 0.1  # largest relative difference to the formula that is not explained
Columns = Mapping[str, Callable[[Cell], str]]  # heading -> entry of a cell


def reason(cell: Cell) -> str:
    """Return the largest part of the difference to the formula, if the difference exceeds a tenth."""
    expected, measured, difference = cell["expected_speedup"], cell["decode_speedup"], cell["difference"]
    if not expected or not measured or not difference or abs(measured / expected - 1) <= TOLERANCE:
        return ""
    name = main_part(difference)
    return f"{name} {difference[name]:+.2f}"


def span(interval: Sequence[float] | None) -> str:
    """Format an interval, such as ``1.41-1.52``."""
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def round_ms(ms: Mapping[str, float]) -> str:
    """Format the milliseconds of a round: of drafting, scoring and everything else."""
    return f"{ms['draft']:.1f}+{ms['score']:.1f}+{ms['verify'] + ms['host']:.1f}"


SPEEDS: Columns = {
    "tok/s": lambda cell: number(cell["tok_s"], 1),
    "speedup": lambda cell: number(cell["speedup"], 2),
    "95%": lambda cell: "" if is_plain(cell) else span(cell["speedup_interval"]),
    "tok/pass": lambda cell: number(cell["mean_acceptance_length"], 2),
    "alpha": lambda cell: number(cell["acceptance_rate"], 2),
    "ms": lambda cell: round_ms(cell["ms"]),
    "same": lambda cell: "" if is_plain(cell) else percent(cell["same_text"]),
}
LOOPS: Columns = {
    "loops": lambda cell: percent(cell["loop_share"]),
    "before": lambda cell: str(cell["tokens_before_loops"]),
    **{name: SPEEDS[name] for name in ("tok/s", "speedup", "95%", "tok/pass", "alpha")},
}
REASONS: Columns = {
    "c": lambda cell: number(cell["cost_ratio"], 3),
    "formula": lambda cell: number(cell["expected_speedup"], 2),
    "measured": lambda cell: "" if is_plain(cell) else number(cell["decode_speedup"], 2),
    "mostly": reason,
    "first": lambda cell: number((cell["time_to_first_token_ms"] or {}).get("p50"), 0),
    "between": lambda cell: "{p50:.1f}/{p95:.1f}".format(**cell["inter_token_ms"]) if cell["inter_token_ms"] else "",
    "error": lambda cell: "" if cell["prediction_error_percent"] is None else f"{cell['prediction_error_percent']:+.0f}%",
}


def _part(name: str, cell: Cell) -> str:
    return f"{cell['difference'][name]:+.2f}" if cell["difference"] else ""


MORE: Columns = {  # on a page only
    "mean K": lambda cell: number(cell["mean_k"], 2),
    **{name: partial(_part, name) for name in PARTS},
    "first, p95 (ms)": lambda cell: number((cell["time_to_first_token_ms"] or {}).get("p95"), 0),
    "between rounds (ms)": lambda cell: "{p50:.1f}/{p95:.1f}".format(**cell["pause_ms"]) if cell["pause_ms"] else "",
    "predicted plain (tok/s)": lambda cell: number(cell["predicted_plain_tok_s"], 1),
    "faults": lambda cell: str(cell["faults"]),
}


class Section(NamedTuple):
    """A table of cells. A page shows title and note, a terminal the note."""

    title: str
    note: str
    columns: Columns
    cells: Sequence[Cell]

    @property
    def rows(self) -> list[list[str]]:
        """Return the entries of each cell: condition, method, and those of the columns."""
        return [[condition(cell), label(cell), *(entry(cell) for entry in self.columns.values())] for cell in self.cells]


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Return speed and acceptance, expected speedup and latency, and if outputs loop, the speed over the whole outputs."""
    has_loops = any(cell["loop_share"] for cell in result["cells"])
    cells, precision = [headline(cell) for cell in result["cells"]], result.get("weights") or result["dtype"]
    speeds = f"{result['target']} on {result['device']}, {precision}; ms per round: draft + score + other"
    speeds += "" if has_loops else "; no tokens in loops"
    reasons = (
        "speedup after the first token: formula, measured, largest difference; "
        "ms to the first token, between tokens (p50/p95); error of predicted plain"
    )
    loops = (
        "loops: share of tokens in loops; before: tokens before the first loop. Above, speeds, "
        "acceptance and ms per round are for these; all else, and this table, is for whole outputs:"
    )
    found = [Section("Speed and acceptance", speeds, SPEEDS, cells)]
    found.append(Section("Expected and measured speedup, and latency", reasons, REASONS, cells))
    if has_loops:
        found.append(Section("Loops", loops, LOOPS, result["cells"]))
    return found


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return the sections; if there are many workloads, methods by workload."""
    found = sections(result)
    speeds, reasons, *loops = map(_table, found)
    return [speeds, reasons, *map(_matrix_table, matrices(found[0].cells)), *loops]


def _table(section: Section) -> Table:
    view = table_of(section.note, *section.columns)
    fill(view, section.rows)
    return view


class Matrix(NamedTuple):
    """Workloads by methods in one condition, with mean acceptance lengths and speedups, such as ``2.81 1.90x``."""

    note: str
    methods: Sequence[str]
    rows: Sequence[Sequence[str]]  # a workload and its entry for each method; the last row is of all workloads


def matrices(cells: Sequence[Cell]) -> Iterator[Matrix]:
    """Yield a matrix for each condition with several workloads. ``cells``: those of the first section."""
    drafted = [cell for cell in cells if not is_plain(cell) and cell["speedup"]]
    for temperature, batch, busy in dict.fromkeys((cell["temperature"], cell["batch"], cell["busy"]) for cell in drafted):
        found = at(drafted, temperature=temperature, batch=batch, busy=busy)
        workloads, methods = distinct(found, "workload"), list(dict.fromkeys(map(label, found)))
        if len(workloads) < MANY_WORKLOADS:
            continue
        note = f"tokens per target pass, and speedup; temperature {temperature:g}, batch {batch}"
        groups = [*((str(workload), at(found, workload=workload)) for workload in workloads), ("all", found)]
        rows = [
            [printable(name), *(_pair([cell for cell in group if label(cell) == method]) for method in methods)]
            for name, group in groups
        ]
        yield Matrix(note + (f", {busy_label(busy)}" if busy else ""), methods, rows)


def _matrix_table(matrix: Matrix) -> Table:
    view = table_of(matrix.note, *matrix.methods, keys=("workload",))
    *single, total = matrix.rows
    for row in single:
        add_row(view, row)
    view.add_section()
    add_row(view, total)
    return view


def _pair(cells: Sequence[Cell]) -> str:
    """Format mean acceptance length and geometric mean of the speedups of the cells."""
    if not cells:
        return ""
    speedup = geometric_mean(cell["speedup"] for cell in cells)
    return f"{fmean(cell['mean_acceptance_length'] for cell in cells):.2f} {speedup:.2f}x"


def add_row(view: Table, entries: Sequence[str]) -> None:
    """Add a row to a table without interpreting markup and control characters in names."""
    view.add_row(*(Text(printable(entry)) for entry in entries))


def bare_table(title: str = "", padding: int | tuple[int, ...] = 0) -> Table:
    """Return an empty table without borders."""
    shown: Any = Text(title) if title else None
    return Table(title=shown, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=padding)  # type: ignore[arg-type]


def table_of(title: str, *columns: str, keys: Sequence[str] = ("workload", "method")) -> Table:
    """Return an empty table without borders: columns of names, then of numbers."""
    view = bare_table(title)
    view.add_column(keys[0], overflow="fold")
    for name in keys[1:]:
        view.add_column(name, no_wrap=True)
    for name in columns:
        view.add_column(name, justify="right", no_wrap=True)
    return view


def fill(view: Table, rows: Iterable[Sequence[str]]) -> None:
    """Fill a table with rows and a rule between groups. The first entry of a row is its group, which is shown once."""
    previous = None
    for group, *entries in rows:
        if previous not in (None, group):
            view.add_section()
        add_row(view, [group if group != previous else "", *entries])
        previous = group
