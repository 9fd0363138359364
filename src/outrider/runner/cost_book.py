"""Seconds of each part of a round, learned as rounds run: target passes, verifier and host, drafting, catching up.

One book per target serves the statistics, the draft-length policy and the proposers whose trees grow as far as they pay. Knows
numbers only. The width of a pass is its number of tokens over that of its requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

CACHE_BUCKET = 256  # committed tokens that share an entry
WEIGHT = 0.1  # of a new observation in the running mean
SPIKE = 1.25  # an observation higher above the mean is mostly a hiccup (compiling, another process) and is cut to it
FIRST_SPIKE = 2.0  # the same for the first values of a width; the very first is compared with the widths around it
JUMP = 0.7  # an observation below this part of the mean replaces it: the mean was of a slow phase of the machine
STEP_SLOPE = 0.05  # assumed growth of a pass per extra row, until two widths have run
STEPS = 4  # widths between two whole ones that have an entry of their own
UNKNOWN_COST_RATIO = 0.1  # of a draft step to a plain pass, until one was measured
MOST_TO_READ = 0.05  # of a plain round, for each token that a proposer had not seen, until it was measured twice
LINE_MEMORY = 0.95  # of what a line was fitted to, per reading
START_WEIGHT = 0.3  # of the point through which every line is drawn at first: a draft of -1 tokens takes no time
HICCUP = 2.0  # a reading this far above the line is cut
FAR = 1024.0  # a width beyond which nothing is scored

K = TypeVar("K")
Key = tuple[int, int]  # batch, cache bucket


@dataclass(frozen=True, slots=True)
class PlainRound:
    """Seconds of a decoding round without drafts, as far as it was measured."""

    score: float
    outside: float | None  # verifier and host; None until such a round ran


@dataclass(frozen=True, slots=True)
class RoundPrices:
    """Seconds of the parts of a round, for one batch."""

    plain: float  # a whole round without drafts
    outside: float  # verifier and host of a round with drafts
    draft: Callable[[int, int], float]  # (k, requests drafted for) -> seconds
    score: Callable[[float], float]  # width -> seconds
    is_padded: bool  # a pass runs as many tokens of each request as of the one with the most


class CostBook:
    """What a target's passes cost, and rounds without drafts; ``of_method`` adds what one method's drafting costs."""

    def __init__(self, is_padded: bool = False) -> None:
        """``is_padded``: a pass runs as many tokens of each request as of the one with the most."""
        self.is_padded = is_padded
        self._passes: dict[int, _PassTable] = {0: _PassTable()}  # first layer -> passes that begin there
        self._outside: dict[tuple[int, bool], float] = {}  # (batch, is greedy) -> verifier and host without drafts

    def renew(self) -> None:
        """Forgets the prices of passes: compiled ones took over from eager ones. The ratio of one width to another is kept, so
        that the first pass that runs says by how much all became cheaper.
        """
        for table in self._passes.values():
            table.renew()

    def width(self, lens: Sequence[float]) -> float:
        """The width of a pass that scores that many drafts of each request."""
        return 1 + max(lens) if self.is_padded else 1 + round(sum(lens) * STEPS / len(lens)) / STEPS

    # --- recording ----------------------------------------------------------------------------------------------------------

    def record_round(
        self,
        lens: Sequence[int],
        cache_len: int,
        score: float,
        outside: float,
        is_greedy: bool = True,
        first_layer: int = 0,
        is_cold: bool = False,
    ) -> None:
        """Adds a decoding round. ``lens``: drafts per request; ``score`` and ``outside``: seconds of its pass, and of verifier
        and host.

        ``is_greedy``: no request was sampled. ``first_layer``: where the pass began, drafting having run the layers before.
        ``is_cold``: another model just ran and took the target's place in the processor's caches: ignored unless nothing is
        known yet.
        """
        batch = len(lens)
        self.record_pass(self.width(lens), batch, cache_len, score, first_layer, is_cold)
        if not any(lens) and not (is_cold and (batch, is_greedy) in self._outside):
            _average(self._outside, (batch, is_greedy), outside)

    def record_pass(
        self, width: float, batch: int, cache_len: int, seconds: float, first_layer: int = 0, is_cold: bool = False
    ) -> None:
        """Adds a measured pass. A first value that the next one contradicts downwards (it held a compilation) is replaced."""
        self._passes.setdefault(first_layer, _PassTable()).add(width, batch, cache_len // CACHE_BUCKET, seconds, is_cold)

    # --- answers ------------------------------------------------------------------------------------------------------------

    def pass_seconds(self, width: float, batch: int, cache_len: int, first_layer: int = 0) -> float | None:
        """Seconds of a pass; None until one of this batch size ran."""
        table = self._passes.get(first_layer)
        return None if table is None else table.seconds(width, batch, cache_len // CACHE_BUCKET)

    def scores(self, batch: int, cache_len: int, first_layer: int = 0) -> Callable[[float], float]:
        """Seconds of a pass over drafts, by width. Where no pass began at that layer yet, those of whole ones."""
        bucket = cache_len // CACHE_BUCKET
        begun = self._passes.get(first_layer)
        known = (begun and begun.curve(FAR, batch, bucket)) or self._passes[0].curve(FAR, batch, bucket)
        if known is None:
            return lambda width: 0.0
        widths, seconds = known
        # A wider pass is never cheaper, unless a part of it ran before: where it measured so, that was noise.
        least = 0.0 if first_layer else self._passes[0].seconds(1, batch, bucket) or 0.0

        def score(width: float) -> float:
            above = min(max(bisect_right(widths, width), 1), len(widths) - 1)
            below = above - 1
            part = (width - widths[below]) / (widths[above] - widths[below])
            return max(seconds[below] + part * (seconds[above] - seconds[below]), least)

        return score

    def tree_scores(self, most: int, batch: int, cache_len: int) -> list[float]:
        """Seconds of passes over 0, 1, ..., ``most`` drafts of each request, none cheaper than a narrower one.

        A batch that never ran costs what as many rows of one request do.
        """
        found: list[float] = []
        for num_drafts in range(most, -1, -1):
            seconds = self.pass_seconds(1 + num_drafts, batch, cache_len)
            seconds = seconds or self.pass_seconds(batch * (1 + num_drafts), 1, cache_len) or 1.0
            found.append(min(seconds, found[-1]) if found else seconds)
        return found[::-1]

    def plain_round(self, batch: int, cache_len: int, is_greedy: bool = True) -> PlainRound | None:
        """A decoding round without drafts; None until a pass of that width and batch ran: no guess from wider ones."""
        score = self.pass_seconds(1, batch, cache_len)
        if score is None or batch not in self._passes[0].run_plain:
            return None
        return PlainRound(score, self.plain_outside(batch, is_greedy))

    def plain_outside(self, batch: int, is_greedy: bool) -> float | None:
        """Seconds of verifier and host in a round without drafts; None until one ran."""
        return self._outside.get((batch, is_greedy))

    def of_method(self, is_greedy: bool) -> MethodCosts:
        """A new record of what one method's rounds cost, on top of this book's passes. Sampling takes longer than an argmax, so
        that greedy rounds and others have one each.
        """
        return MethodCosts(self, is_greedy)


class MethodCosts:
    """What rounds of one method cost: drafting k tokens, catching up with text, verifier and host, over the book's passes."""

    def __init__(self, book: CostBook, is_greedy: bool) -> None:
        self._book, self._is_greedy = book, is_greedy
        self._draft: dict[int, Line] = {}  # requests drafted for -> seconds of drafting
        self._catch_up: float | None = None  # seconds for each token that the proposer had not seen
        self._first_layer = 0  # where the passes over drafts begin
        self._outside: dict[int, float] = {}  # batch -> seconds of verifier and host in a round with drafts

    def record_drafts(self, k: int, num_drafting: int, seconds: float) -> None:
        """Adds a drafting of ``k`` tokens (the longest draft, or what was asked for in vain) for ``num_drafting`` requests."""
        self._draft.setdefault(num_drafting, Line()).add(k, seconds)

    def record_drafted_round(self, batch: int, outside: float, first_layer: int | None) -> None:
        """Adds verifier and host of a decoding round that had drafts, and where its pass began; None: they were no method's."""
        if first_layer is not None:
            self._first_layer = first_layer
        _average(self._outside, batch, outside)

    def record_catch_up(self, seconds: float, num_tokens: int, plain_round: float) -> float:
        """Adds what a proposer took, beyond its steps, to read text that it had not seen. Returns those seconds.

        The first reading may have held a compilation: neither it nor any other raises the price beyond measure.
        """
        seconds = max(seconds, 0.0)
        each = min(seconds / num_tokens, 2 * self._catch_up if self._catch_up else MOST_TO_READ * plain_round)
        self._catch_up = each if self._catch_up is None else self._catch_up + 0.5 * (each - self._catch_up)
        return seconds

    def draft(self, k: int, num_drafting: int, plain_pass: float) -> float:
        """Seconds of drafting k tokens for that many requests; for a number not drafted for yet those of the nearest one."""
        if k == 0:
            return 0.0
        line = self._draft.get(num_drafting)
        if line is None:
            if not self._draft:
                return UNKNOWN_COST_RATIO * plain_pass * k
            line = self._draft[min(self._draft, key=lambda known: abs(known - num_drafting))]
        return line.at(k)

    def catch_up(self, num_tokens: int) -> float:
        """Seconds for the proposer to read that many tokens."""
        return num_tokens * (self._catch_up or 0.0)

    def outside(self, batch: int, has_drafts: bool) -> float:
        """Seconds of verifier and host; those of the other kind of round while this one is unknown."""
        with_drafts, plain = self._outside.get(batch), self._book.plain_outside(batch, self._is_greedy)
        found = (with_drafts, plain) if has_drafts else (plain, with_drafts)
        return next((each for each in found if each is not None), 0.0)

    def round(self, k: int, lens: Sequence[int], longest: int, num_drafting: int, cache_len: int) -> float:
        """Seconds of a round that asked ``num_drafting`` requests for k drafts and scored ``lens``, ``longest`` the deepest."""
        batch = len(lens)
        plain_pass = score = self._book.pass_seconds(1, batch, cache_len) or 0.0
        if any(lens):
            score = self._book.scores(batch, cache_len, self._first_layer)(self._book.width(lens))
        return self.draft(longest or k, num_drafting, plain_pass) + score + self.outside(batch, longest > 0)

    def widening(self, lens: Sequence[float], cache_len: int) -> float:
        """Seconds that a pass over that many drafts per request takes beyond a plain one."""
        score = self._book.scores(len(lens), cache_len)
        return score(self._book.width(lens)) - score(1.0)

    def prices(self, batch: int, cache_len: int, forced: Sequence[float] = ()) -> RoundPrices | None:
        """Seconds of rounds of this batch, by the drafts in them; None until a round of this batch size ran.

        ``forced``: drafts of a grammar per request that every round scores, with other drafts and without.
        """
        plain_pass = self._book.pass_seconds(1, batch, cache_len)
        is_known = batch in self._outside or self._book.plain_outside(batch, self._is_greedy) is not None
        if plain_pass is None or not is_known:
            return None
        score = self._book.scores(batch, cache_len, self._first_layer)
        further = self._book.width(forced) - 1 if any(forced) else 0.0
        return RoundPrices(
            plain_pass + self.outside(batch, False) + (self.widening(forced, cache_len) if further else 0.0),
            self.outside(batch, True),
            lambda k, num_drafting: self.draft(k, num_drafting, plain_pass),
            (lambda width: score(width + further)) if further else score,
            self._book.is_padded,
        )


