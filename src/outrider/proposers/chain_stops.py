"""End a chain of drafts where the next one is expected to bring less than its time is worth.

The chance that all drafts so far are accepted is the product of their probabilities in the draft model, each calibrated to the
measured acceptance. Below a threshold the chain ends, which is the optimal kind of rule (SpecDec++: Huang et al., arXiv
2405.19715, who train a predictor). The threshold here follows from measured times. A draft that was sampled is never dropped.
Whether another one follows depends on the tokens before it only, so the distribution of the output is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.proposers.tree_chances import Calibration
from outrider.types import Context, DraftPrices, Verdict

FIRST_RATE = 0.8  # assumed acceptance of the next draft, until it is measured
RATE_WEIGHT = 0.02  # weight of a new observation in its running mean


class ChainStops:
    """Acceptance by confidence, learned from the rounds of one kind: deterministic or sampled ones."""

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._rate = FIRST_RATE  # acceptance of a draft whose confidence is unknown
        self._chains: dict[str, list[float]] = {}  # request -> confidences of its drafts in this round

    def start(self, request_ids: Sequence[str], limits: Sequence[int], prices: DraftPrices) -> Chains:
        """Start a chain for each of these requests, with at most ``limits`` drafts."""
        chains = Chains(limits, prices, self._calibration, self._rate)
        self._chains = dict(zip(request_ids, chains.confidences, strict=True))
        return chains

    def learn(self, context: Context, verdict: Verdict) -> None:
        """Learn from the verdict on the chains of this round."""
        for request_id, path in zip(context.request_ids, verdict.paths, strict=True):
            for depth, confidence in enumerate(self._chains.pop(request_id, [])[: len(path) + 1]):
                is_accepted = depth < len(path)
                self._calibration.learn([confidence], 0 if is_accepted else None)
                self._rate += RATE_WEIGHT * (is_accepted - self._rate)


class Chains:
    """The chains of one round."""

    def __init__(self, limits: Sequence[int], prices: DraftPrices, calibration: Calibration, rate: float) -> None:
        """``rate``: expected acceptance of the next draft of each chain, given that those before it are accepted."""
        self.confidences: list[list[float]] = [[] for _ in limits]
        self._limits, self._prices, self._calibration, self._rate = limits, prices, calibration, rate
        self._chances = [1.0] * len(limits)  # of all drafts so far; 0 where the chain has ended

    @property
    def lens(self) -> list[int]:
        return [len(each) for each in self.confidences]

    def add(self, confidences: Sequence[float]) -> bool:
        """Add a draft with this confidence to each chain that has not ended. Return whether to draft another."""
        gained = 0.0  # expected tokens of the next step, less the prices of their rows
        for b, confidence in enumerate(confidences):
            if self._chances[b]:
                self.confidences[b].append(confidence)
                self._chances[b] *= self._calibration.chance(confidence)
                gain = self._chances[b] * self._rate - self._prices.row
                if gain > 0 and len(self.confidences[b]) < self._limits[b]:
                    gained += gain
                else:
                    self._chances[b] = 0.0
        return gained > self._prices.step
