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
class Walk:
    """A candidate's rounds over one output."""

    ends: tuple[int, ...]  # number of tokens after each round
    seconds: float  # total of all rounds

    @classmethod
    def of(cls, num_accepted: Sequence[int], seconds: float) -> Walk:
        return cls(tuple(accumulate(accepted + 1 for accepted in num_accepted)), seconds)

    def end_from(self, position: int) -> int:
        """Return a lower bound for the end of a round that starts at ``position``: the end of the measured round around it."""
        return self.ends[bisect_right(self.ends, position)]


def least_seconds(walks: Sequence[Walk]) -> float:
    """Return the seconds with the best candidate at every position, each round at its candidate's mean time."""
    end = min(walk.ends[-1] for walk in walks)  # the last rounds may end after the output
    prices = [walk.seconds / len(walk.ends) for walk in walks]
    least = [0.0] * (end + 1)
    for position in range(end - 1, -1, -1):
        least[position] = min(
            price + least[min(walk.end_from(position), end)] for price, walk in zip(prices, walks, strict=True)
        )
    return least[0]


def gap(texts: Sequence[Sequence[Walk]]) -> float:
    """Return the oracle's speed / the best single candidate's speed. ``texts``: for each output, one walk per candidate."""
    single: float = min(sum(walk.seconds for walk in of_candidate) for of_candidate in zip(*texts, strict=True))
    return single / sum(map(least_seconds, texts))
