"""Oracle gap: speedup of choosing the best candidate at every position over always using the best single one.

No policy knows the best candidate before a round, so the gap bounds the gain of switching between candidates. It is computed
from the rounds of measured runs over the same output.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class RoundTrace:
    """A candidate's decoding rounds over one output, after the pass that processed its prompt."""

    start: int  # number of tokens before the first round
    ends: tuple[int, ...]  # number of tokens after each round
    seconds: float  # total of all rounds

    @classmethod
    def of(cls, first_tokens: int, num_accepted: Sequence[int], seconds: float) -> RoundTrace:
        start, *ends = accumulate((accepted + 1 for accepted in num_accepted), initial=first_tokens)
        return cls(start, tuple(ends), seconds)

    @property
    def seconds_per_round(self) -> float:
        """Return the mean seconds of a round."""
        return self.seconds / len(self.ends)

    def end_from(self, position: int) -> int:
        """Return a lower bound for the end of a round that starts at ``position``: the end of the measured round around it."""
        return self.ends[bisect_right(self.ends, position)]

    def seconds_from(self, position: int) -> float:
        """Return the seconds of the rounds that end after ``position``."""
        return self.seconds_per_round * (len(self.ends) - bisect_right(self.ends, position))


def common_start(traces: Sequence[RoundTrace]) -> int:
    """Return the number of tokens after which the rounds of every candidate were measured."""
    return max(trace.start for trace in traces)


def least_seconds(traces: Sequence[RoundTrace]) -> float:
    """Return the seconds with the best candidate at every position, each round at its candidate's mean time."""
    start = common_start(traces)
    end = min(trace.ends[-1] for trace in traces)  # the last rounds may end after the output
    least = [0.0] * (end + 1)
    for position in range(end - 1, start - 1, -1):
        least[position] = min(trace.seconds_per_round + least[min(trace.end_from(position), end)] for trace in traces)
    return least[start]


def gap(texts: Sequence[Sequence[RoundTrace]]) -> float:
    """Return the oracle's speed / the best single candidate's speed. ``texts``: for each output, one trace per candidate."""
    starts = [common_start(traces) for traces in texts]
    single: float = min(
        sum(trace.seconds_from(start) for trace, start in zip(of_candidate, starts, strict=True))
        for of_candidate in zip(*texts, strict=True)
    )
    return single / sum(map(least_seconds, texts))
