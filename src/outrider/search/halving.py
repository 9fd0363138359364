"""Successive halving (Jamieson and Talwalkar 2016): which contenders run on how much of the traffic, and which are dropped.

This module handles labels and times only, so that tests can drive it with a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log1p, sqrt

import numpy as np
from scipy import special

from outrider.bench.statistics import Interval
from outrider.registry import PLAIN
from outrider.search.measurements import Array, Group, Measurements

FIRST_SHARE = 1 / 8  # share of the traffic in the first rung; later rungs double it
LEAST_GROUPS = 2  # minimum groups of prompts in a rung; noise cannot be estimated from one
CONFIDENCE = 0.975  # confidence that a contender is slower from which it is dropped
MOST_KEPT = 0.75  # maximum share of the contenders of a rung that continue
FINALISTS = 3  # number that may continue if within noise, once they have run on the whole traffic
FINAL_SHARE = 0.5  # share of the traffic that must have run before the search may end
RESOLUTION = 0.03  # relative difference of speeds that the search must resolve
FALSE_GAINS = 0.025  # probability that the fastest of contenders that gain nothing counts as faster than plain decoding
UNKNOWN_NOISE = 0.1  # standard deviation of log time if it cannot be estimated


@dataclass(frozen=True)
class Rung:
    """One stage: the remaining contenders run on a share of the traffic. Rungs of one ``repeat`` extend each other."""

    share: float
    repeat: int  # 0: the first run over these prompts

    def num_groups(self, total: int) -> int:
        """Return the number of groups of prompts, from the first of ``total``."""
        return min(max(LEAST_GROUPS, ceil(self.share * total)), total)

    @property
    def is_whole(self) -> bool:
        return self.share >= 1


def rungs(total: int, repeats: int) -> list[Rung]:
    """Return rungs over growing shares of ``total`` groups up to all of them, then ``repeats`` - 1 rungs over all again."""
    shares, share = [1.0], 0.5
    while share >= FIRST_SHARE:
        if Rung(share, 0).num_groups(total) < Rung(shares[0], 0).num_groups(total):
            shares.insert(0, share)
        share /= 2
    return [Rung(share, 0) for share in shares] + [Rung(1.0, repeat) for repeat in range(1, repeats)]


@dataclass(frozen=True)
class Ranking:
    """Contenders after a rung, fastest first, and the smallest significant difference."""

    speedups: dict[str, float]  # label -> speedup over plain decoding
    margin: float  # smallest significant difference of log speeds
    least_gain: float = 0.0  # smallest log speedup that is significant for the fastest of all contenders that were tried

    def is_slower(self, label: str, than: float) -> bool:
        """Return whether a contender is significantly slower than a speedup of ``than``."""
        return log(self.speedups[label] / than) < -self.margin

    def is_gain(self, label: str) -> bool:
        """Return whether a contender is significantly faster than plain decoding, even as the fastest of many by chance."""
        return log(self.speedups[label]) > max(self.margin, self.least_gain)

    def interval(self, label: str) -> Interval | None:
        """Return the 95% interval of a speedup; None if a single group of prompts leaves the noise unknown."""
        if self.least_gain == inf:
            return None
        return self.speedups[label] * exp(-self.margin), self.speedups[label] * exp(self.margin)


def ranking(measured: Measurements, labels: Sequence[str], groups: Sequence[Group], num_tried: int = 1) -> Ranking:
    """Return the speeds of contenders over ``groups``, which all of them must have run on. Batch sizes have equal weights.

    ``num_tried``: contenders of the whole search. The fastest of many is fast by chance, too (Bonferroni's correction).
    Quantiles are Student's, because few groups estimate the noise. Nothing is a gain where a batch size has a single group.
    """
    if not labels:
        return Ranking({}, 0.0)
    everyone = [PLAIN, *labels]
    logs = np.zeros(len(everyone))
    variance, spread, is_known = 0.0, 0.0, True
    batches = sorted({group.batch for group in groups})
    for batch in batches:
        of_batch = [group for group in groups if group.batch == batch]
        is_known &= len(of_batch) > 1
        seconds = measured.seconds(everyone, of_batch)
        logs += np.log(seconds[0].sum() / seconds.sum(1)) / len(batches)
        part = (noise(seconds) / len(batches)) ** 2 / len(of_batch)
        variance += part
        spread += part**2 / (len(labels) * (len(of_batch) - 1) or inf)
    speedups = {label: float(np.exp(logs[1 + i])) for i, label in enumerate(labels)}
    ranked = dict(sorted(speedups.items(), key=lambda each: -each[1]))
    error = sqrt(2 * variance)  # of the difference between two contenders
    freedom = variance**2 / spread if spread else inf  # Welch and Satterthwaite's
    margin, least_gain = (error * special.stdtrit(freedom, level) for level in (CONFIDENCE, 1 - FALSE_GAINS / num_tried))
    return Ranking(ranked, float(margin), float(least_gain) if is_known else inf)


def noise(seconds: Array) -> float:
    """Return the residual standard deviation of log time after contender and group effects. ``seconds``: [contenders, groups].

    Pooled over all contenders, so that two groups of prompts are enough to estimate it.
    """
    contenders, groups = seconds.shape
    if min(contenders, groups) < 2:
        return UNKNOWN_NOISE
    logs = np.log(seconds)
    residuals = logs - logs.mean(0, keepdims=True) - logs.mean(1, keepdims=True) + logs.mean()
    return float(sqrt((residuals**2).sum() / ((contenders - 1) * (groups - 1))))


def survivors(found: Ranking, rung: Rung) -> list[str]:
    """Return the contenders that continue in the next rung, fastest first.

    Contenders significantly slower than plain decoding are dropped, and the slower half of the rest except those within noise
    of the fastest. At most a share of ``MOST_KEPT`` continues; after the whole traffic at most ``FINALISTS``, or half if more.
    """
    candidates = [label for label in found.speedups if not found.is_slower(label, 1.0)]
    if len(candidates) < 2:
        return candidates
    best = found.speedups[candidates[0]]
    half, most = ceil(len(candidates) / 2), ceil(MOST_KEPT * len(candidates))
    kept = candidates[:half] + [label for label in candidates[half:most] if not found.is_slower(label, best)]
    return kept[: max(half, FINALISTS)] if rung.is_whole else kept


def is_final(found: Ranking, rung: Rung) -> bool:
    """Return whether more measurements could improve the choice by at most ``RESOLUTION``."""
    left = survivors(found, rung)
    if not left:
        return True
    if rung.share < FINAL_SHARE:
        return False
    best = found.speedups[left[0]]
    is_single = all(found.is_slower(label, best) for label in left[1:]) and found.is_gain(left[0])
    return is_single or found.margin <= log1p(RESOLUTION)
