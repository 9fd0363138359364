"""Decompose the difference between the measured and the expected speedup.

The formula (Leviathan et al. 2023, theorem 3.8) depends on alpha, K and c. It assumes that every draft is accepted with the
same probability, that scoring K drafts costs a plain pass, and that no time passes outside the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

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


def expectation(
    ms: Mapping[str, float],
    plain_ms: Mapping[str, float],
    tau: float,
    alpha: float | None,
    k: float,
    step_ms: float,
    measured: float | None,
) -> dict[str, Any]:
    """Return ``cost_ratio`` (c), ``expected_speedup`` (the formula's), and ``difference``: measured - expected, in parts.

    Each is None if it is unknown, as without drafts.

    The arguments are means of a round. ``ms``, ``plain_ms``: milliseconds by phase; ``tau``: tokens; ``alpha``: acceptance
    rate, None without drafts; ``k``: length of the longest path; ``step_ms``: milliseconds of a typical draft step.
    """
    ratio = step_ms / plain_ms["score"] if k and plain_ms["score"] else None
    expected = None if alpha is None or ratio is None else expected_speedup(alpha, k, ratio)
    found: dict[str, Any] = {"cost_ratio": ratio, "expected_speedup": expected, "difference": None}
    if ratio is None or expected is None or not measured:
        return found
    base, took = plain_ms["score"], ms["draft"] + ms["score"]
    steps = {  # part -> milliseconds of a plain round and of a round with drafts; each replaces one assumption by a measurement
        "acceptance": (base, base * (k * ratio + 1)),
        "draft": (base, ms["draft"] + base),
        "score": (base, took),
        "verify": (base + plain_ms["verify"], took + ms["verify"]),
        "host": (base + plain_ms["verify"] + plain_ms["host"], took + ms["verify"] + ms["host"]),
    }
    speedups = [expected, *(tau * plain / drafted for plain, drafted in steps.values()), measured]
    parts = {name: after - before for name, (before, after) in zip(PARTS, pairwise(speedups), strict=True)}
    return found | {"difference": parts}


def main_part(difference: Mapping[str, float]) -> str:
    """Return the largest part with the same sign as the difference."""
    total = sum(difference.values())
    return max(difference, key=lambda name: difference[name] if total > 0 else -difference[name])
