"""Compare two benchmark documents and report significant changes.

For each cell the repeats of both documents are compared by Welch's interval on logarithms, with Bonferroni's correction: all
intervals hold together with 95% confidence for what varies between the repeats of a run. What varies between two runs, such as
other guests of the machine, is not covered: a change to trust appears in runs of both, made in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from outrider.bench.documents import KEY, Cell, condition, is_plain, label
from outrider.bench.statistics import Change, change
from outrider.bench.tables import add_row, bare_table
from outrider.errors import printable
from outrider.registry import PLAIN

FALSE_ALARMS = 0.05  # probability per comparison
# Settings that should be equal. Documents of earlier versions lack some.
SETTINGS = ("target", "dtype", "weights", "device", "threads", "max_tokens", "same_text_mode", "verifier", "seed")
MACHINE = ("device", "threads")
COARSE = 0.1  # slowdown, as a share of the speed, that should be detected
NO_CHANGE = "no significant change"
# (tokens per second, speedup over plain): 1 higher, -1 lower, 0 neither
VERDICTS = {
    (0, 0): NO_CHANGE,
    (1, 1): "faster",
    (-1, -1): "slower",
    (1, 0): "faster, like plain decoding",
    (-1, 0): "slower, like plain decoding",
    (0, 1): "larger speedup over plain decoding",
    (0, -1): "smaller speedup over plain decoding",
    (1, -1): "faster, but less so than plain decoding",
    (-1, 1): "slower, but less so than plain decoding",
}


@dataclass(frozen=True)
class CellChange:
    """One cell in both documents."""

    before: Cell
    after: Cell
    tok_s: Change | None  # None with too few repeats
    speedup: Change | None
    same_machine: bool

    @property
    def verdict(self) -> str:
        """Return the verdict in words."""
        if self.tok_s is None or self.speedup is None:
            words = "too few repeats"
        elif is_plain(self.after):
            words = {0: NO_CHANGE, 1: "faster", -1: "slower"}[self.tok_s.direction]
        else:
            words = VERDICTS[self.tok_s.direction, self.speedup.direction]
        return words + ("; FEWER OUTPUTS EQUAL PLAIN DECODING'S" if self.texts_differ_more else "")

    @property
    def texts_differ_more(self) -> bool:
        before, after = self.before.get("same_text"), self.after.get("same_text")
        return before is not None and after is not None and after < before

    @property
    def judged(self) -> Change | None:
        """Return the change that decides: of tokens per second, or on another machine of the speedup; None if not tested."""
        return self.tok_s if self.same_machine else None if is_plain(self.after) else self.speedup

    @property
    def has_changed(self) -> bool:
        """Return whether a compared figure changed significantly: the speedup or, on the same machine, tokens per second."""
        compared = (self.speedup, self.tok_s) if self.same_machine else (self.speedup,)
        return any(found is not None and found.direction for found in compared)

    @property
    def is_loss(self) -> bool:
        """Return whether the cell is slower (on another machine: by speedup) or has fewer equal outputs."""
        return self.texts_differ_more or (self.judged is not None and self.judged.direction < 0)


@dataclass(frozen=True)
class Comparison:
    """All cells of two documents."""

    changes: list[CellChange]
    only_before: list[str]
    only_after: list[str]
    settings: dict[str, tuple[Any, Any]]  # settings that differ
    other_prompts: list[str]  # workloads whose prompts differ
    level: float  # level of each interval

    @property
    def has_loss(self) -> bool:
        return any(each.is_loss for each in self.changes)

    @property
    def is_tested(self) -> bool:
        """Return whether any cell has enough repeats for a test."""
        return any(each.judged is not None for each in self.changes)

    @property
    def undetected(self) -> float:
        """Return the largest slowdown, as a share of the speed, that the repeats of some tested cell cannot detect."""
        return max(1 - found.interval[0] / found.ratio for each in self.changes if (found := each.judged) is not None)

    @property
    def verdict(self) -> str:
        """Return a one-line summary."""
        if not self.changes:
            return "nothing to compare: the documents have no common cell"
        if all(is_plain(each.after) and not each.same_machine for each in self.changes):
            return "nothing to compare: the documents are of different machines and have no common cell with drafts"
        lost = sum(each.is_loss for each in self.changes)
        count = f"{len(self.changes)} cell{'s' * (len(self.changes) > 1)} compared"
        if not self.is_tested:
            return f"{count}, but too few repeats to test anything, {lost} for the worse: measure with --repeat 5 or more"
        line = f"{count}, {sum(each.has_changed for each in self.changes)} changed significantly, {lost} for the worse"
        if self.undetected > COARSE:
            line += f"; too few repeats to detect a slowdown below {self.undetected:.0%}: measure with a larger --repeat"
        return line


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Match cells by method, K, temperature, batch and workload, and compare them."""
    first, second = ({_key(cell): cell for cell in document["cells"]} for document in (before, after))
    common = [key for key in first if key in second]
    # Two intervals per cell, one for plain decoding, whose speedup is 1.
    num_intervals = sum(1 if is_plain(first[key]) else 2 for key in common)
    level = 1 - FALSE_ALARMS / max(num_intervals, 1)
    stated = [name for name in SETTINGS if name in before and name in after]
    settings = {name: (before[name], after[name]) for name in stated if before[name] != after[name]}
    digests = [document.get("prompt_digests", {}) for document in (before, after)]
    same_machine = settings.keys().isdisjoint(MACHINE)

    def changed(key: tuple[Any, ...], name: str) -> Change | None:
        return change(first[key].get(name) or (), second[key].get(name) or (), level)

    return Comparison(
        [
            CellChange(first[key], second[key], changed(key, "repeat_tok_s"), changed(key, "repeat_speedup"), same_machine)
            for key in common
        ],
        [_name(cell) for key, cell in first.items() if key not in second],
        [_name(cell) for key, cell in second.items() if key not in first],
        settings,
        sorted(name for name in digests[0].keys() & digests[1] if digests[0][name] != digests[1][name]),
        level,
    )


