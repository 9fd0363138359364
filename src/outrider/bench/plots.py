"""Draw the plots of a report as inline SVG, each with a table of its numbers. Requires matplotlib.

Colours of lines and bars work on light and dark backgrounds; text, axes and grid use the page's colours.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import inf
from statistics import fmean, geometric_mean
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.bench.documents import Cell, at, distinct, is_plain, label
from outrider.bench.statistics import Interval
from outrider.bench.tables import span
from outrider.engine.stats import PHASES, expected_speedup

COLOURS = ("#3f7fd6", "#dd7f2b", "#2f9e6a", "#c7528a", "#8b6fd0", "#a8902c", "#4aa3b5", "#c0554a")
INK, RULE = "#010203", "#040506"  # placeholders, replaced by the page's colours
STYLE: Any = {  # typed by key in matplotlib
    "text.parse_math": False,  # folder names may contain dollars
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.4,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
WIDTH, HEIGHT = 6.4, 3.4  # inches; the page scales them
MOST_BARS = 6  # contenders side by side in one group
X = int | str  # a position on the horizontal axis
Kind = Literal["lines", "bars", "stacked"]


@dataclass(frozen=True)
class Plot:
    """A plot with its description and table."""

    title: str
    svg: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Series:
    """A line, or the bars of one colour. Parts of the same name share a colour; dotted parts are not in the legend."""

    name: str
    values: Mapping[X, float]  # by x; a line's value at "auto" is drawn as a horizontal line
    intervals: Mapping[X, Interval] = field(default_factory=dict)
    part: str = ""
    style: str = "-"
    in_table: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}, {self.part}" if self.part else self.name

    def entry(self, x: X, text: str) -> str:
        """Return the value at ``x`` formatted with ``text``, and its interval."""
        return f"{text.format(self.values[x])} {span(self.intervals.get(x))}".strip() if x in self.values else ""

    def errors(self, places: Sequence[X]) -> Any:
        """Return the lengths of error bars below and above; None without intervals."""
        if not self.intervals:
            return None
        ends = [(self.values[x], *self.intervals.get(x, (self.values[x],) * 2)) for x in places]
        return [[max(value - low, 0.0) for value, low, _ in ends], [max(high - value, 0.0) for value, _, high in ends]]


@dataclass(frozen=True)
class Pool:
    """Cells of one contender at one temperature and batch size, for all workloads."""

    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        return label(self.cells[0])

    @property
    def method(self) -> str:
        return str(self.cells[0]["method"])

    @property
    def k(self) -> int | str:
        """Return the draft length, a number or ``"auto"``."""
        k: int | str = self.cells[0]["k"]
        return k

    @property
    def is_plain(self) -> bool:
        return is_plain(self.cells[0])

    def speedup(self, name: str = "decode_speedup") -> float | None:
        """Return the geometric mean of a speedup over the workloads."""
        known = [cell[name] for cell in self.cells if cell.get(name)]
        return geometric_mean(known) if known else None

    def interval(self, name: str = "decode_speedup") -> tuple[float, float] | None:
        """Return the geometric means of the intervals' bounds, which are slightly wider than the interval of the mean."""
        known = [cell[f"{name}_interval"] for cell in self.cells if cell.get(f"{name}_interval")]
        if len(known) < len(self.cells) or any(bounds[0] <= 0 for bounds in known):
            return None
        return geometric_mean(bounds[0] for bounds in known), geometric_mean(bounds[1] for bounds in known)

    def mean(self, name: str) -> float | None:
        """Return the mean of a value over the workloads that have it."""
        known = [cell[name] for cell in self.cells if cell.get(name) is not None]
        return fmean(known) if known else None

    def histogram(self) -> dict[int, float]:
        """Return {tokens per pass: share of passes}."""
        counts: Counter[int] = Counter()
        for cell in self.cells:
            counts.update({1 + int(accepted): rounds for accepted, rounds in cell["acceptance_histogram"].items()})
        total = max(sum(counts.values()), 1)
        return {tokens: counts[tokens] / total for tokens in sorted(counts)}

    def tau(self) -> float:
        """Return the tokens per pass."""
        return sum(tokens * share for tokens, share in self.histogram().items())

    def by_position(self, name: str) -> list[float]:
        """Return values by position, each the mean over the workloads that reached it."""
        lists: list[list[float]] = [cell[name] for cell in self.cells]
        longest = max(map(len, lists), default=0)
        return [fmean(each[place] for each in lists if place < len(each)) for place in range(longest)]

    def ms_per_token(self) -> dict[str, float]:
        """Return phase -> milliseconds per token of a request."""
        tau = self.tau() or 1.0
        return {name: fmean(cell["ms"][name] for cell in self.cells) / tau for name in PHASES}


