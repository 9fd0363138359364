"""Size and power of the tests are as stated: published values, and seeded simulations without an engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special

from outrider.audit import statistics
from outrider.audit.evidence import LEAKS, Evidence, PrefixCounts, Sample, at_borders, g_statistic
from outrider.audit.watching import PowerEstimate
from outrider.audit.wrong import LEAK
from outrider.types import Proposal

NUMBERS = np.random.default_rng(0)


def test_tails_and_limits_match_published_tables() -> None:
    assert statistics.chi_square_tail(3.841459, 1) == pytest.approx(0.05, rel=1e-5)
    assert statistics.chi_square_tail(18.307038, 10) == pytest.approx(0.05, rel=1e-5)
    assert statistics.chi_square_tail(149.449, 100) == pytest.approx(0.001, rel=1e-4)
    assert statistics.chi_square_tail(-1, 3) == 1


def test_power_matches_the_noncentral_distribution() -> None:
    one = (1.959964 + 1.281552) ** 2  # one degree of freedom: a shifted normal variable, both tails
    assert statistics.needed_shift(1, 0.05, 0.9) == pytest.approx(one, rel=1e-4)
    for power in (0.3, 0.8, 0.99):
        sampled = NUMBERS.noncentral_chisquare(30, statistics.needed_shift(30, 0.01, power), 40_000)
        assert np.mean(sampled > special.chdtri(30, 0.01)) == pytest.approx(power, abs=0.01)
    assert statistics.needed_shift(30, 0.01, 0.01 + 1e-9) == pytest.approx(0, abs=1e-4)


def test_holm_matches_its_definition() -> None:
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.6]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_the_g_statistic_has_the_mean_of_its_degrees_of_freedom() -> None:
    law = np.concatenate([np.full(10, 0.09), np.full(5, 0.02)])
    drawn = NUMBERS.multinomial(500, law, 4000)  # expected count of the rarest cells: ten
    values = [g_statistic(seen.astype(float), 500 * law) for seen in drawn]
    assert np.mean(values) == pytest.approx(14, abs=4 * math.sqrt(28 / 4000))
    assert np.mean(np.array(values) > special.chdtri(14, 0.01)) < 0.016


# The target's distributions of the first token and of the second given the first; and a draft's distribution.
LAWS = torch.softmax(2 * torch.randn(13, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), -1)
NOISE = torch.randn(13, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
DRAFTS = torch.softmax(LAWS.log() + NOISE, -1)


def evidence_of(root: np.ndarray, num_samples: int = 400) -> Evidence:  # type: ignore[type-arg]
    """Return evidence of two-token samples against LAWS: the first from ``root``, the second from its own distribution."""
    samples = []
    for first, count in enumerate(NUMBERS.multinomial(num_samples, root).tolist()):
        for second in NUMBERS.choice(12, count, p=LAWS[1 + first].numpy()).tolist():
            notes = {0: float(DRAFTS[0, first]), 1: float(DRAFTS[1 + first, second])}
            samples.append(Sample((first, second), ("accepted", "corrected"), notes))
    evidence, prefix_counts = Evidence(2), PrefixCounts(samples)
    evidence.observe(prefix_counts, [()], LAWS[:1])
    evidence.observe(prefix_counts, [(token,) for token in range(12)], LAWS[1:])
    evidence.add_likelihood_ratios(prefix_counts)
    return evidence


def rejects(evidence: Evidence, alpha: float) -> bool:
    return min(statistics.holm([test.p_value for test in evidence.tests()])) <= alpha


def test_false_alarms_keep_the_stated_level() -> None:
    num_alarms = sum(rejects(evidence_of(LAWS[0].numpy()), 0.05) for _ in range(200))
    assert num_alarms <= 19  # exceeded by Binomial(200, 0.05) once in a hundred times


def test_every_test_counts_its_tokens() -> None:
    tests = {(test.name, test.token): test for test in evidence_of(LAWS[0].numpy()).tests()}
    assert set(tests) == {("G", 1), ("calibration", 1), ("G", 2), ("calibration", 2), ("likelihood ratio", None)}
    assert tests["G", 1].tokens == tests["calibration", 2].tokens == 400
    assert tests["likelihood ratio", None].tokens == 800
    assert tests["G", 2].tokens < 400  # after rare first tokens there are too few tokens to test


def test_the_smallest_tv_is_detected_at_the_stated_power() -> None:
    law, num_samples = LAWS[0].numpy(), 1000
    order = np.argsort(law)
    half = order[np.searchsorted(np.cumsum(law[order]), 0.5) :]  # hardest to detect: all likely tokens slightly likelier
    freedom = next(test.degrees_of_freedom for test in evidence_of(law, num_samples).tests() if test.name == "G")
    tv = statistics.smallest_tv(freedom or 0, num_samples, 0.01, 0.95)
    off = law.copy()
    off[half] *= 1 + tv / law[half].sum()
    rest = np.setdiff1d(order, half)
    off[rest] *= 1 - tv / law[rest].sum()
    caught = sum(next(t for t in evidence_of(off, num_samples).tests() if t.name == "G").p_value <= 0.01 for _ in range(40))
    assert caught >= 34  # of 38 expected


def test_a_leak_is_caught_after_the_planned_number_of_rounds() -> None:
    target, draft = LAWS[0], 0.5 * DRAFTS[0] + 0.5 / 12
    estimate, threshold = PowerEstimate(), math.log(len(LEAKS) / 0.001)
    proposal = Proposal(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long), draft.view(1, 1, -1))
    estimate.add(proposal, target.view(1, 1, -1).repeat(1, 2, 1), [0], 0)
    estimate.num_refused = estimate.distance  # type: ignore[assignment]  # as many rounds without an accepted draft as it expects
    assert estimate.mean_distance == pytest.approx(float((draft - target).clamp_min(0).sum()))
    rounds = math.ceil(estimate.samples_for("leaky", 0.001, 0.99, rounds_per_sample=1.0))
    ratios = (draft / target).numpy()
    growth = np.log1p(np.array(LEAKS)[:, None] * (ratios - 1))  # [leaks, V]

    def log_mean(law: np.ndarray) -> float:  # type: ignore[type-arg]
        logs = growth @ NUMBERS.multinomial(rounds, law / law.sum())
        return float(logs.max() + np.log(np.exp(logs - logs.max()).mean()))

    leaky, limit = (target + LEAK * (draft - target)).numpy(), -math.log(0.001)
    assert np.mean([log_mean(leaky) >= limit for _ in range(400)]) >= 0.975
    assert np.mean([log_mean(target.numpy()) >= limit for _ in range(4000)]) <= 0.003
    assert estimate.smallest_leak(rounds, threshold, 0.99) == pytest.approx(LEAK, rel=0.3)
    assert estimate.smallest_leak(1, threshold, 0.99) is None


def test_rounding_at_borders_is_tolerated_but_unlikely_tokens_still_count() -> None:
    """Very unlikely tokens at the border of truncation are tolerated; a single token excluded by it is not."""
    law = torch.tensor([[0.6, 0.4 - 1e-6, 1e-6, 0.0]], dtype=torch.float64)
    draft = [0.6, 0.39, 0.01, 1e-6]
    samples = [Sample((token,), ("accepted",), {0: draft[token]}) for token in [0] * 600 + [1] * 396 + [2] * 4]

    def p_value(samples: list[Sample], has_rounding: bool) -> float:
        evidence, prefix_counts = Evidence(1, has_rounding), PrefixCounts(samples)
        evidence.observe(prefix_counts, [()], law)
        evidence.add_likelihood_ratios(prefix_counts)
        return next(test.p_value for test in evidence.tests() if test.token is None)

    assert p_value(samples, has_rounding=True) < 1e-6
    assert at_borders(law)[0, 3] == 1e-6
    at_border = [Sample((token,), ("accepted",), {0: draft[token]}) for token in [0] * 600 + [1] * 400 + [3]]
    assert p_value(at_border, has_rounding=True) == 1 and p_value(at_border, has_rounding=False) < 1e-6
