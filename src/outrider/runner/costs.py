"""What a target pass costs: seconds by (width, batch, cache bucket), learned from the rounds as they are run. The width of a
pass is its number of tokens over that of its requests.

Knows numbers only; what to do with them is the policy's business, and that of proposers whose trees grow as far as they pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CACHE_BUCKET = 256  # committed tokens that share an entry
WEIGHT = 0.1  # of a new observation in the running mean
SPIKE = 1.25  # what lies higher above the mean is mostly a hiccup (compiling, another process) and is cut to it
FIRST_SPIKE = 2.0  # the same for a width's first values; the very first is held against the widths around it
JUMP = 0.7  # an observation below this part of the mean: the mean is no longer true
STEP_SLOPE = 0.05  # assumed growth of a pass per extra row, until two widths have been run
STEPS = 4  # widths between two whole ones that have an entry of their own


@dataclass(frozen=True, slots=True)
class PlainRound:
    """What a decoding round without drafts takes, as far as it was measured: seconds of the target's pass and of the rest."""

    score: float
    outside: float | None  # verifier and host; None until such a round was run


class PassCosts:
    """Running means of measured passes; widths never run are interpolated between those that were."""

    def __init__(self, is_padded: bool = False) -> None:
        """``is_padded``: a pass runs as many tokens of each request as of the one with the most."""
        self.is_padded = is_padded
        self._behind: dict[int, PassCosts] = {}  # first layer -> prices of their own
        self._tables: dict[tuple[int, int], dict[float, float]] = {}  # (batch, cache bucket) -> width -> seconds
        self._before: dict[tuple[int, int], dict[float, float]] = {}  # the same of the passes that these took over from
        self._counts: dict[tuple[int, int, float], int] = {}  # (batch, cache bucket, width) -> how often it was measured there
        self._run_plain: set[int] = set()  # batches of which a pass without drafts was measured
        self._outside: dict[int, float] = {}  # batch -> seconds that a round without drafts takes beside its pass

    def renew(self) -> None:
        """Forgets all prices: the passes are others now, compiled ones in the place of eager ones. What one width costs beside
        another is kept, for the first that is run to say by how much all became cheaper.
        """
        self._before = self._tables or self._before
        self._tables = {}
        self._counts.clear()
        self._run_plain.clear()
        self._outside.clear()
        for prices in self._behind.values():
            prices.renew()

    def behind(self, first_layer: int) -> PassCosts:
        """The prices of passes that begin at that layer, because drafting has run those before it; at 0 these."""
        return self if first_layer == 0 else self._behind.setdefault(first_layer, PassCosts(self.is_padded))

    def width(self, lens: Sequence[int]) -> float:
        """The width of a pass that scores so many drafts of each request."""
        return 1 + max(lens) if self.is_padded else 1 + round(sum(lens) * STEPS / len(lens)) / STEPS

    def observe(self, width: float, batch: int, cache_len: int, seconds: float, is_cold: bool = False) -> None:
        """Adds a measured pass. A first value that the next one contradicts downwards (it held a compilation) is replaced.

        ``is_cold``: another model just ran and took this one's place in the processor's caches, so what is known is better.
        """
        key = batch, cache_len // CACHE_BUCKET
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = dict(_nearest(self._tables, *key)) or self._as_before(key, width, seconds)
        count = self._counts.get((*key, width), 0)
        mean = table.get(width)
        if is_cold and mean is not None:
            return
        if mean is None:
            # One reading alone, far above what its neighbours say, is rather a hiccup than the price.
            most = table[1] * width if 1 in table else seconds  # for what passes of one row would do
            table[width] = min(seconds, most, FIRST_SPIKE * (self._at(table, width, batch) or seconds))
        elif count == 0:
            self._adopt(key, table, seconds / mean)
        elif seconds >= JUMP * mean:
            spike = SPIKE if count > 1 else FIRST_SPIKE
            table[width] = mean + max(WEIGHT, 1 / (1 + count)) * (min(seconds, spike * mean) - mean)
        else:
            table[width] = seconds  # the mean was of a slow phase of the machine
        self._counts[(*key, width)] = count + 1
        if width == 1:
            self._run_plain.add(batch)

    def observe_outside(self, batch: int, seconds: float, is_cold: bool = False) -> None:
        """Adds what a decoding round without drafts took beside its pass: verifier and host. ``is_cold`` as above."""
        mean = self._outside.get(batch)
        if is_cold and mean is not None:
            return
        if mean is not None and seconds >= mean / 2:
            seconds = mean + WEIGHT * (min(seconds, SPIKE * mean) - mean)
        self._outside[batch] = seconds

    def plain_round(self, batch: int, cache_len: int) -> PlainRound | None:
        """A decoding round without drafts; None until a pass of that width and batch was measured: no guess from wider ones."""
        if batch not in self._run_plain:
            return None
        score = self.seconds(1, batch, cache_len)
        return None if score is None else PlainRound(score, self._outside.get(batch))

    def seconds(self, width: float, batch: int, cache_len: int) -> float | None:
        """Of a pass; None until one of this batch size has been seen."""
        return self._at(self._table(batch, cache_len), width, batch)

    def curve(self, widest: float, batch: int, cache_len: int) -> tuple[list[float], list[float]] | None:
        """Widths from 1 to ``widest`` and their seconds, between which ``seconds`` is a straight line."""
        table = self._table(batch, cache_len)
        if not table:
            return None
        widths = sorted({1.0, float(widest), *(width for width in table if 1 < width < widest)})
        return widths, [self._at(table, width, batch) or 0.0 for width in widths]

    def _as_before(self, key: tuple[int, int], width: float, seconds: float) -> dict[float, float]:
        """The prices of the passes that these took over from, by as much cheaper as one of ``width`` is that takes so long."""
        before = _nearest(self._before, *key)
        then = self._at(before, width, key[0])
        return {w: price * seconds / then for w, price in before.items()} if then else {}

    def _adopt(self, key: tuple[int, int], table: dict[float, float], factor: float) -> None:
        """The first pass run at a price taken over from a neighbour: by what it differs, all that was not run here does."""
        for width in table:
            if (*key, width) not in self._counts:
                table[width] *= factor

    def _at(self, table: dict[float, float], width: float, batch: int) -> float | None:
        """The price of a width, between those of its neighbours; beyond the widest as the slope up to it has it, but no more
        than as many passes of that one, and below the narrowest as rows usually cost, so that what is never run does not look
        as dear as what is.
        """
        if width in table or not table:
            return table.get(width)
        below = max((w for w in table if w < width), default=None)
        above = min((w for w in table if w > width), default=None)
        if below is None:
            assert above is not None  # the table has an entry
            return table[above] * (1 + STEP_SLOPE * (width - 1)) / (1 + STEP_SLOPE * (above - 1))
        if above is None:
            slope = _slope(table) if len(table) > 1 else self._slope_of_others(batch, table[below])
            return table[below] + min(slope, table[below] / below) * (width - below)
        part = (width - below) / (above - below)
        return table[below] + part * (table[above] - table[below])

    def _slope_of_others(self, batch: int, seconds: float) -> float:
        """Seconds a width where only one was measured: a row costs what it does in the nearest batch size where more were."""
        known = [key for key, table in self._tables.items() if len(table) > 1]
        if not known:
            return STEP_SLOPE * batch * seconds
        nearest = min(known, key=lambda key: abs(key[0] - batch))
        return _slope(self._tables[nearest]) * batch / nearest[0]

    def _table(self, batch: int, cache_len: int) -> dict[float, float]:
        """The entries of this batch size and cache length, or of the nearest length."""
        bucket = cache_len // CACHE_BUCKET
        found = self._tables.get((batch, bucket))
        return _nearest(self._tables, batch, bucket) if found is None else found


def _nearest(tables: dict[tuple[int, int], dict[float, float]], batch: int, bucket: int) -> dict[float, float]:
    """The entries of the nearest bucket of this batch size."""
    nearest = min((key for key in tables if key[0] == batch), key=lambda key: abs(key[1] - bucket), default=None)
    return tables[nearest] if nearest is not None else {}


def _slope(table: dict[float, float]) -> float:
    """Seconds a width from the narrowest to the widest."""
    narrow, wide = min(table), max(table)
    return max((table[wide] - table[narrow]) / (wide - narrow), 0.0)
