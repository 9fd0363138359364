"""What a round costs: drafting k tokens, a target pass over them, and what lies between. Seconds, learned as rounds are run."""

from __future__ import annotations

from typing import TypeVar

from outrider.engine.costs import SPIKE, WEIGHT, PassCosts
from outrider.engine.stats import PhaseTimes

Key = TypeVar("Key")

UNKNOWN_COST_RATIO = 0.1  # of a draft step to a plain pass, until one was measured


class CostModel:
    """Draft and overhead means beside the engine's table of target passes."""

    def __init__(self, passes: PassCosts) -> None:
        self.passes = passes
        self._draft: dict[tuple[int, int], float] = {}  # (batch, drafts asked for) -> seconds of drafting
        self._catch_up: float | None = None  # seconds for each token that a proposer had not seen
        self._outside: dict[tuple[int, bool], float] = {}  # (batch, whether there were drafts) -> seconds of verifier and host

    def observe(self, k: int, longest: int, batch: int, times: PhaseTimes, is_catch_up: bool) -> None:
        """Adds a decoding round. A proposer that had text to catch up with says nothing of its step."""
        _mix(self._outside, (batch, longest > 0), times.verify + times.host)
        if k and not is_catch_up:
            _mix(self._draft, (batch, k), times.draft)

    def outside(self, batch: int, has_drafts: bool) -> float:
        """Seconds of verifier and host; those of the other kind of round while this one is unknown."""
        known = self._outside.get((batch, has_drafts))
        return known if known is not None else self._outside.get((batch, not has_drafts), 0.0)

    def draft(self, k: int, batch: int, plain_pass: float) -> float:
        """Seconds of drafting k tokens: between measured lengths a straight line, from 0 and beyond them in proportion."""
        known = {length: seconds for (size, length), seconds in self._draft.items() if size == batch}
        if not known:
            return UNKNOWN_COST_RATIO * plain_pass * k
        if k in known:
            return known[k]
        below = max((length for length in known if length < k), default=0)
        above = min((length for length in known if length > k), default=None)
        base = known.get(below, 0.0)
        if above is None:
            return base * k / below
        return base + (known[above] - base) * (k - below) / (above - below)

    def observe_catch_up(self, seconds: float, num_tokens: int) -> float:
        """Adds what a proposer took, beyond its steps, to read text it had not seen. Returns those seconds."""
        seconds = max(seconds, 0.0)
        each = seconds / num_tokens
        self._catch_up = each if self._catch_up is None else min(self._catch_up + 0.5 * (each - self._catch_up), 2 * each)
        return seconds

    def catch_up(self, num_tokens: int) -> float:
        """Seconds for a proposer to read so many tokens."""
        return num_tokens * (self._catch_up or 0.0)

    def round(self, k: int, longest: int, batch: int, cache_len: int) -> float:
        """Seconds of a round that asked for k drafts and scored ``longest``."""
        plain_pass = self.passes.seconds(1, batch, cache_len) or 0.0
        score = self.passes.seconds(1 + longest, batch, cache_len) or plain_pass
        return self.draft(k, batch, plain_pass) + score + self.outside(batch, longest > 0)

    def plain_round(self, batch: int, cache_len: int) -> float | None:
        """Seconds of a round without drafts; None until a pass of this batch size was measured."""
        seconds = self.passes.seconds(1, batch, cache_len)
        return None if seconds is None else seconds + self.outside(batch, False)

    def drafted_round(self, k: int, batch: int, cache_len: int) -> tuple[float, float]:
        """Seconds of asking for k drafts, and of scoring them if the proposer had some."""
        plain_pass = self.passes.seconds(1, batch, cache_len) or 0.0
        score = self.passes.seconds(1 + k, batch, cache_len) or plain_pass
        # A wider pass is never cheaper: where it measured so, that was noise.
        return self.draft(k, batch, plain_pass), max(score, plain_pass) + self.outside(batch, True)


def _mix(means: dict[Key, float], key: Key, seconds: float) -> None:
    """A running mean that hiccups hardly move, and that drops at once where its first value was one."""
    mean = means.get(key)
    if mean is None or seconds < mean / 2:
        means[key] = seconds
    else:
        means[key] = mean + WEIGHT * (min(seconds, SPIKE * mean) - mean)
