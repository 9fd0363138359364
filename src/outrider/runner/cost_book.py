"""Seconds of each part of a round, learned as rounds run: target passes, verifier and host, drafting, catching up.

One book per target serves the statistics, the draft-length policy and the proposers that size their trees by expected gain. It
stores numbers only. The width of a pass is its number of tokens divided by its number of requests.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

CACHE_BUCKET = 256  # committed tokens that share an entry
WEIGHT = 0.1  # weight of a new observation in the running mean
SPIKE = 1.25  # observations above this multiple of the mean are clipped: mostly interference (compiling, other processes)
FIRST_SPIKE = 2.0  # the same for the second reading; the first one of a width is compared with neighbouring widths
JUMP = 0.7  # an observation below this multiple of the mean replaces it: the mean was measured while the machine was slow
LINE_JUMP = 0.25  # the same for the first reading of a fitted line
DEFAULT_SLOPE = 0.05  # assumed growth of a pass per extra row, until two widths have run
WIDTH_RESOLUTION = 4  # table entries per unit of width
UNKNOWN_COST_RATIO = 0.1  # assumed cost of a draft step relative to a plain pass, until one is measured
MAX_FIRST_CATCH_UP = 0.05  # limit of a proposer's catch-up cost per token, in plain rounds, until it is measured twice
CATCH_UP_WEIGHT = 0.5  # weight of a new reading of a proposer's catch-up
LINE_MEMORY = 0.95  # decay per reading of the earlier readings of a fitted line
START_WEIGHT = 0.3  # weight of each line's initial point: a draft of -1 tokens takes no time
LINE_SPIKE = 2.0  # a reading above this multiple of the line is clipped

Key = tuple[int, int]  # batch, cache bucket


@dataclass(frozen=True, slots=True)
class PlainRound:
    """Measured seconds of a decoding round without drafts."""

    score: float
    overhead: float | None  # verifier and host; None until measured


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Seconds of the parts of a round, for one batch."""

    plain: float  # a whole round without drafts
    overhead: float  # verifier and host of a round with drafts
    draft: Callable[[float, int], float]  # (k, requests drafted for) -> seconds
    score: Callable[[float], float]  # width -> seconds
    is_padded: bool  # each request of a pass is padded to the longest

    @property
    def at_best(self) -> RoundCosts:
        """Return optimistic costs of later rounds: a draft costs at most ``UNKNOWN_COST_RATIO`` plain rounds, verifier and host
        as much as without drafts.
        """
        draft, most = self.draft, UNKNOWN_COST_RATIO * self.plain
        return replace(
            self,
            overhead=min(self.overhead, self.plain - self.score(1.0)),
            draft=lambda k, num_drafting: min(draft(k, num_drafting), most * k),
        )


