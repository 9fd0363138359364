"""Central and noncentral chi-square, power, and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import torch

_STEPS = 80  # of a bisection: to the last bit


def normal_limit(tail: float) -> float:
    """Return the value that a standard normal variable exceeds with probability ``tail``."""
    return -NormalDist().inv_cdf(tail)


def chi_square_tail(value: float, freedom: float) -> float:
    """Return P(X > value) of chi-square with ``freedom`` degrees of freedom."""
    half = torch.tensor([freedom / 2, max(value, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square_limit(alpha: float, freedom: float) -> float:
    """Return the value that chi-square exceeds with probability ``alpha``."""
    return _solve(lambda value: chi_square_tail(value, freedom) <= alpha, freedom + 1.0)


def power_of(shift: float, freedom: float, alpha: float) -> float:
    """Return the power against a deviation of that noncentrality: P(noncentral chi-square > limit at ``alpha``)."""
    return _tail(shift, freedom, chi_square_limit(alpha, freedom))


@cache
def needed_shift(freedom: float, alpha: float, power: float) -> float:
    """Return the noncentrality that is detected with probability ``power``."""
    limit = chi_square_limit(alpha, freedom)
    return _solve(lambda shift: _tail(shift, freedom, limit) >= power, freedom + 1.0)


def _tail(shift: float, freedom: float, limit: float) -> float:
    """Return P(noncentral chi-square > limit), a Poisson mixture of central ones."""
    if shift <= 0:
        return chi_square_tail(limit, freedom)
    spread = 12 * math.sqrt(shift / 2) + 40
    steps = torch.arange(max(0, math.floor(shift / 2 - spread)), math.ceil(shift / 2 + spread), dtype=torch.float64)
    weights = (steps * math.log(shift / 2) - shift / 2 - torch.lgamma(steps + 1)).exp()
    tails = torch.special.gammaincc((freedom + 2 * steps) / 2, torch.full_like(steps, limit / 2))
    return min(1.0, float((weights * tails).sum()))


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
    slack = normal_limit(1 - power) * math.sqrt(max(variance, 0.0))
    root = (slack + math.sqrt(slack**2 + 4 * mean * threshold)) / (2 * mean)
    return root**2


def _solve(is_enough: Callable[[float], bool], start: float) -> float:
    """Return the smallest value with ``is_enough``, which is monotone."""
    low, high = 0.0, start
    while not is_enough(high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return high
