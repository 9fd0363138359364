"""Tails and power of chi-square tests, and Holm's correction, which scipy lacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from scipy import special


def chi_square_tail(value: float, freedom: float) -> float:
    """Return P(X > value) of chi-square with ``freedom`` degrees of freedom."""
    return float(special.chdtrc(freedom, max(value, 0.0)))


@cache
def needed_shift(freedom: float, alpha: float, power: float) -> float:
    """Return the noncentrality that a chi-square test at level ``alpha`` detects with probability ``power`` > ``alpha``."""
    return float(special.chndtrinc(special.chdtri(freedom, alpha), freedom, 1 - power))


def smallest_tv(freedom: float, num_tokens: float, alpha: float, power: float) -> float:
    """Return the smallest total variation distance, through the cells of a test, detected with probability ``power``.

    A deviation of total variation tv has a noncentrality of at least 4 tv^2 per token; the hardest one to detect is spread
    evenly over half of the mass (Cauchy and Schwarz).
    """
    return min(1.0, math.sqrt(needed_shift(freedom, alpha, power) / (4 * max(num_tokens, 1))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values: rejecting those up to alpha errs with probability at most alpha under any dependence.

    Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def needed_rounds(mean: float, variance: float, threshold: float, power: float) -> float:
    """Return the steps of that mean and variance whose sum exceeds ``threshold`` with probability ``power``, or inf."""
    if mean <= 0:
        return math.inf
    slack = float(special.ndtri(power)) * math.sqrt(max(variance, 0.0))
    root = (slack + math.sqrt(slack**2 + 4 * mean * threshold)) / (2 * mean)
    return root**2