class _PassTable:
    """Running means of measured passes; widths that never ran are interpolated between those that did."""

    def __init__(self) -> None:
        self.run_plain: set[int] = set()  # batches of which a pass without drafts was measured
        self._tables: dict[Key, dict[float, float]] = {}  # width -> seconds
        self._before: dict[Key, dict[float, float]] = {}  # the same of the passes that these took over from
        self._counts: dict[tuple[Key, float], int] = {}  # how often a width was measured there

    def renew(self) -> None:
        self._before = self._tables or self._before
        self._tables = {}
        self._counts.clear()
        self.run_plain.clear()

    def add(self, width: float, batch: int, bucket: int, seconds: float, is_cold: bool) -> None:
        key = batch, bucket
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = dict(_nearest(self._tables, key)) or self._as_before(key, width, seconds)
        count = self._counts.get((key, width), 0)
        mean = table.get(width)
        if is_cold and mean is not None:
            return
        if mean is None:
            # One reading alone, far above what its neighbours say, is rather a hiccup than the price.
            most = table[1] * width if 1 in table else seconds  # what passes of one row would take
            table[width] = min(seconds, most, FIRST_SPIKE * (self._at(table, width, batch) or seconds))
        elif count == 0:
            self._adopt(key, table, seconds / mean)
        elif seconds >= JUMP * mean:
            spike = SPIKE if count > 1 else FIRST_SPIKE
            table[width] = mean + max(WEIGHT, 1 / (1 + count)) * (min(seconds, spike * mean) - mean)
        else:
            table[width] = seconds
        self._counts[key, width] = count + 1
        if width == 1:
            self.run_plain.add(batch)

    def seconds(self, width: float, batch: int, bucket: int) -> float | None:
        return self._at(self._table((batch, bucket)), width, batch)

    def curve(self, widest: float, batch: int, bucket: int) -> tuple[list[float], list[float]] | None:
        """Widths from 1 to ``widest`` and their seconds, between which ``seconds`` is a straight line."""
        table = self._table((batch, bucket))
        if not table:
            return None
        widths = sorted({1.0, float(widest), *(width for width in table if 1 < width < widest)})
        return widths, [self._at(table, width, batch) or 0.0 for width in widths]

    def _as_before(self, key: Key, width: float, seconds: float) -> dict[float, float]:
        """The prices of the passes that these took over from, scaled by how much cheaper one of ``width`` became."""
        before = _nearest(self._before, key)
        then = self._at(before, width, key[0])
        return {w: price * seconds / then for w, price in before.items()} if then else {}

    def _adopt(self, key: Key, table: dict[float, float], factor: float) -> None:
        """The first pass that runs at a price copied from a neighbour scales all widths that did not run here."""
        for width in table:
            if (key, width) not in self._counts:
                table[width] *= factor

    def _at(self, table: dict[float, float], width: float, batch: int) -> float | None:
        """The price of a width, interpolated between its neighbours. Beyond the widest it follows the slope up to it, but costs
        no more than as many passes of that one; below the narrowest, rows cost ``STEP_SLOPE``.
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
        """Seconds per width where only one was measured: a row costs what it does in the nearest batch size with more."""
        known = [key for key, table in self._tables.items() if len(table) > 1]
        if not known:
            return STEP_SLOPE * batch * seconds
        nearest = min(known, key=lambda key: abs(key[0] - batch))
        return _slope(self._tables[nearest]) * batch / nearest[0]

    def _table(self, key: Key) -> dict[float, float]:
        """The entries of this batch size and cache length, or of the nearest length."""
        found = self._tables.get(key)
        return _nearest(self._tables, key) if found is None else found


class Line:
    """Seconds as a straight line in the number of drafts, by least squares over what was seen lately."""

    def __init__(self) -> None:
        self.weight = self._k = self._seconds = self._k_k = self._k_seconds = 0.0  # sums over the readings
        self._base = self._slope = 0.0

    def at(self, k: int) -> float:
        return self._base + self._slope * k

    def add(self, k: int, seconds: float) -> None:
        """Adds a reading. The first may have held a compilation: one that contradicts it downwards replaces it."""
        memory = LINE_MEMORY
        if self.weight > 1.5:
            seconds = min(seconds, HICCUP * self.at(k))
        elif seconds < self.at(k) / 4:
            memory = 0.0
        self.weight = memory * self.weight + 1
        self._k = memory * self._k + k
        self._seconds = memory * self._seconds + seconds
        self._k_k = memory * self._k_k + k * k
        self._k_seconds = memory * self._k_seconds + k * seconds
        self._fit()

    def _fit(self) -> None:
        weight, k, k_k = self.weight + START_WEIGHT, self._k - START_WEIGHT, self._k_k + START_WEIGHT
        slope = (weight * self._k_seconds - k * self._seconds) / (weight * k_k - k * k)
        # Neither a longer draft nor the lack of one saves time.
        self._slope = min(max(slope, 0.0), self._seconds / self._k)
        self._base = max((self._seconds - self._slope * self._k) / self.weight, 0.0)


def _average(means: dict[K, float], key: K, seconds: float) -> None:
    """Adds a reading to a running mean: cut where far above it, in its place where far below."""
    mean = means.get(key)
    if mean is not None and seconds >= mean / 2:
        seconds = mean + WEIGHT * (min(seconds, SPIKE * mean) - mean)
    means[key] = seconds


def _nearest(tables: dict[Key, dict[float, float]], key: Key) -> dict[float, float]:
    """The entries of the nearest bucket of this batch size."""
    nearest = min((each for each in tables if each[0] == key[0]), key=lambda each: abs(each[1] - key[1]), default=None)
    return tables[nearest] if nearest is not None else {}


def _slope(table: dict[float, float]) -> float:
    """Seconds per width from the narrowest to the widest."""
    narrow, wide = min(table), max(table)
    return max((table[wide] - table[narrow]) / (wide - narrow), 0.0)
