"""Acceptance estimates from decaying counts by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

OPTIMISTIC_RATE = 0.8  # prior acceptance: high, so that a new method is tried
EXPECTED_WEIGHT = 3.0  # weight of the prior per position, in drafts
ALIKE_WEIGHT = 12.0  # the same for a request's counts, if requests hardly differ


@dataclass(slots=True)
class Acceptance:
    """Decaying counts by draft position.

    ``reached``: rounds with drafts in which all earlier drafts were accepted, whether or not the proposer made this one;
    ``accepted``; ``requested``: rounds in which all earlier drafts were made and this one was requested; ``made``.

    Decay is implemented by growing the weight of new counts.
    """

    reached: list[float]
    accepted: list[float]
    requested: list[float]
    made: list[float]
    unit: float = 1.0
    alike: float = 0.0  # log odds of the hypothesis that requests share these rates

    @classmethod
    def empty(cls, max_k: int) -> Acceptance:
        return cls([0.0] * max_k, [0.0] * max_k, [0.0] * max_k, [0.0] * max_k)

    def fade(self, memory: float) -> None:
        """Reduce the weight of the counts so far."""
        self.alike *= memory
        self.unit /= memory
        if self.unit > 1e9:
            for counts in (self.reached, self.accepted, self.requested, self.made):
                counts[:] = [count / self.unit for count in counts]
            self.unit = 1.0

    def add(self, num_requested: int, num_drafts: int, num_accepted: int) -> None:
        """Count a round."""
        for counts, depth in (
            (self.reached, min(num_accepted + 1, num_requested) if num_drafts else 0),
            (self.accepted, num_accepted),
            (self.requested, min(num_drafts + 1, num_requested)),
            (self.made, num_drafts),
        ):
            for i in range(min(depth, len(counts))):
                counts[i] += self.unit

    def learn_alike(self, own: Acceptance, is_accepted: bool) -> None:
        """Learn from a request's first draft how much requests differ: whether its own counts predict it better with a light
        or with a heavy prior of these shared counts.
        """
        shared = self.rates([OPTIMISTIC_RATE])
        differ, alike = own.rates(shared)[0], own.rates(shared, ALIKE_WEIGHT)[0]
        self.alike += log(alike / differ if is_accepted else (1 - alike) / (1 - differ))

    def request_rates(self, own: Acceptance, longest: int) -> list[float]:
        """Return a request's acceptance by position: its own counts, with the rates of these shared ones as a prior."""
        # Interpolate geometrically between the two weights, by the probability that requests are alike.
        weight = EXPECTED_WEIGHT * (ALIKE_WEIGHT / EXPECTED_WEIGHT) ** (1 / (1 + exp(-self.alike)))
        return own.rates(self.rates([OPTIMISTIC_RATE] * longest), weight)

    def rates(self, expected: Sequence[float], weight: float = EXPECTED_WEIGHT) -> list[float]:
        """Return acceptance by position, given that it was reached, for the positions of ``expected``.

        A rarely reached position follows its predecessor in the ratio of ``expected``. ``weight``: of ``expected``, in drafts.
        """
        rates = []
        rate = before = expected[0]
        weight *= self.unit
        for other, reached, accepted in zip(expected, self.reached, self.accepted, strict=False):
            rate = (weight * min(rate * other / before, 1.0) + accepted) / (weight + reached)
            before = other
            rates.append(rate)
        return rates

    def made_rates(self, expected: Sequence[float]) -> list[float]:
        """Return the share of rounds in which the proposer made a requested draft, by position, given those before it.

        A proposer that sizes its drafts itself may stop at the first however many are requested.
        """
        weight = EXPECTED_WEIGHT * self.unit
        counts = zip(expected, self.made, self.requested, strict=False)
        return [(weight * other + made) / (weight + requested) for other, made, requested in counts]