def pools(cells: Iterable[Cell]) -> list[Pool]:
    """Group cells by contender, in order of first appearance."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(label(cell), []).append(cell)
    return [Pool(tuple(group)) for group in groups.values()]


def plots(cells: Sequence[Cell]) -> list[Plot]:
    """Return the plots for one temperature and the first number of busy processes.

    All but the plot over batch sizes are for the first batch size.
    """
    cells = [cell for cell in cells if cell["busy"] == cells[0]["busy"]]
    batches = distinct(cells, "batch")
    own = at(cells, batch=batches[0])
    first = pools(own)
    found = [_by_k(first)]
    if any(not pool.is_plain for pool in first):
        found += [_tokens_per_pass(first), _acceptance(first)]
    if len(batches) > 1:
        found.append(_by_condition(cells, "batch", "batch size", "lines"))
    return [*found, _by_condition(own, "workload", "workload", "bars"), _breakdown(first)]


def _by_k(found: Sequence[Pool]) -> Plot:
    """Plot the measured speedup after the first token with the formula's curve."""
    series = []
    for method in _methods(found):
        own: dict[X, Pool] = {pool.k: pool for pool in found if pool.method == method and not pool.is_plain}
        series.append(_speedups(method, own, "decode_speedup"))
        fixed = [(int(k), pool.mean("acceptance_rate"), pool.mean("cost_ratio")) for k, pool in own.items() if k != "auto"]
        known = [(alpha, ratio) for _, alpha, ratio in fixed if alpha is not None and ratio is not None]
        if known:
            alpha, ratio = map(fmean, zip(*known, strict=True))
            curve: dict[X, float] = {k: expected_speedup(alpha, k, ratio) for k in range(max(k for k, *_ in fixed) + 2)}
            series.append(Series(method, curve, part="formula", style="--", in_table=False))
    note = (
        "Points: measured, with 95% intervals; dashed: the formula at the measured alpha and c of all points; dotted: auto. "
        "Geometric mean over the workloads."
    )
    axes = ("K, drafts requested per round", "speedup after the first token (x)")
    return plot("Speedup over plain decoding by draft length", note, axes, series, baseline=1)


def _tokens_per_pass(found: Sequence[Pool]) -> Plot:
    """Plot a histogram of tokens per target pass."""
    shown = _shown(found)
    series = [
        Series(pool.label, {tokens: 100 * share for tokens, share in pool.histogram().items()}, part=f"mean {pool.tau():.2f}")
        for pool in shown
    ]
    axes = ("tokens per pass", "passes (%)")
    return plot("Tokens per target pass", _note_of(found, shown), axes, series, "bars", "{:.0f}%")


def _acceptance(found: Sequence[Pool]) -> Plot:
    """Plot the acceptance of drafts by position."""
    shown = _shown(found)
    shares = (("conditional_acceptance", "of drafts reached", "-"), ("acceptance_by_position", "of all rounds", ":"))
    series = [
        Series(pool.label, {i: 100 * rate for i, rate in enumerate(pool.by_position(name), start=1)}, part=part, style=style)
        for pool in shown
        for name, part, style in shares
    ]
    note = "Solid: share of reached drafts; dotted: share of all rounds. " + _note_of(found, shown)
    return plot("Acceptance of drafts by position", note, ("position of the draft", "accepted (%)"), series, entry="{:.0f}%")


def _by_condition(cells: Sequence[Cell], key: str, name: str, kind: Kind) -> Plot:
    """Plot the speedup by batch size or workload."""
    found = pools(cells)
    shown = _shown(found)
    series = [
        _speedups(pool.label, {value: Pool(tuple(at(pool.cells, **{key: value}))) for value in distinct(pool.cells, key)})
        for pool in shown
    ]
    note = f"Geometric mean over the workloads. {_note_of(found, shown)}" if key == "batch" else _note_of(found, shown)
    title = f"Speedup over plain decoding by {name}"
    return plot(title, note, (name, "speedup, prompts included (x)"), series, kind, baseline=1)


def _breakdown(found: Sequence[Pool]) -> Plot:
    """Plot the time per token by phase, plain decoding included."""
    series = [Series(f"{phase}, ms", {pool.label: pool.ms_per_token()[phase] for pool in found}) for phase in PHASES]
    note = "Time of a round / its tokens; host is everything except drafting, the target's pass and verification."
    axes = ("milliseconds per token after the first", "method")
    return plot("Time per token by phase", note, axes, series, "stacked", "{:.3g}")


def _speedups(name: str, found: Mapping[X, Pool], key: str = "speedup") -> Series:
    """Return the speedups of pools with their intervals, without those that are unknown."""
    values = {x: speedup for x, pool in found.items() if (speedup := pool.speedup(key))}
    return Series(name, values, {x: bounds for x in values if (bounds := found[x].interval(key))})


