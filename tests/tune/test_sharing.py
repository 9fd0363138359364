"""Drafts per request in a round, compared with an exhaustive search."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from outrider.tune.sharing import Allocation, RoundCosts

LONGEST = 4


def prices(row: float, padded: bool = False) -> RoundCosts:
    return RoundCosts(
        plain=1.1,
        overhead=0.1,
        draft=lambda k, num_drafting: 0.05 + 0.02 * k + 0.01 * num_drafting,
        score=lambda widths: 1 + row * (widths - 1),
        is_padded=padded,
    )


def luck(seed: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return np.cumprod(draw.uniform(0.1, 1.0, (batch, LONGEST)), axis=1), draw.uniform(0.2, 1.0, batch)


def speed(lens, gains, made, nodes, catch_up, priced: RoundCosts) -> float:
    """Return the tokens per second of one choice, from the definition."""
    batch, cumulative = len(lens), [0, *np.cumsum(nodes)]
    gains = [made[b] * gains[b, : lens[b]].sum() for b in range(batch)]
    p_plain = np.prod([1 - made[b] for b in range(batch) if lens[b]])
    drafts = sum(made[b] * cumulative[lens[b]] for b in range(batch)) / batch / (1 - p_plain)
    if priced.is_padded:
        drafts = cumulative[max(lens)]
    seconds = priced.draft(max(lens), sum(n > 0 for n in lens)) + p_plain * priced.plain
    seconds += (1 - p_plain) * (priced.score(1 + drafts) + priced.overhead)
    seconds += sum(catch_up[b] * (1 + gains[b]) for b in range(batch) if lens[b])
    return (batch + sum(gains)) / seconds


@pytest.mark.parametrize("nodes", [[1, 1, 1, 1], [3, 2, 2, 1]], ids=["chains", "trees"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_value_of_a_choice_is_tokens_per_second(nodes, padded):
    gains, made = luck(0, 3)
    catch_up, priced = np.array([0.0, 0.01, 0.02]), prices(0.3, padded)
    shares = Allocation(gains, made, np.array(nodes), catch_up, priced)
    for lens in product(range(LONGEST + 1), repeat=3):
        if any(lens):
            assert shares.speed(lens) == pytest.approx(speed(lens, gains, made, nodes, catch_up, priced))


@pytest.mark.parametrize("row", [0.02, 0.3, 2.0], ids=["cheap rows", "rows", "costly rows"])
def test_the_best_of_all_choices_is_found(row):
    """If every request certainly has drafts, the best choice is among the candidates; otherwise a close one is."""
    for seed in range(20):
        gains, made = luck(seed, 3)
        for made_, least in ((np.ones(3), 1.0 - 1e-9), (made, 0.97)):
            shares = Allocation(gains, made_, np.ones(LONGEST, int), np.zeros(3), prices(row))
            found, lens = shares.best(range(1, LONGEST + 1))
            every = [each for each in product(range(LONGEST + 1), repeat=3) if any(each)]
            assert found == pytest.approx(shares.speed(lens))
            plain = 3 / prices(row).plain
            assert max(found, plain) >= least * max([*map(shares.speed, every), plain])


def test_room_of_a_request_with_low_acceptance_goes_to_others():
    gains = np.cumprod(np.array([[0.9] * LONGEST, [0.05] * LONGEST]), axis=1)
    shares = Allocation(gains, np.ones(2), np.ones(LONGEST, int), np.zeros(2), prices(0.3))
    assert shares.best(range(1, LONGEST + 1))[1] == [LONGEST, 0]


def test_in_a_padded_pass_every_request_uses_the_full_width():
    gains = np.cumprod(np.array([[0.9] * LONGEST, [0.05] * LONGEST]), axis=1)
    shares = Allocation(gains, np.ones(2), np.ones(LONGEST, int), np.zeros(2), prices(0.05, padded=True))
    assert shares.best(range(1, LONGEST + 1))[1] == [LONGEST, LONGEST]


def test_no_draft_is_scored_without_its_parent():
    """Even if the second depth of a tree has the better ratio, it needs the first."""
    gains = np.array([[0.5, 0.49, 0.3, 0.1], [0.6, 0.2, 0.1, 0.1]])
    shares = Allocation(gains, np.ones(2), np.array([5, 1, 1, 1]), np.zeros(2), prices(0.3))
    for lens in product(range(LONGEST + 1), repeat=2):
        if any(lens):
            assert shares.speed(lens) > 0
    _, lens = shares.best([LONGEST])
    assert max(lens) > 0