class CostBook:
    """Costs of a target's passes and of rounds without drafts; ``MethodCosts`` adds those of one method."""

    def __init__(self, is_padded: bool = False) -> None:
        """``is_padded``: each request of a pass is padded to the longest."""
        self.is_padded = is_padded
        self._passes: dict[int, _PassTable] = {0: _PassTable()}  # first layer -> passes that begin there
        self._overhead: dict[tuple[int, bool], Mean] = {}  # (batch, is greedy) -> verifier and host without drafts

    def renew(self) -> None:
        """Discard the costs of passes, because compiled ones replace them."""
        self._passes = {0: _PassTable()}

    def width(self, lens: Sequence[float]) -> float:
        """Return the width of a pass that scores this many drafts for each request."""
        return 1 + max(lens) if self.is_padded else 1 + round(sum(lens) * WIDTH_RESOLUTION / len(lens)) / WIDTH_RESOLUTION

    # --- recording ----------------------------------------------------------------------------------------------------------

    def record_round(
        self,
        lens: Sequence[int],
        cache_len: int,
        score: float,
        overhead: float,
        is_greedy: bool = True,
        first_layer: int = 0,
        is_cold: bool = False,
    ) -> None:
        """Record a decoding round.

        ``lens``: drafts per request; ``score`` and ``overhead``: seconds of its pass, and of verifier and host.
        ``is_greedy``: no request was sampled. ``first_layer``: where the pass began, if drafting ran the layers before.
        ``is_cold``: another model ran just before and evicted the target from the CPU caches; such a round is ignored unless
        it is the first.
        """
        batch = len(lens)
        self.record_pass(self.width(lens), batch, cache_len, score, first_layer, is_cold)
        if not any(lens) and not (is_cold and (batch, is_greedy) in self._overhead):
            self._overhead.setdefault((batch, is_greedy), Mean(overhead, count=0)).add(overhead)

    def record_pass(
        self, width: float, batch: int, cache_len: int, seconds: float, first_layer: int = 0, is_cold: bool = False
    ) -> None:
        """Record a measured pass. A much lower second value replaces the first one, which included a compilation."""
        self._passes.setdefault(first_layer, _PassTable()).add(width, batch, cache_len // CACHE_BUCKET, seconds, is_cold)

    # --- answers ------------------------------------------------------------------------------------------------------------

    def pass_seconds(self, width: float, batch: int, cache_len: int, first_layer: int = 0) -> float | None:
        """Return the seconds of a pass; None until one of this batch size ran."""
        table = self._passes.get(first_layer)
        return None if table is None else table.costs(batch, cache_len // CACHE_BUCKET)(width)

    def score_seconds(self, batch: int, cache_len: int, first_layer: int = 0) -> Callable[[float], float]:
        """Return the seconds of a scoring pass that begins at ``first_layer`` as a function of its width.

        Until one was measured they are those of whole passes.
        """
        bucket = cache_len // CACHE_BUCKET
        whole = self._passes[0].costs(batch, bucket)
        begun = self._passes[first_layer].costs(batch, bucket) if first_layer in self._passes else whole
        seconds = whole if begun(1) is None else begun
        # A wider pass never costs less unless drafting ran a part of it; a lower measurement is noise.
        least = 0.0 if first_layer else whole(1) or 0.0
        return lambda width: max(seconds(width) or 0.0, least)

    def tree_scores(self, most: int, batch: int, cache_len: int) -> list[float]:
        """Return the seconds of passes over 0, 1, ..., ``most`` drafts of each request, made non-decreasing.

        A batch size that never ran costs as much as one request with the same number of rows.
        """
        found: list[float] = []
        for num_drafts in range(most, -1, -1):
            seconds = self.pass_seconds(1 + num_drafts, batch, cache_len)
            seconds = seconds or self.pass_seconds(batch * (1 + num_drafts), 1, cache_len) or 1.0
            found.append(min(seconds, found[-1]) if found else seconds)
        return found[::-1]

    def plain_round(self, batch: int, cache_len: int, is_greedy: bool = True) -> PlainRound | None:
        """Return the costs of a decoding round without drafts; None until such a pass ran: no extrapolation from wider ones."""
        score = self.pass_seconds(1, batch, cache_len)
        if score is None or batch not in self._passes[0].run_plain:
            return None
        return PlainRound(score, self.plain_overhead(batch, is_greedy))

    def plain_overhead(self, batch: int, is_greedy: bool) -> float | None:
        """Return the mean seconds of verifier and host in a round without drafts; None until one ran."""
        found = self._overhead.get((batch, is_greedy))
        return None if found is None else found.seconds


class MethodCosts:
    """Costs of one method's rounds: drafting, catching up with committed tokens, verifier and host, and the book's passes."""

    def __init__(self, book: CostBook, is_greedy: bool) -> None:
        """``is_greedy``: whether these are the costs of greedy rounds. Sampled ones take longer than an argmax."""
        self._book, self._is_greedy = book, is_greedy
        self._draft: dict[int, Line] = {}  # requests drafted for -> seconds of drafting
        self._ignored: set[tuple[str, int]] = set()  # costs whose first reading was ignored
        self._catch_up: float | None = None  # seconds per token that the proposer had not processed
        self._last_catch_up = 0.0  # the last reading of it
        self._first_layer = 0  # where the passes over drafts begin
        self._overhead: dict[int, Mean] = {}  # batch -> seconds of verifier and host in a round with drafts

    def record_drafts(self, k: int, num_drafting: int, seconds: float, plain_round: float = inf) -> None:
        """Record the drafting of ``k`` tokens for ``num_drafting`` requests.

        ``k``: the longest draft, or the requested number if none was made; ``plain_round``: seconds of a round without drafts.
        """
        if num_drafting not in self._draft:
            if self._ignores(("drafts", num_drafting), seconds, most=k * plain_round):
                return
            seconds = min(seconds, k * plain_round)
        self._draft.setdefault(num_drafting, Line()).add(k, seconds)

    def record_drafted_round(self, batch: int, overhead: float, first_layer: int | None, plain_round: float = inf) -> None:
        """Record ``overhead``, the seconds of verifier and host in a round with drafts.

        ``first_layer``: where its pass began; None if all drafts are a grammar's.
        """
        if first_layer is not None:
            self._first_layer = first_layer
        if batch not in self._overhead:
            if self._ignores(("overhead", batch), overhead, most=plain_round):
                return
            overhead = min(overhead, plain_round)
        self._overhead.setdefault(batch, Mean(overhead, count=0)).add(overhead)

    def record_catch_up(self, seconds: float, num_tokens: int, plain_round: float) -> float:
        """Record the time that a proposer took, beyond its draft steps, to process new committed tokens; return these seconds.

        A reading counts as at most the one before it, because a single one may include a compilation.
        """
        seconds = max(seconds, 0.0)
        each = seconds / num_tokens
        if self._catch_up is None:
            self._catch_up = min(each, MAX_FIRST_CATCH_UP * plain_round)
        else:
            self._catch_up += CATCH_UP_WEIGHT * (min(each, self._last_catch_up) - self._catch_up)
        self._last_catch_up = each
        return seconds

    def _ignores(self, what: tuple[str, int], seconds: float, most: float) -> bool:
        """Return whether to ignore a first reading above ``most``, which may include a compilation.

        Only once for each cost: a second one counts as ``most``.
        """
        if seconds <= most or what in self._ignored:
            return False
        self._ignored.add(what)
        return True

    def draft(self, k: float, num_drafting: int, plain_pass: float) -> float:
        """Return the seconds of drafting k tokens for this many requests, or for the nearest measured number."""
        if k == 0:
            return 0.0
        line = self._draft.get(num_drafting)
        if line is None:
            if not self._draft:
                return UNKNOWN_COST_RATIO * plain_pass * k
            line = self._draft[min(self._draft, key=lambda known: abs(known - num_drafting))]
        return line.at(k)

    def catch_up(self, num_tokens: int) -> float:
        """Return the proposer's seconds to catch up with this many tokens."""
        return num_tokens * (self._catch_up or 0.0)

    def overhead(self, batch: int, has_drafts: bool) -> float:
        """Return the seconds of verifier and host; those of the other kind of round (with or without drafts) until measured."""
        own, plain = self._overhead.get(batch), self._book.plain_overhead(batch, self._is_greedy)
        with_drafts = None if own is None else own.seconds
        found = (with_drafts, plain) if has_drafts else (plain, with_drafts)
        return next((each for each in found if each is not None), 0.0)

    def round(self, k: int, lens: Sequence[int], longest: int, num_drafting: int, cache_len: int) -> float:
        """Return the seconds of a round that drafts for ``num_drafting`` requests, k tokens each, and scores ``lens``.

        ``longest``: depth of the deepest draft.
        """
        batch = len(lens)
        plain_pass = score = self._book.pass_seconds(1, batch, cache_len) or 0.0
        if any(lens):
            score = self._book.score_seconds(batch, cache_len, self._first_layer)(self._book.width(lens))
        return self.draft(longest or k, num_drafting, plain_pass) + score + self.overhead(batch, longest > 0)

    def widening(self, lens: Sequence[float], cache_len: int) -> float:
        """Return the additional seconds of a pass over this many drafts per request, compared with a plain pass."""
        score = self._book.score_seconds(len(lens), cache_len)
        return score(self._book.width(lens)) - score(1.0)

    def round_costs(self, batch: int, cache_len: int, num_grammar: Sequence[float] = ()) -> RoundCosts | None:
        """Return the costs of rounds of this batch size; None until such a round ran.

        ``num_grammar``: drafts that a grammar adds to every round, per request.
        """
        plain_pass = self._book.pass_seconds(1, batch, cache_len)
        is_known = batch in self._overhead or self._book.plain_overhead(batch, self._is_greedy) is not None
        if plain_pass is None or not is_known:
            return None
        score = self._book.score_seconds(batch, cache_len, self._first_layer)
        further = self._book.width(num_grammar) - 1 if any(num_grammar) else 0.0
        return RoundCosts(
            plain_pass + self.overhead(batch, False) + (self.widening(num_grammar, cache_len) if further else 0.0),
            self.overhead(batch, True),
            lambda k, num_drafting: self.draft(k, num_drafting, plain_pass),
            (lambda width: score(width + further)) if further else score,
            self._book.is_padded,
        )


class _PassTable:
    """Running means of measured passes; widths that never ran are interpolated between those that did."""

    def __init__(self) -> None:
        self.run_plain: set[int] = set()  # batch sizes with a measured pass without drafts
        self._tables: dict[Key, dict[float, Mean]] = {}  # seconds by width, in ascending order; copied ones have no readings
        self._anchors: dict[Key, float] = {}  # measured width by whose readings the copied costs are rescaled

    def add(self, width: float, batch: int, bucket: int, seconds: float, is_cold: bool) -> None:
        key = batch, bucket
        if key not in self._tables:
            self._tables[key] = self._start_table(key, width)
        table = self._tables[key]
        mean = table.get(width)
        if is_cold and mean is not None and (width != 1 or batch in self.run_plain):
            return
        if mean is None:
            table[width] = Mean(self._first_reading(table, width, batch, seconds))
            self._tables[key] = dict(sorted(table.items()))
        else:
            if mean.count == 0:
                self._anchors.setdefault(key, width)
            before = mean.seconds
            mean.add(seconds)
            if self._anchors.get(key) == width:  # in each reading, because the first one may have been disturbed
                for each in table.values():
                    if each.count == 0:
                        each.seconds *= mean.seconds / before
        if width == 1:
            self.run_plain.add(batch)

    def costs(self, batch: int, bucket: int) -> Callable[[float], float | None]:
        """Return a function from a pass's width to seconds (None if none ran), at this cache length or the nearest one.

        It is valid until the next ``add``.
        """
        key = batch, bucket
        table = self._tables.get(key) or _nearest(self._tables, key)
        return lambda width: self._interpolated(table, width, batch)

    def _start_table(self, key: Key, width: float) -> dict[float, Mean]:
        """Return the costs of the nearest cache bucket, with an interpolated one for ``width``."""
        nearest = _nearest(self._tables, key)
        then = self._interpolated(nearest, width, key[0])
        copied = {**{each: mean.seconds for each, mean in nearest.items()}, width: then} if then else {}
        return {each: Mean(seconds, count=0) for each, seconds in sorted(copied.items())}

    def _first_reading(self, table: dict[float, Mean], width: float, batch: int, seconds: float) -> float:
        """Return the cost of a width that never ran: a reading far above the neighbouring widths is probably interference."""
        most = table[1].seconds * width if 1 in table else seconds  # proportional to the plain pass
        return min(seconds, most, FIRST_SPIKE * (self._interpolated(table, width, batch) or seconds))

    def _interpolated(self, table: dict[float, Mean], width: float, batch: int) -> float | None:
        """Return the cost of a width, interpolated between measured ones. Above the widest it continues with the last slope,
        limited to a proportional increase; below the narrowest the slope is ``DEFAULT_SLOPE``.
        """
        if not table:
            return None
        if width in table:
            return table[width].seconds
        widths = list(table)
        place = bisect(widths, width)
        if place == 0:
            above = widths[0]
            return table[above].seconds * (1 + DEFAULT_SLOPE * (width - 1)) / (1 + DEFAULT_SLOPE * (above - 1))
        below = widths[place - 1]
        least = table[below].seconds
        if place == len(widths):
            slope = _slope(table) if place > 1 else self._slope_of_others(batch, least)
            return least + min(slope, least / below) * (width - below)
        above = widths[place]
        return least + (width - below) / (above - below) * (table[above].seconds - least)

    def _slope_of_others(self, batch: int, seconds: float) -> float:
        """Return the assumed slope if one width was measured: that of the nearest batch size with several, per request."""
        known = [key for key, table in self._tables.items() if len(table) > 1]
        if not known:
            return DEFAULT_SLOPE * batch * seconds
        nearest = min(known, key=lambda key: abs(key[0] - batch))
        return _slope(self._tables[nearest]) * batch / nearest[0]


@dataclass(slots=True)
class Mean:
    """Running mean of readings: one far above it is clipped, one far below replaces it."""

    seconds: float
    count: int = 1  # readings

    def add(self, seconds: float) -> None:
        if self.count == 0 or seconds < JUMP * self.seconds:
            self.seconds = seconds
        else:
            spike = SPIKE if self.count > 1 else FIRST_SPIKE
            self.seconds += max(WEIGHT, 1 / (1 + self.count)) * (min(seconds, spike * self.seconds) - self.seconds)
        self.count += 1


class Line:
    """Seconds as a linear function of the number of drafts: least squares over recent readings."""

    def __init__(self) -> None:
        self.weight = self._k = self._seconds = self._k_k = self._k_seconds = 0.0  # sums over the readings
        self._base = self._slope = 0.0

    def at(self, k: float) -> float:
        return self._base + self._slope * k

    def add(self, k: int, seconds: float) -> None:
        """Add a reading. A much lower reading replaces the first one, which may include a compilation."""
        memory = LINE_MEMORY
        if self.weight:
            seconds = min(seconds, LINE_SPIKE * self.at(k))
        if self.weight <= 1.5 and seconds < LINE_JUMP * self.at(k):
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
        # Intercept and slope are not negative: more drafts never take less time.
        self._slope = min(max(slope, 0.0), self._seconds / self._k)
        self._base = max((self._seconds - self._slope * self._k) / self.weight, 0.0)


def _nearest(tables: dict[Key, dict[float, Mean]], key: Key) -> dict[float, Mean]:
    """Return the entries of the nearest cache bucket of this batch size."""
    nearest = min((each for each in tables if each[0] == key[0]), key=lambda each: abs(each[1] - key[1]), default=None)
    return tables[nearest] if nearest is not None else {}


def _slope(table: dict[float, Mean]) -> float:
    """Return the mean slope, in seconds per unit of width, from the narrowest to the widest."""
    narrow, wide = min(table), max(table)
    return max((table[wide].seconds - table[narrow].seconds) / (wide - narrow), 0.0)
