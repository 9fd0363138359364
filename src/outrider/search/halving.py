"""Successive halving (Jamieson and Talwalkar 2016): which contenders run on how much of the traffic, and which go on.

Knows labels and times, no models: a simulation drives it as well as the search does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log, log1p, sqrt

import numpy as np

from outrider.bench.contenders import PLAIN
from outrider.search.measurements import Array, Group, Measurements

FIRST_SHARE = 1 / 8  # of the traffic on which all candidates run; later rungs double it
LEAST_GROUPS = 2  # of prompts in a rung: noise cannot be estimated from one
CONFIDENCE = 2.0  # standard errors by which a contender must be slower to be dropped
MOST_KEPT = 0.75  # of the contenders of a rung, however close they are
FINALISTS = 3  # that stay if within noise; of more, no more than half once they have run on the whole traffic
FINAL_SHARE = 0.5  # of the traffic that must have run before the search may end
RESOLUTION = 0.03  # a difference that does not matter: the search ends when all larger ones are resolved
UNKNOWN_NOISE = 0.1  # standard deviation of log time that is assumed where it cannot be estimated


@dataclass(frozen=True)
class Rung:
    """One stage: contenders that are left run on a share of the traffic. Rungs of one ``repeat`` continue each other."""

    share: float
    repeat: int  # 0: the first time that these prompts run

    def num_groups(self, total: int) -> int:
        """Groups of prompts out of ``total``, counted from the first."""
        return min(max(LEAST_GROUPS, ceil(self.share * total)), total)

    @property
    def is_whole(self) -> bool:
        return self.share >= 1


def rungs(total: int, repeats: int) -> list[Rung]:
    """Growing shares of ``total`` groups of prompts up to all of them, then all of them again: ``repeats`` times altogether."""
    shares, share = [1.0], 0.5
    while share >= FIRST_SHARE:
        if Rung(share, 0).num_groups(total) < Rung(shares[0], 0).num_groups(total):
            shares.insert(0, share)
        share /= 2
    return [Rung(share, 0) for share in shares] + [Rung(1.0, repeat) for repeat in range(1, repeats)]


@dataclass(frozen=True)
class Standing:
    """Contenders after a rung, fastest first, and how large a difference the measurements resolve."""

    speedups: dict[str, float]  # label -> times plain decoding's speed
    margin: float  # of logarithms of speeds

    def is_slower(self, label: str, than: float) -> bool:
        """Whether a contender is slower than a speedup ``than`` beyond noise."""
        return log(self.speedups[label] / than) < -self.margin


def standing(measured: Measurements, labels: Sequence[str], groups: Sequence[Group]) -> Standing:
    """Speeds of contenders over ``groups``, on each of which all of them ran. Several batch sizes count equally."""
    if not labels:
        return Standing({}, 0.0)
    everyone = [PLAIN, *labels]
    logs = np.zeros(len(everyone))
    variance = 0.0
    batches = sorted({group.batch for group in groups})
    for batch in batches:
        mine = [group for group in groups if group.batch == batch]
        seconds = measured.seconds(everyone, mine)
        logs += np.log(seconds[0].sum() / seconds.sum(1)) / len(batches)
        variance += (noise(seconds) / len(batches)) ** 2 / len(mine)
    speedups = {label: float(np.exp(logs[1 + i])) for i, label in enumerate(labels)}
    ranked = dict(sorted(speedups.items(), key=lambda each: -each[1]))
    return Standing(ranked, CONFIDENCE * sqrt(2 * variance))


def noise(seconds: Array) -> float:
    """Standard deviation of log time that neither the contender nor the prompts explain. ``seconds``: [contenders, groups].

    Pooled over all contenders, so that two groups of prompts are enough to estimate it.
    """
    contenders, groups = seconds.shape
    if min(contenders, groups) < 2:
        return UNKNOWN_NOISE
    logs = np.log(seconds)
    residuals = logs - logs.mean(0, keepdims=True) - logs.mean(1, keepdims=True) + logs.mean()
    return float(sqrt((residuals**2).sum() / ((contenders - 1) * (groups - 1))))


def survivors(found: Standing, rung: Rung) -> list[str]:
    """Contenders that go on to the next rung, fastest first.

    Dropped are those slower than plain decoding beyond noise, and the slower half of the rest but for those within noise of the
    fastest: up to ``MOST_KEPT`` before the whole traffic has run, up to ``FINALISTS`` in all afterwards.
    """
    candidates = [label for label in found.speedups if not found.is_slower(label, 1.0)]
    if len(candidates) < 2:
        return candidates
    best = found.speedups[candidates[0]]
    half, most = ceil(len(candidates) / 2), ceil(MOST_KEPT * len(candidates))
    kept = candidates[:half] + [label for label in candidates[half:most] if not found.is_slower(label, best)]
    return kept[: max(half, FINALISTS)] if rung.is_whole else kept


def is_final(found: Standing, rung: Rung) -> bool:
    """Whether more measurements would not change the choice, or by no more than ``RESOLUTION``."""
    left = survivors(found, rung)
    if not left:
        return True
    if rung.share < FINAL_SHARE:
        return False
    best = found.speedups[left[0]]
    is_single = all(found.is_slower(label, best) for label in left[1:]) and log(best) > found.margin
    return is_single or found.margin <= log1p(RESOLUTION)
