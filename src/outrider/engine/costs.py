"""What a target pass costs: seconds by (width, batch, cache bucket), learned from the rounds as they are run.

Knows numbers only; what to do with them is the policy's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from outrider.runner import ModelRunner

CACHE_BUCKET = 256  # committed tokens that share an entry
WEIGHT = 0.1  # of a new observation in the running mean
SPIKE = 1.25  # what lies higher above the mean is mostly a hiccup (compiling, another process) and is cut to it
JUMP = 0.7  # an observation below this part of the mean: the machine or the pass has become faster
STEP_SLOPE = 0.05  # assumed growth of an unmeasured pass per extra row, until one of that width has been run


class PassCosts:
    """Running means of measured passes; widths never run are interpolated between those that were."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], dict[int, float]] = {}  # (batch, cache bucket) -> width -> seconds
        self._is_settled: set[tuple[int, int, int]] = set()  # (batch, cache bucket, width) seen more than once

    def observe(self, width: int, batch: int, cache_len: int, seconds: float) -> None:
        """Adds a measured pass. A first value that the next one contradicts downwards (it held a compilation) is replaced."""
        bucket = cache_len // CACHE_BUCKET
        table = self._tables.setdefault((batch, bucket), {})
        mean = table.get(width)
        if mean is None:
            table[width] = seconds
        elif seconds >= JUMP * mean:
            table[width] = mean + WEIGHT * (min(seconds, SPIKE * mean) - mean)
            self._is_settled.add((batch, bucket, width))
        elif (batch, bucket, width) in self._is_settled:
            self._scale(seconds / mean)
        else:
            table[width] = seconds

    def _scale(self, factor: float) -> None:
        """Everything has become faster: a compiled pass took over. What is not being run must not keep its old price."""
        for table in self._tables.values():
            for width in table:
                table[width] *= factor
        self._is_settled.clear()

    def seconds(self, width: int, batch: int, cache_len: int) -> float | None:
        """Of a pass; None until one of this batch size has been seen."""
        table = self._table(batch, cache_len // CACHE_BUCKET)
        if not table:
            return None
        if width in table:
            return table[width]
        below = max((w for w in table if w < width), default=None)
        above = min((w for w in table if w > width), default=None)
        if below is None:
            assert above is not None  # the table has an entry
            return table[above]
        if above is None:
            return table[below] * (1 + STEP_SLOPE * (width - below))
        part = (width - below) / (above - below)
        return table[below] + part * (table[above] - table[below])

    def _table(self, batch: int, bucket: int) -> dict[int, float]:
        """The entries of this bucket, else of the nearest one that has some."""
        table = self._tables.get((batch, bucket))
        if table:
            return table
        nearest = min((key for key in self._tables if key[0] == batch), key=lambda key: abs(key[1] - bucket), default=None)
        return self._tables[nearest] if nearest is not None else {}


_of_runners: WeakKeyDictionary[ModelRunner, PassCosts] = WeakKeyDictionary()


def pass_costs(runner: ModelRunner) -> PassCosts:
    """The one table of a runner, whichever engines it serves."""
    return _of_runners.setdefault(runner, PassCosts())
