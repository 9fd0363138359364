"""Pool cells of several workloads for the plots of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

from outrider.bench.documents import Cell, is_plain, label
from outrider.bench.measure import PHASES


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


def at(cells: Sequence[Cell], **values: Any) -> list[Cell]:
    """Return the cells with these values."""
    return [cell for cell in cells if all(cell[name] == value for name, value in values.items())]


def distinct(cells: Sequence[Cell], name: str) -> list[Any]:
    """Return the distinct values of one key, in order."""
    return list(dict.fromkeys(cell[name] for cell in cells))
