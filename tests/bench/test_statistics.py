"""Intervals and changes in cases with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from outrider.bench.statistics import Timings, change, percentiles, speedup_interval


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(("before", "after"), [([90.0, 100.0], [110.0, 115.0]), ([10.0, 11.0, 10.5, 9.0], [9.0, 9.1, 8.8])])
def test_a_change_has_welch_s_interval_of_the_logarithms(before: list[float], after: list[float], level: float) -> None:
    found = change(before, after, level)
    expected = stats.ttest_ind(np.log(after), np.log(before), equal_var=False).confidence_interval(level)
    assert found is not None and found.interval == pytest.approx((np.exp(expected.low), np.exp(expected.high)), rel=1e-9)


def test_equal_repeats_are_certain_only_beyond_rounding() -> None:
    for after, direction in ((100.1, 0), (100.0, 0), (105.0, 1), (95.0, -1)):
        found = change([100.0] * 5, [after] * 5, 0.999)
        assert found is not None and found.direction == direction


def test_percentiles_weigh_values() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 3.0}
    assert percentiles([10.0, 1.0], [1, 9]) == {"p50": 1.0, "p95": 10.0}  # nine tokens arrived together, quickly
    assert percentiles([10.0, 1.0], [1, 19]) == {"p50": 1.0, "p95": 1.0}
    assert percentiles([]) is None


def timings(seconds: np.ndarray) -> Timings:
    return Timings(np.full(seconds.shape, 64.0), seconds)


def test_common_slowdowns_cancel() -> None:
    machine = np.random.default_rng(1).uniform(1, 4, size=(5, 6))  # slowdowns up to 4x; different prompts
    base, fast = timings(machine), timings(machine / 2)
    low, high = speedup_interval(fast, base) or (0.0, 0.0)
    assert low == pytest.approx(2) and high == pytest.approx(2)


def test_a_speedup_that_depends_on_the_prompt_has_a_wide_interval() -> None:
    base = timings(np.ones((3, 4)))
    even, uneven = timings(np.full((3, 4), 0.5)), timings(np.tile([0.2, 0.4, 0.6, 0.8], (3, 1)))
    assert speedup_interval(even, base) == pytest.approx((2, 2))
    low, high = speedup_interval(uneven, base) or (0.0, 0.0)
    assert low < 1.6 and high > 2.5


def test_a_single_measurement_has_no_interval() -> None:
    one = timings(np.ones((1, 1)))
    assert speedup_interval(one, one) is None
    assert change([10.0], [11.0, 12.0]) is None
    assert change([], []) is None


def test_95_percent_intervals_have_nearly_their_nominal_coverage() -> None:
    """Noise by repeat and by prompt. With so few of them, percentile intervals are slightly narrow, as docs/bench.md states."""
    generator, hits = np.random.default_rng(7), 0
    for _ in range(100):
        hard = generator.lognormal(0, 0.15, size=(1, 8))  # difference of each prompt from the mean speedup
        base = timings(generator.lognormal(0, 0.3, size=(6, 1)) * generator.lognormal(0, 0.02, size=(6, 8)))
        fast = timings(base.seconds * hard / np.mean(np.exp(0.15**2 / 2)) / 2 * generator.lognormal(0, 0.02, size=(6, 8)))
        low, high = speedup_interval(fast, base) or (0.0, 0.0)
        hits += low <= 2 <= high
    assert 0.86 <= hits / 100 <= 1.0


def test_a_change_is_distinguished_from_noise() -> None:
    generator, alarms, found = np.random.default_rng(3), 0, 0
    for _ in range(200):
        same = [100 * generator.lognormal(0, 0.03, size=5) for _ in range(2)]
        alarms += change(*map(list, same)).direction != 0  # type: ignore[union-attr]
        slower = 88 * generator.lognormal(0, 0.03, size=5)
        found += change(list(same[0]), list(slower)).direction == -1  # type: ignore[union-attr]
    assert alarms <= 18  # 10 expected at 95%
    assert found >= 186
    exact = change([10.0, 10.0], [20.0, 20.0])
    assert exact is not None and exact.ratio == pytest.approx(2) and exact.interval == pytest.approx((2, 2), rel=0.002)