def _key(cell: Cell) -> tuple[Any, ...]:
    return (PLAIN, 0, *(cell[name] for name in KEY[2:])) if is_plain(cell) else tuple(cell[name] for name in KEY)


def _name(cell: Cell) -> str:
    return f"{condition(cell)}: {label(cell)}"


def table(comparison: Comparison) -> Table:
    """Return a table with one line per common cell."""
    view = bare_table()
    for name in ("cell", "tok/s", "change", "speedup", "change", "verdict"):
        is_text = name in ("cell", "verdict")
        view.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in _rows(comparison):
        add_row(view, row)
    return view


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    """Yield for each common cell: its name, tokens per second, their change, speedup, its change, verdict."""
    for each in comparison.changes:
        before, after = each.before, each.after
        speedup = ["", ""] if is_plain(after) else [f"{before['speedup']:.2f} > {after['speedup']:.2f}", _percent(each.speedup)]
        tok_s = [f"{before['tok_s']:.4g} > {after['tok_s']:.4g}", _percent(each.tok_s)]
        yield [_name(after), *tok_s, *speedup, each.verdict]


def _percent(found: Change | None) -> str:
    """Format the change and half of its interval: ``-9% ±4``."""
    if found is None:
        return "?"
    low, high = found.interval
    return f"{100 * (found.ratio - 1):+.0f}% ±{50 * (high - low):.0f}"


def document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON-ready data."""

    def figures(found: Change | None) -> dict[str, Any] | None:
        return None if found is None else {"ratio": found.ratio, "interval": list(found.interval)}

    return {
        "verdict": comparison.verdict,
        "has_loss": comparison.has_loss,
        "level": comparison.level,
        "settings": {name: list(values) for name, values in comparison.settings.items()},
        "other_prompts": comparison.other_prompts,
        "only_before": comparison.only_before,
        "only_after": comparison.only_after,
        "cells": [
            {name: each.after[name] for name in KEY}
            | {"tok_s": figures(each.tok_s), "speedup": figures(each.speedup), "verdict": each.verdict, "is_loss": each.is_loss}
            for each in comparison.changes
        ],
    }


def notes(comparison: Comparison) -> Sequence[str]:
    """Return notes below the table."""
    lines = [f"{name} differs: {before} > {after}" for name, (before, after) in comparison.settings.items()]
    if comparison.other_prompts:
        lines.append(f"prompts differ: {', '.join(map(printable, comparison.other_prompts))}")
    if not comparison.settings.keys().isdisjoint(MACHINE):
        lines.append("different machines: compared by speedup, not by tokens per second")
    lines += [f"only in the first: {name}" for name in comparison.only_before]
    lines += [f"only in the second: {name}" for name in comparison.only_after]
    return lines
