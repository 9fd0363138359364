"""Why a speedup is not the formula's: the difference, told part by part.

The formula (Leviathan et al. 2023, theorem 3.8) knows alpha, K and c. It takes every draft to survive with the same
probability, scoring K drafts to take no longer than a plain pass, and nothing to happen outside of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.engine.stats import expected_speedup

PARTS = ("acceptance", "draft", "score", "verify", "host", "other")
MEANING = {
    "acceptance": "drafts survive otherwise than independently with one probability",
    "draft": "drafting takes more, or less, than K typical steps",
    "score": "scoring the drafts takes longer than a plain pass",
    "verify": "the verifier takes time; plain decoding's does too",
    "host": "the rest of a round takes time; plain decoding's does too",
    "other": "rounds that differ: ends of texts, requests of a batch that end before the others",
}


@dataclass(frozen=True)
class Rounds:
    """What a contender's decoding rounds were like: mean milliseconds by phase, tokens and drafts a round."""

    ms: Mapping[str, float]
    plain_ms: Mapping[str, float]
    tau: float
    alpha: float
    k: float  # mean of the longest path
    step_ms: float  # of one draft step, typically

    @property
    def cost_ratio(self) -> float | None:
        """c: a draft step over a plain pass. None where nothing was drafted."""
        return self.step_ms / self.plain_ms["score"] if self.k and self.plain_ms["score"] else None

    @property
    def expected(self) -> float | None:
        """The formula's speedup at the measured alpha, K and c."""
        return None if self.cost_ratio is None else expected_speedup(self.alpha, self.k, self.cost_ratio)

    def difference(self, measured: float) -> dict[str, float] | None:
        """``measured`` minus expected, as a sum: what each part takes away or adds, one after the other in that order."""
        if self.cost_ratio is None or self.expected is None:
            return None
        ms, plain = self.ms, self.plain_ms
        base, took = plain["score"], plain["score"] * (self.k * self.cost_ratio + 1)
        reached = {"acceptance": self.tau * base / took}
        took = ms["draft"] + plain["score"]
        reached["draft"] = self.tau * base / took
        took = ms["draft"] + ms["score"]
        reached["score"] = self.tau * base / took
        for name in ("verify", "host"):
            base, took = base + plain[name], took + ms[name]
            reached[name] = self.tau * base / took
        reached["other"] = measured
        parts, before = {}, self.expected
        for name in PARTS:
            parts[name], before = reached[name] - before, reached[name]
        return parts


def main_part(difference: Mapping[str, float]) -> str:
    """The part that most of the difference went to: the largest of those that pull its way."""
    total = sum(difference.values())
    return max(difference, key=lambda name: difference[name] if total > 0 else -difference[name])
