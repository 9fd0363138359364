"""What a round costs: drafting k tokens, a target pass over them, and what lies between. Seconds, learned as rounds are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.engine.stats import PhaseTimes
from outrider.runner.costs import SPIKE, WEIGHT, PassCosts

UNKNOWN_COST_RATIO = 0.1  # of a draft step to a plain pass, until one was measured
MOST_TO_READ = 0.05  # of a plain round, for each token that a proposer had not seen, until it was measured twice
LINE_MEMORY = 0.95  # of what a line was fitted to, per reading
START_WEIGHT = 0.3  # of the point through which every line is drawn at first: a draft of -1 tokens takes no time
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
        self, num_drafts: int, batch: int, times: PhaseTimes, is_catch_up: bool, has_drafts: bool, first_layer: int = 0
    ) -> None:
        """Adds a decoding round. A proposer that had text to catch up with says nothing of its step.

        ``num_drafts``: the longest draft, or what was asked for in vain.
        """
        if has_drafts:
            self._first_layer = first_layer
        key, seconds = (batch, has_drafts), times.verify + times.host
        mean = self._outside.get(key)
        if mean is None or seconds < mean / 2:
            self._outside[key] = seconds
        else:
            self._outside[key] = mean + WEIGHT * (min(seconds, SPIKE * mean) - mean)
        if num_drafts and not is_catch_up:
            self._draft.setdefault(batch, Line()).add(num_drafts, times.draft)

    def outside(self, batch: int, has_drafts: bool) -> float:
        """Seconds of verifier and host; those of the other kind of round while this one is unknown."""
        known = self._outside.get((batch, has_drafts))
        return known if known is not None else self._outside.get((batch, not has_drafts), 0.0)

    def draft(self, k: int, batch: int, plain_pass: float) -> float:
        """Seconds of drafting k tokens. A batch not drafted for yet is priced as the nearest one."""
        if k == 0:
            return 0.0
        line = self._draft.get(batch)
        if line is None:
            if not self._draft:
                return UNKNOWN_COST_RATIO * plain_pass * k
            line = self._draft[min(self._draft, key=lambda known: abs(known - batch))]
        return line.at(k)

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

    def round(self, k: int, longest: int, batch: int, cache_len: int) -> float:
        """Seconds of a round that asked for k drafts and scored a path of ``longest``."""
        plain_pass = self.passes.seconds(1, batch, cache_len) or 0.0
        score = self._score(longest, batch, cache_len) if longest else plain_pass
        return self.draft(longest or k, batch, plain_pass) + score + self.outside(batch, longest > 0)

    def plain_round(self, batch: int, cache_len: int) -> float | None:
        """Seconds of a round without drafts; None until a round of this batch size was run."""
        seconds = self.passes.seconds(1, batch, cache_len)
        return None if seconds is None or (batch, False) not in self._outside else seconds + self.outside(batch, False)

    def drafted_rounds(self, lengths: Sequence[int], batch: int, cache_len: int) -> list[tuple[float, float]]:
        """For each K: seconds of asking for so many drafts, and of scoring them if the proposer had some."""
        plain_pass = self.passes.seconds(1, batch, cache_len) or 0.0
        outside = self.outside(batch, True)
        rounds = []
        for k in lengths:
            score = self._score(k, batch, cache_len) if k else plain_pass
            # A wider pass is never cheaper, unless a part of it was run before: where it measured so, that was noise.
            score = score if self._first_layer else max(score, plain_pass)
            rounds.append((self.draft(k, batch, plain_pass), score + outside))
        return rounds

    def _score(self, k: int, batch: int, cache_len: int) -> float:
        """Seconds of scoring a proposal whose longest path is k."""
        width = 1 + self._num_nodes(k)
        begun = self.passes.behind(self._first_layer).seconds(width, batch, cache_len)
        return begun or self.passes.seconds(width, batch, cache_len) or self.passes.seconds(1, batch, cache_len) or 0.0


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
