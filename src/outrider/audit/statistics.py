"""Chi-square with and without a shift, how much a test would have caught, and Holm's correction. Knows numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import torch

_STEPS = 80  # of a bisection: to the last bit


def normal_limit(tail: float) -> float:
    """The value that a standard normal variable exceeds with probability ``tail``."""
    return -NormalDist().inv_cdf(tail)


def chi_square_tail(value: float, freedom: float) -> float:
    """P(X > value) of chi-square with ``freedom`` degrees of freedom."""
    half = torch.tensor([freedom / 2, max(value, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square_limit(alpha: float, freedom: float) -> float:
    """The value that chi-square exceeds with probability ``alpha``."""
    return _solve(lambda value: chi_square_tail(value, freedom) <= alpha, freedom + 1.0)


def power_of(shift: float, freedom: float, alpha: float) -> float:
    """P(noncentral chi-square > the limit at ``alpha``): how often a deviation of that noncentrality is caught."""
    return _tail(shift, freedom, chi_square_limit(alpha, freedom))


@cache
def needed_shift(freedom: float, alpha: float, power: float) -> float:
    """The noncentrality that is caught with probability ``power``."""
    limit = chi_square_limit(alpha, freedom)
    return _solve(lambda shift: _tail(shift, freedom, limit) >= power, freedom + 1.0)


def _tail(shift: float, freedom: float, limit: float) -> float:
    """P(noncentral chi-square > limit): central ones, weighted as Poisson has it."""
    if shift <= 0:
        return chi_square_tail(limit, freedom)
    spread = 12 * math.sqrt(shift / 2) + 40
    steps = torch.arange(max(0, math.floor(shift / 2 - spread)), math.ceil(shift / 2 + spread), dtype=torch.float64)
    weights = (steps * math.log(shift / 2) - shift / 2 - torch.lgamma(steps + 1)).exp()
    tails = torch.special.gammaincc((freedom + 2 * steps) / 2, torch.full_like(steps, limit / 2))
    return min(1.0, float((weights * tails).sum()))


def smallest_tv(freedom: float, num_tokens: float, alpha: float, power: float) -> float:
    """The least total variation distance, seen through the cells of a test, that it catches with probability ``power``.

    A law that is off by a total variation of tv has a noncentrality of at least 4 tv^2 a token: of all such deviations the one
    that is spread evenly over half of the mass is the hardest to see (Cauchy and Schwarz).
    """
    return min(1.0, math.sqrt(needed_shift(freedom, alpha, power) / (4 * max(num_tokens, 1))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: rejecting those up to alpha errs with probability alpha at most, whatever depends on what.

    Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def needed_rounds(mean: float, variance: float, threshold: float, power: float) -> float:
    """How many steps of that mean and variance climb over ``threshold`` with probability ``power``; inf where none do."""
    if mean <= 0:
        return math.inf
    slack = normal_limit(1 - power) * math.sqrt(max(variance, 0.0))
    root = (slack + math.sqrt(slack**2 + 4 * mean * threshold)) / (2 * mean)
    return root**2


def _solve(is_enough: Callable[[float], bool], start: float) -> float:
    """The least value for which ``is_enough``, which stays true once it is."""
    low, high = 0.0, start
    while not is_enough(high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return high
