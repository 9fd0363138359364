"""What a round costs: drafting k tokens, a target pass over them, and what lies between. Seconds, learned as rounds are run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from outrider.runner.costs import SPIKE, WEIGHT, PassCosts
from outrider.tune.sharing import RoundPrices
from outrider.types import PhaseTimes

UNKNOWN_COST_RATIO = 0.1  # of a draft step to a plain pass, until one was measured
MOST_TO_READ = 0.05  # of a plain round, for each token that a proposer had not seen, until it was measured twice
LINE_MEMORY = 0.95  # of what a line was fitted to, per reading
START_WEIGHT = 0.3  # of the point through which every line is drawn at first: a draft of -1 tokens takes no time
FAR = 1024.0  # a width beyond which nothing is scored
HICCUP = 2.0  # a reading this far above what is expected is cut


class CostModel:
    """Draft and overhead means beside the engine's table of target passes."""

    def __init__(self, passes: PassCosts, num_nodes: Callable[[int], int] = int) -> None:
        """``num_nodes``: drafts of a proposal whose longest path is k; k itself for chains."""
        self.passes, self._num_nodes = passes, num_nodes
        self._draft: dict[int, Line] = {}  # batch -> seconds of drafting
        self._catch_up: float | None = None  # seconds for each token that a proposer had not seen
        self._first_layer = 0  # at which the scores of drafts begin
        self._outside: dict[tuple[int, bool], float] = {}  # (batch, whether there were drafts) -> seconds of verifier and host

    def observe(
        self,
        num_drafts: int,
        num_drafting: int,
        batch: int,
        times: PhaseTimes,
        is_catch_up: bool,
        has_drafts: bool,
        first_layer: int = 0,
    ) -> None:
        """Adds a decoding round that asked for drafts. A proposer that had text to catch up with says nothing of its step.

        ``num_drafts``: the longest draft, or what was asked for in vain, of each of ``num_drafting`` requests.
        """
        if has_drafts:
            self._first_layer = first_layer
        self._observe_outside(batch, has_drafts, times)
        if not is_catch_up:
            self._draft.setdefault(num_drafting, Line()).add(num_drafts, times.draft)

    def observe_plain(self, batch: int, times: PhaseTimes, is_cold: bool) -> None:
        """Adds a decoding round without drafts; ``is_cold``: just behind those of another model, which says little."""
        if not is_cold or (batch, False) not in self._outside:
            self._observe_outside(batch, False, times)

    def _observe_outside(self, batch: int, has_drafts: bool, times: PhaseTimes) -> None:
        key, seconds = (batch, has_drafts), times.verify + times.host
        mean = self._outside.get(key)
        if mean is None or seconds < mean / 2:
            self._outside[key] = seconds
        else:
            self._outside[key] = mean + WEIGHT * (min(seconds, SPIKE * mean) - mean)

    def outside(self, batch: int, has_drafts: bool) -> float:
        """Seconds of verifier and host; those of the other kind of round while this one is unknown."""
        known = self._outside.get((batch, has_drafts))
        return known if known is not None else self._outside.get((batch, not has_drafts), 0.0)

    def draft(self, k: int, batch: int, plain_pass: float) -> float:
        """Seconds of drafting k tokens for so many requests. A number not drafted for yet is priced as the nearest one."""
        if k == 0:
            return 0.0
        line = self._draft.get(batch)
        if line is None:
            if not self._draft:
                return UNKNOWN_COST_RATIO * plain_pass * k
            line = self._draft[self._nearest(batch)]
        return line.at(k)

    def _nearest(self, batch: int) -> int:
        return min(self._draft, key=lambda known: abs(known - batch))

    def observe_catch_up(self, seconds: float, num_tokens: int, plain_round: float) -> float:
        """Adds what a proposer took, beyond its steps, to read text it had not seen. Returns those seconds.

        The first reading may have held a compilation: neither it nor any other raises the price beyond measure.
        """
        seconds = max(seconds, 0.0)
        each = min(seconds / num_tokens, 2 * self._catch_up if self._catch_up else MOST_TO_READ * plain_round)
        self._catch_up = each if self._catch_up is None else self._catch_up + 0.5 * (each - self._catch_up)
        return seconds

    def catch_up(self, num_tokens: int) -> float:
        """Seconds for a proposer to read so many tokens."""
        return num_tokens * (self._catch_up or 0.0)

    def round(self, k: int, lens: Sequence[int], longest: int, num_drafting: int, cache_len: int) -> float:
        """Seconds of a round that asked ``num_drafting`` requests for k drafts and scored ``lens``, ``longest`` the deepest."""
        batch = len(lens)
        plain_pass = score = self.passes.seconds(1, batch, cache_len) or 0.0
        if longest:
            score = self._scores(batch, cache_len)(self.passes.width(lens))
        return self.draft(longest or k, num_drafting, plain_pass) + score + self.outside(batch, longest > 0)

    def plain_round(self, batch: int, cache_len: int) -> float | None:
        """Seconds of a round without drafts; None until a round of this batch size was run."""
        seconds = self.passes.seconds(1, batch, cache_len)
        is_known = (batch, False) in self._outside or (batch, True) in self._outside
        return seconds + self.outside(batch, False) if seconds is not None and is_known else None

    def prices(self, batch: int, cache_len: int) -> RoundPrices | None:
        """What rounds of this batch cost, by the drafts in them; None until a plain one was run."""
        plain = self.plain_round(batch, cache_len)
        if plain is None:
            return None
        plain_pass = self.passes.seconds(1, batch, cache_len) or 0.0
        return RoundPrices(
            plain,
            self.outside(batch, True),
            lambda k, num_drafting: self.draft(k, num_drafting, plain_pass),
            self._scores(batch, cache_len),
            self.passes.is_padded,
        )

    def _scores(self, batch: int, cache_len: int) -> Callable[[float], float]:
        """Width -> seconds of a pass over drafts."""
        begun = self.passes.behind(self._first_layer).curve(FAR, batch, cache_len)
        known = begun or self.passes.curve(FAR, batch, cache_len)
        if known is None:
            return lambda width: 0.0
        widths, seconds = known
        # A wider pass is never cheaper, unless a part of it was run before: where it measured so, that was noise.
        least = 0.0 if self._first_layer else self.passes.seconds(1, batch, cache_len) or 0.0

        def score(width: float) -> float:
            above = min(max(bisect_right(widths, width), 1), len(widths) - 1)
            below = above - 1
            part = (width - widths[below]) / (widths[above] - widths[below])
            return max(seconds[below] + part * (seconds[above] - seconds[below]), least)

        return score

    def nodes(self, k: int) -> list[int]:
        """Tokens that each depth of a proposal up to k adds to a pass; at least one."""
        totals = [self._num_nodes(depth) for depth in range(k + 1)]
        return [max(1, after - before) for before, after in pairwise(totals)]


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