def _methods(found: Sequence[Pool]) -> list[str]:
    return list(dict.fromkeys(pool.method for pool in found if not pool.is_plain))


def _shown(found: Sequence[Pool]) -> list[Pool]:
    """Return the contenders to show: all, or if too many, the longest and the automatic length of each method."""
    drafted = [pool for pool in found if not pool.is_plain]
    if len(drafted) <= MOST_BARS:
        return drafted
    chosen = []
    for method in _methods(found):
        own = [pool for pool in drafted if pool.method == method]
        longest = max((pool for pool in own if isinstance(pool.k, int)), key=lambda pool: int(pool.k), default=None)
        chosen += [pool for pool in own if pool is longest or pool.k == "auto"]
    return chosen[: len(COLOURS)]


def _note_of(found: Sequence[Pool], shown: Sequence[Pool]) -> str:
    left = sum(not pool.is_plain for pool in found) - len(shown)
    return f"{left} more draft lengths are in the table of speed and acceptance below." if left else ""


def plot(
    title: str,
    note: str,
    labels: tuple[str, str],
    series: Sequence[Series],
    kind: Kind = "lines",
    entry: str = "{:.2f}",
    baseline: float | None = None,
) -> Plot:
    """Draw series, and list their values in a table with one row per x.

    ``labels``: of both axes; ``entry``: format of a value in the table; ``baseline``: position of a horizontal line.
    """
    names = list(dict.fromkeys(each.name for each in series))
    listed = [each for each in series if each.in_table]
    places = sorted({x: None for each in listed for x in each.values}, key=lambda x: inf if isinstance(x, str) else x)
    with rc_context(STYLE):
        height = max(HEIGHT, 0.9 + 0.28 * len(places)) if kind == "stacked" else HEIGHT
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left")
        axes.set(xlabel=labels[0], ylabel=labels[1])
        DRAWN_AS[kind](axes, series, dict(zip(names, cycle(COLOURS), strict=False)), places)
        if baseline is not None:
            axes.axhline(baseline, color=INK, linewidth=0.8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3)
        svg = _svg(figure, title)
    rows = [(str(x), *(each.entry(x, entry) for each in listed)) for x in places]
    columns = (labels[0].partition(",")[0], *(each.label for each in listed))
    if kind == "stacked":
        columns = (labels[1], *columns[1:], "sum")
        rows = [(*row, entry.format(sum(each.values[x] for each in listed))) for row, x in zip(rows, places, strict=True)]
    return Plot(title, svg, note, columns, tuple(rows))


def _lines(axes: Axes, series: Sequence[Series], colours: Mapping[str, str], places: Sequence[X]) -> None:
    for each in series:
        colour, points = colours[each.name], sorted(x for x in each.values if not isinstance(x, str))
        label, marker = (None if each.style == ":" else each.label), ("" if each.style == "--" else "o")
        look: Any = {"linestyle": each.style, "marker": marker, "markersize": 4, "capsize": 2, "color": colour}
        if points:
            axes.errorbar(points, [each.values[x] for x in points], each.errors(points), label=label, **look)
        if "auto" in each.values:
            axes.axhline(each.values["auto"], color=colour, linestyle=":", linewidth=1.2, label=f"{each.name}, auto")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)


def _bars(axes: Axes, series: Sequence[Series], colours: Mapping[str, str], places: Sequence[X]) -> None:
    width = 0.84 / max(len(series), 1)
    for index, each in enumerate(series):
        at_x = [places.index(x) + (index - (len(series) - 1) / 2) * width for x in each.values]
        look: Any = {"color": colours[each.name], "label": each.label, "ecolor": INK, "capsize": 1.5}
        axes.bar(at_x, list(each.values.values()), width, yerr=each.errors(list(each.values)), **look)
    axes.set_xticks(range(len(places)), [str(x) for x in places])
    axes.grid(visible=False, axis="x")


def _stacked(axes: Axes, series: Sequence[Series], colours: Mapping[str, str], places: Sequence[X]) -> None:
    left = [0.0] * len(places)
    for each in series:
        parts = [each.values[x] for x in places]
        axes.barh([str(x) for x in places], parts, 0.7, left=left, color=colours[each.name], label=each.label)
        left = [start + part for start, part in zip(left, parts, strict=True)]
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


DRAWN_AS = {"lines": _lines, "bars": _bars, "stacked": _stacked}


def _svg(figure: Figure, title: str) -> str:
    """Return a drawing as a self-contained ``<svg>`` element that inherits the page's colours."""
    buffer = io.StringIO()
    empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # not needed inside HTML
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # ids are unique within one drawing only
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return svg.replace(INK, "var(--ink)").replace(RULE, "var(--rule)").strip()
