"""Draw the plots of a report as inline SVG, each with a table of its numbers. Requires matplotlib.

Colours of lines and bars work on light and dark backgrounds; text, axes and grid use the page's colours.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean, geometric_mean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.bench.documents import Cell, at, distinct, is_plain, label
from outrider.bench.tables import number, span
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


@dataclass(frozen=True)
class Plot:
    """A plot with its description and table."""

    title: str
    svg: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


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
    first = at(cells, batch=batches[0])
    found = [speedup_by_k(pools(first))]
    if any(not pool.is_plain for pool in pools(first)):
        found += [tokens_per_pass(pools(first)), acceptance_by_position(pools(first))]
    if len(batches) > 1:
        found.append(speedup_by_batch(cells))
    return [*found, speedup_by_workload(first), time_breakdown(pools(first))]


def speedup_by_k(found: Sequence[Pool]) -> Plot:
    """Plot the measured speedup after the first token with the formula's curve."""
    title = "Speedup over plain decoding by draft length"
    drafted = [pool for pool in found if not pool.is_plain]

    def draw(axes: Axes) -> None:
        for colour, method in zip(cycle(COLOURS), _methods(found), strict=False):
            _draw_method(axes, colour, method, [pool for pool in drafted if pool.method == method])
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set(xlabel="K, drafts requested per round", ylabel="speedup after the first token (x)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)

    note = (
        "Points: measured, with 95% intervals; dashed: the formula at the measured alpha and c of all points; dotted: auto. "
        "Geometric mean over the workloads."
    )
    columns = ("method", "K", "speedup", "95%", "formula", "alpha", "c")
    figures = [(pool.speedup("expected_speedup"), pool.mean("acceptance_rate"), pool.mean("cost_ratio")) for pool in drafted]
    rows = tuple(
        (pool.method, str(pool.k), number(pool.speedup(), 2), span(pool.interval()), *(number(each, 3) for each in of_pool))
        for pool, of_pool in zip(drafted, figures, strict=True)
    )
    return Plot(title, svg_of(title, draw), note, columns, rows)


def _draw_method(axes: Axes, colour: str, method: str, own: Sequence[Pool]) -> None:
    fixed = sorted((pool for pool in own if isinstance(pool.k, int) and pool.speedup()), key=lambda pool: int(pool.k))
    if fixed:
        lengths, speeds = [int(pool.k) for pool in fixed], [pool.speedup() or 0.0 for pool in fixed]
        axes.errorbar(lengths, speeds, _bars(fixed, speeds), color=colour, marker="o", capsize=2, label=method)
    known = [(pool.mean("acceptance_rate"), pool.mean("cost_ratio")) for pool in fixed]
    pairs = [(alpha, ratio) for alpha, ratio in known if alpha is not None and ratio is not None]
    if pairs:
        alpha, ratio = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        curve = [expected_speedup(alpha, k, ratio) for k in range(max(lengths) + 2)]
        axes.plot(range(len(curve)), curve, color=colour, linestyle="--", linewidth=1.2, label=f"{method}, formula")
    for speed in [pool.speedup() for pool in own if pool.k == "auto"]:
        if speed:
            axes.axhline(speed, color=colour, linestyle=":", linewidth=1.2, label=f"{method}, auto")


def tokens_per_pass(found: Sequence[Pool]) -> Plot:
    """Plot a histogram of tokens per target pass."""
    title = "Tokens per target pass"
    shown = _shown(found)
    most = max((max(pool.histogram(), default=1) for pool in shown), default=1)

    def draw(axes: Axes) -> None:
        width = 0.84 / len(shown)
        for index, (colour, pool) in enumerate(zip(COLOURS, shown, strict=False)):
            shares = [100 * pool.histogram().get(tokens, 0.0) for tokens in range(1, most + 1)]
            places = [tokens + (index - (len(shown) - 1) / 2) * width for tokens in range(1, most + 1)]
            axes.bar(places, shares, width, color=colour, label=pool.label)
        axes.set(xlabel="tokens per pass", ylabel="passes (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    rows = tuple(
        (pool.label, f"{pool.tau():.2f}", *(f"{100 * pool.histogram().get(tokens, 0.0):.0f}%" for tokens in range(1, most + 1)))
        for pool in shown
    )
    return Plot(title, svg_of(title, draw), _note_of(found, shown), ("method", "mean", *map(str, range(1, most + 1))), rows)


def acceptance_by_position(found: Sequence[Pool]) -> Plot:
    """Plot the acceptance of drafts by position."""
    title = "Acceptance of drafts by position"
    shown = _shown(found)
    longest = max((len(pool.by_position("conditional_acceptance")) for pool in shown), default=0)

    def draw(axes: Axes) -> None:
        for colour, pool in zip(COLOURS, shown, strict=False):
            for name, line in (("conditional_acceptance", "-"), ("acceptance_by_position", ":")):
                rates = [100 * rate for rate in pool.by_position(name)]
                own = pool.label if line == "-" else None
                axes.plot(range(1, len(rates) + 1), rates, line, marker="o", markersize=3, color=colour, label=own)
        axes.set(xlabel="position of the draft", ylabel="accepted (%)", ylim=(0, 103))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    rows = [
        (pool.label, f"of {base}", *(f"{100 * rate:.0f}%" for rate in pool.by_position(name)))
        for pool in shown
        for name, base in (("conditional_acceptance", "drafts reached"), ("acceptance_by_position", "all rounds"))
    ]
    padded = tuple(row + ("",) * (longest + 2 - len(row)) for row in rows)
    note = "Solid: share of reached drafts; dotted: share of all rounds. " + _note_of(found, shown)
    return Plot(title, svg_of(title, draw), note, ("method", "share", *map(str, range(1, longest + 1))), padded)


def speedup_by_batch(cells: Sequence[Cell]) -> Plot:
    """Plot the speedup by batch size."""
    title = "Speedup over plain decoding by batch size"
    batches = distinct(cells, "batch")
    by_batch = {batch: {pool.label: pool for pool in pools(at(cells, batch=batch)) if not pool.is_plain} for batch in batches}
    labels = list(dict.fromkeys(name for found in by_batch.values() for name in found))
    shown = [pool.label for pool in _shown(pools(cells))]

    def draw(axes: Axes) -> None:
        for colour, name in zip(COLOURS, shown, strict=False):
            there = [batch for batch in batches if name in by_batch[batch] and by_batch[batch][name].speedup("speedup")]
            found = [by_batch[batch][name] for batch in there]
            speeds = [pool.speedup("speedup") or 0.0 for pool in found]
            axes.errorbar(there, speeds, _bars(found, speeds, "speedup"), color=colour, marker="o", capsize=2, label=name)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set(xlabel="batch size", ylabel="speedup, prompts included (x)", xticks=batches)
        axes.set_ylim(bottom=0)

    rows = tuple(
        (name, *(number(by_batch[batch][name].speedup("speedup"), 2) if name in by_batch[batch] else "" for batch in batches))
        for name in labels
    )
    note = "Geometric mean over the workloads."
    if len(shown) < len(labels):
        note += f" {len(labels) - len(shown)} more draft lengths are in the table only."
    return Plot(title, svg_of(title, draw), note, ("method", *(f"batch {batch}" for batch in batches)), rows)


def speedup_by_workload(cells: Sequence[Cell]) -> Plot:
    """Plot the speedup by workload."""
    title = "Speedup over plain decoding by workload"
    shown = _shown(pools(cells))
    workloads = distinct(cells, "workload")
    of = {(cell["workload"], pool.label): cell for pool in shown for cell in pool.cells}

    def draw(axes: Axes) -> None:
        width = 0.84 / max(len(shown), 1)
        for index, (colour, pool) in enumerate(zip(COLOURS, shown, strict=False)):
            own = [(place, of[name, pool.label]) for place, name in enumerate(workloads) if (name, pool.label) in of]
            speeds = [cell["speedup"] for _, cell in own]
            bars = _bars([Pool((cell,)) for _, cell in own], speeds, "speedup")
            places = [place + (index - (len(shown) - 1) / 2) * width for place, _ in own]
            axes.bar(places, speeds, width, yerr=bars, color=colour, label=pool.label, ecolor=INK, capsize=1.5)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set(xlabel="workload", ylabel="speedup, prompts included (x)", xticks=range(len(workloads)), xticklabels=workloads)
        axes.grid(visible=False, axis="x")

    def entry(name: str, pool: Pool) -> str:
        cell = of.get((name, pool.label))
        return "" if cell is None else f"{cell['speedup']:.2f} {span(cell.get('speedup_interval'))}".strip()

    rows = tuple((name, *(entry(name, pool) for pool in shown)) for name in workloads)
    return Plot(title, svg_of(title, draw), _note_of(pools(cells), shown), ("workload", *(pool.label for pool in shown)), rows)


def time_breakdown(found: Sequence[Pool]) -> Plot:
    """Plot the time per token by phase, plain decoding included."""
    title = "Time per token by phase"
    names = [pool.label for pool in found]
    times = [pool.ms_per_token() for pool in found]

    def draw(axes: Axes) -> None:
        left = [0.0] * len(found)
        for colour, phase in zip(COLOURS, PHASES, strict=False):
            parts = [each[phase] for each in times]
            axes.barh(names, parts, 0.7, left=left, color=colour, label=phase)
            left = [start + part for start, part in zip(left, parts, strict=True)]
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="milliseconds per token after the first", ylabel="method")

    rows = tuple(
        (name, *(f"{each[phase]:.3g}" for phase in PHASES), f"{sum(each.values()):.3g}")
        for name, each in zip(names, times, strict=True)
    )
    note = "Time of a round / its tokens; host is everything except drafting, the target's pass and verification."
    return Plot(
        title, svg_of(title, draw, len(found)), note, ("method", *(f"{phase}, ms" for phase in PHASES), "sum, ms"), rows
    )


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
    return f"{left} more draft lengths are in the table of all cells below." if left else ""


def _bars(found: Sequence[Pool], speeds: Sequence[float], name: str = "decode_speedup") -> Any:
    """Return the lengths of error bars below and above, or None if an interval is unknown."""
    bounds = [pool.interval(name) for pool in found]
    if not bounds or None in bounds:
        return None
    known = [each for each in bounds if each is not None]
    down = [max(speed - low, 0.0) for speed, (low, _) in zip(speeds, known, strict=True)]
    up = [max(high - speed, 0.0) for speed, (_, high) in zip(speeds, known, strict=True)]
    return [down, up]


def svg_of(title: str, draw: Callable[[Axes], None], num_bars: int = 0) -> str:
    """Return a drawing and its legend as a self-contained ``<svg>`` element that inherits the page's colours."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, max(HEIGHT, 0.9 + 0.28 * num_bars)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left")
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3)
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
