"""Bootstrap intervals of ratios of speeds, and tests for changes between two benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
Interval = tuple[float, float]
RESAMPLES = 2000
LEVEL = 0.95
LEVELS = {"p50": 0.5, "p95": 0.95}
# Largest variance of the logarithm of a value rounded to four digits. Repeats may share the error, so more do not lower it.
ROUNDING = 1e-3**2 / 12
SEED = 0  # fixed, so that the same runs give the same interval


@dataclass(frozen=True)
class Timings:
    """Tokens and seconds of one contender, both [repeats, prompts]. A batch counts as one prompt."""

    tokens: Array
    seconds: Array

    @classmethod
    def of(cls, tokens: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> Timings:
        return cls(np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64))


def speedup_interval(timings: Timings, base: Timings) -> Interval | None:
    """Return the interval of the median ratio of speeds within a repeat; None for one repeat of one prompt.

    Repeats and prompts are resampled independently (Owen 2007, "The pigeonhole bootstrap"), with both contenders'
    measurements paired, so that common effects cancel.
    """
    drawn, bases = _resample(timings), _resample(base)
    if drawn is None or bases is None:
        return None
    return _interval(np.median(_ratio(drawn, bases), axis=1))


def _resample(timings: Timings) -> Array | None:
    """Return speeds of resampled repeats over resampled prompts: [resamples, repeats]. Samples depend on the shape only."""
    repeats, prompts = timings.tokens.shape
    if repeats * prompts < 2:
        return None
    generator = np.random.default_rng(SEED)
    row = generator.integers(repeats, size=(RESAMPLES, repeats, 1))
    column = generator.integers(prompts, size=(RESAMPLES, 1, prompts))
    return _ratio(timings.tokens[row, column].sum(-1), timings.seconds[row, column].sum(-1))


def _interval(values: Array) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _ratio(above: Array, below: Array) -> Array:
    """Return above / below, with 0 for a zero divisor."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def percentiles(values: Sequence[float], weights: Sequence[float] | None = None) -> dict[str, float] | None:
    """Return p50 and p95 of values that occur ``weights`` times (default: once); None without values."""
    if not values:
        return None
    found = np.quantile(values, list(LEVELS.values()), weights=weights or [1.0] * len(values), method="inverted_cdf")
    return dict(zip(LEVELS, found.tolist(), strict=True))


@dataclass(frozen=True)
class Change:
    """Change between two sets of repeats: the ratio of their geometric means, and its interval."""

    ratio: float
    interval: Interval

    @property
    def direction(self) -> int:
        """Return 1 if significantly higher, -1 if significantly lower, else 0."""
        return int(self.interval[0] > 1) - int(self.interval[1] < 1)


def change(before: Sequence[float], after: Sequence[float], level: float = LEVEL) -> Change | None:
    """Return Welch's interval on logarithms for two independent samples; None with fewer than two repeats in either."""
    if min(len(before), len(after)) < 2 or min(*before, *after) <= 0:
        return None
    first, second = np.log(before), np.log(after)
    noise = [max(float(np.var(each, ddof=1)) / len(each), ROUNDING) for each in (first, second)]
    middle = float(second.mean() - first.mean())
    total = sum(noise)
    freedom = sum(part**2 / (n - 1) for part, n in zip(noise, (len(first), len(second)), strict=True))
    half = float(special.stdtrit(total**2 / freedom, (1 + level) / 2)) * sqrt(total)
    return Change(exp(middle), (exp(middle - half), exp(middle + half)))
