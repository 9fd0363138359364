"""Decompose the difference between the measured and the expected speedup.

The formula (Leviathan et al. 2023, theorem 3.8) depends on alpha, K and c. It assumes that every draft is accepted with the
same probability, that scoring K drafts costs a plain pass, and that no time passes outside the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from outrider.engine.stats import expected_speedup

PARTS = ("acceptance", "draft", "score", "verify", "host", "other")
MEANING = {
    "acceptance": "drafts are not accepted independently with one probability",
    "draft": "drafting takes more or less than K typical steps: catching up, searching without a result",
    "score": "scoring the drafts takes longer than a plain pass",
    "verify": "the verifier takes longer than in plain decoding",
    "host": "the rest of a round takes longer than in plain decoding",
    "other": "atypical rounds: ends of sequences, batches with finished requests",
}


@dataclass(frozen=True)
class Rounds:
    """Means of a contender per round: milliseconds by phase, tokens and drafts."""

    ms: Mapping[str, float]
    plain_ms: Mapping[str, float]
    tau: float
    alpha: float | None  # None without drafts
    k: float  # mean length of the longest path
    step_ms: float  # milliseconds of a typical draft step

    @property
    def cost_ratio(self) -> float | None:
        """Return c: time of a draft step / time of a plain pass. None if nothing was drafted."""
        return self.step_ms / self.plain_ms["score"] if self.k and self.plain_ms["score"] else None

    @property
    def expected(self) -> float | None:
        """Return the formula's speedup at the measured alpha, K and c."""
        if self.alpha is None or self.cost_ratio is None:
            return None
        return expected_speedup(self.alpha, self.k, self.cost_ratio)

    def difference(self, measured: float) -> dict[str, float] | None:
        """Return measured - expected speedup as a sum over parts: assumptions are replaced by measurements one by one."""
        if self.cost_ratio is None or self.expected is None:
            return None
        ms, plain = self.ms, self.plain_ms
        base, took = plain["score"], ms["draft"] + ms["score"]
        steps = {  # part -> milliseconds of a plain round and of a round with drafts; each replaces one assumption
            "acceptance": (base, base * (self.k * self.cost_ratio + 1)),
            "draft": (base, ms["draft"] + base),
            "score": (base, took),
            "verify": (base + plain["verify"], took + ms["verify"]),
            "host": (base + plain["verify"] + plain["host"], took + ms["verify"] + ms["host"]),
        }
        speedups = [self.expected, *(self.tau * plain_ms / round_ms for plain_ms, round_ms in steps.values()), measured]
        return {name: after - before for name, (before, after) in zip(PARTS, pairwise(speedups), strict=True)}


def main_part(difference: Mapping[str, float]) -> str:
    """Return the largest part with the same sign as the difference."""
    total = sum(difference.values())
    return max(difference, key=lambda name: difference[name] if total > 0 else -difference[name])
