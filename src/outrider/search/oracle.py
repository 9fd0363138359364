"""The oracle gap: what choosing the best candidate anew at every position would bring over the best single one.

No policy can know the best candidate before the round, so this bounds what switching between them can gain. Computed from the
rounds of measured runs over the same text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Walk:
    """A candidate's rounds over one text."""

    ends: tuple[int, ...]  # tokens of the text behind each round
    seconds: float  # of all rounds together

    @classmethod
    def of(cls, num_accepted: Sequence[int], seconds: float) -> Walk:
        return cls(tuple(accumulate(accepted + 1 for accepted in num_accepted)), seconds)

    def end_from(self, position: int) -> int:
        """Where a round that begins at ``position`` ends at least: where the measured round that held it ended."""
        return self.ends[bisect_right(self.ends, position)]


def least_seconds(walks: Sequence[Walk]) -> float:
    """Seconds of the text with the best choice of candidate at every position, a round of each at its mean price."""
    end = min(walk.ends[-1] for walk in walks)  # the last rounds may reach beyond the text
    prices = [walk.seconds / len(walk.ends) for walk in walks]
    least = [0.0] * (end + 1)
    for position in range(end - 1, -1, -1):
        least[position] = min(
            price + least[min(walk.end_from(position), end)] for price, walk in zip(prices, walks, strict=True)
        )
    return least[0]


def gap(texts: Sequence[Sequence[Walk]]) -> float:
    """How many times as fast as the best single candidate the oracle is. ``texts``: of each, the same candidates' walks."""
    single: float = min(sum(walk.seconds for walk in of_candidate) for of_candidate in zip(*texts, strict=True))
    return single / sum(map(least_seconds, texts))
