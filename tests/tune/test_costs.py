"""Costs of passes and drafts, learned from measurements that include outliers."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.stats import expected_speedup
from outrider.runner.cost_book import CostBook, MethodCosts, PlainRound


def test_an_outlier_in_the_first_pass_is_forgotten():
    costs = CostBook()
    costs.record_pass(1, 1, 0, 30.0)  # including compilation
    costs.record_pass(1, 1, 0, 0.1)
    assert costs.pass_seconds(1, 1, 0) == 0.1
    costs.record_pass(1, 1, 0, 30.0)
    assert costs.pass_seconds(1, 1, 0) < 0.13


def test_a_temporarily_slow_pass_does_not_affect_others():
    costs = CostBook()
    costs.record_pass(1, 1, 0, 1.0)
    for _ in range(9):
        costs.record_pass(5, 1, 0, 2.4)
    costs.record_pass(5, 1, 0, 1.2)
    assert costs.pass_seconds(5, 1, 0) == 1.2 and costs.pass_seconds(1, 1, 0) == 1.0


def test_a_renewal_discards_the_costs_of_passes_only():
    costs = CostBook()
    for first_layer in (0, 3):
        costs.record_pass(1, 1, 0, 1.0, first_layer)
        costs.record_pass(16, 1, 0, 1.5, first_layer)
    costs.record_round([0], 0, 1.0, overhead=0.1)
    costs.renew()
    assert costs.pass_seconds(1, 1, 0) is costs.pass_seconds(1, 1, 0, 3) is costs.plain_round(1, 0) is None
    costs.record_pass(1, 1, 0, 0.4)
    assert costs.pass_seconds(16, 1, 0) < 1.5 and costs.pass_seconds(16, 1, 0, 3) is None
    assert costs.plain_round(1, 0) == PlainRound(0.4, 0.1)  # verifier and host as before


def test_one_slow_pass_does_not_raise_the_cost_of_rows():
    costs = CostBook()
    for _ in range(3):
        costs.record_pass(1, 4, 0, 1.0)
    costs.record_pass(1.25, 4, 0, 2.0)  # the first with drafts, of one request of four
    assert costs.pass_seconds(1.25, 4, 0) == pytest.approx(1.25)
    assert costs.pass_seconds(5, 4, 0) == pytest.approx(5.0)
    costs.record_pass(1.25, 4, 0, 2.0)  # a second time is not an outlier
    assert costs.pass_seconds(1.25, 4, 0) > 1.5
    assert costs.pass_seconds(5, 4, 0) <= 4 * costs.pass_seconds(1.25, 4, 0)


def test_a_plain_round_just_after_another_model_counts_only_if_nothing_else_is_known():
    costs = CostBook()
    method = MethodCosts(costs, is_greedy=True)
    for is_cold, score, overhead in [(True, 1.5, 0.6), *[(False, 1.0, 0.2)] * 20, *[(True, 1.4, 0.5)] * 20]:
        costs.record_round([0], 0, score, overhead, is_cold=is_cold)
        if is_cold:
            assert method.round_costs(1, 0).plain == pytest.approx(2.1 if score > 1.4 else 1.2)
    assert costs.plain_round(1, 0).overhead == pytest.approx(0.2)


def test_greedy_and_sampled_rounds_have_separate_verifier_costs():
    costs = CostBook()
    greedy, sampled = MethodCosts(costs, is_greedy=True), MethodCosts(costs, is_greedy=False)
    costs.record_round([0], 0, 1.0, 0.2, is_greedy=True)
    assert greedy.overhead(1, has_drafts=False) == greedy.overhead(1, has_drafts=True) == 0.2
    assert sampled.round_costs(1, 0) is None and sampled.overhead(1, has_drafts=False) == 0.0
    costs.record_round([0], 0, 1.0, 0.5, is_greedy=False)
    assert (greedy.round_costs(1, 0).plain, sampled.round_costs(1, 0).plain) == (1.2, 1.5)
    assert (costs.plain_round(1, 0, True).overhead, costs.plain_round(1, 0, False).overhead) == (0.2, 0.5)


def test_costs_of_one_methods_rounds_do_not_affect_another():
    costs = CostBook()
    first, second = MethodCosts(costs, True), MethodCosts(costs, True)
    costs.record_round([0], 0, 1.0, 0.2)
    first.record_drafted_round(1, 0.7, first_layer=0)
    first.record_drafts(4, 1, 2.0)
    assert first.round_costs(1, 0).overhead == 0.7 and second.round_costs(1, 0).overhead == 0.2
    assert first.draft(4, 1, 1.0) == pytest.approx(2.0, rel=0.2) and second.draft(4, 1, 1.0) == pytest.approx(0.4)


def test_unmeasured_passes_are_interpolated():
    costs = CostBook()
    assert costs.pass_seconds(1, 1, 0) is None
    costs.record_pass(1, 1, 0, 1.0)
    costs.record_pass(5, 1, 0, 1.8)
    assert costs.pass_seconds(3, 1, 0) == pytest.approx(1.4)
    assert costs.pass_seconds(9, 1, 0) > 1.8
    assert costs.pass_seconds(1, 1, 10_000) == 1.0
    assert costs.pass_seconds(1, 2, 0) is None


def test_a_width_measured_once_cannot_cost_many_times_its_neighbours():
    costs = CostBook()
    costs.record_pass(1, 1, 0, 1.0)
    costs.record_pass(2, 1, 0, 9.0)
    assert costs.pass_seconds(2, 1, 0) < 2.5
    for _ in range(9):
        costs.record_pass(2, 1, 0, 4.0)
    assert costs.pass_seconds(2, 1, 0) > 3  # the cost really is that steep


def test_narrower_passes_than_any_measured_are_cheaper():
    costs = CostBook()
    costs.record_pass(9, 1, 0, 1.4)
    assert costs.pass_seconds(1, 1, 0) == pytest.approx(1.0) and costs.pass_seconds(5, 1, 0) == pytest.approx(1.2)


def test_wider_passes_than_any_measured_follow_the_slope():
    costs = CostBook()
    costs.record_pass(1, 1, 0, 1.0)
    costs.record_pass(3, 1, 0, 1.4)
    assert costs.pass_seconds(6, 1, 0) == pytest.approx(2.0)


def test_a_longer_context_inherits_costs_and_scales_them_by_its_first_pass():
    costs = CostBook()
    costs.record_pass(1, 1, 0, 1.0)
    costs.record_pass(5, 1, 0, 1.4)
    costs.record_pass(5, 1, 1000, 2.8)
    assert costs.pass_seconds(1, 1, 1000) == pytest.approx(2.0)
    assert costs.pass_seconds(1, 1, 0) == 1.0


@pytest.mark.parametrize("wrong", [10.0, 0.7])
def test_a_wrong_first_reading_of_copied_costs_is_corrected_for_all_widths(wrong):
    """The first pass in a longer context was disturbed, or ran while the machine was faster."""
    costs, slower = CostBook(), 2.0
    width, usual = 5, 1.4  # not among the copied ones
    for each, seconds in [(1, 1.0), (4, 1.3), (16, 2.5)]:
        costs.record_pass(each, 1, 0, seconds)
    costs.record_pass(width, 1, 1000, wrong * slower * usual)  # drafted rounds only
    for _ in range(20):
        costs.record_pass(width, 1, 1000, slower * usual)
    assert costs.pass_seconds(width, 1, 1000) == pytest.approx(slower * usual, rel=0.1)
    costs.record_pass(1, 1, 2000, slower)  # copies them
    for cache_len in (1000, 2000):
        assert [costs.pass_seconds(each, 1, cache_len) for each in (1, 16)] == pytest.approx([slower, 2.5 * slower], rel=0.1)


def test_a_disturbed_first_reading_of_another_width_leaves_the_other_copied_costs():
    costs = CostBook()
    for width, seconds in [(1, 1.0), (4, 1.3), (16, 2.5)]:
        costs.record_pass(width, 1, 0, seconds)
    for _ in range(500):
        costs.record_pass(1, 1, 1000, 2.0)
    costs.record_pass(4, 1, 1000, 26.0)
    assert costs.pass_seconds(16, 1, 1000) == pytest.approx(5.0)


def test_a_disturbed_later_reading_changes_copied_costs_for_a_while_only():
    costs = CostBook()
    costs.record_pass(1, 1, 0, 1.0)
    costs.record_pass(5, 1, 0, 1.4)
    for seconds in (1.4, 14.0, *[1.4] * 20):
        costs.record_pass(5, 1, 1000, seconds)
    assert costs.pass_seconds(1, 1, 1000) == pytest.approx(1.0, rel=0.1)


def test_a_row_has_the_cost_from_other_batches_until_it_is_measured():
    costs = CostBook()
    costs.record_pass(1, 1, 0, 1.0)
    costs.record_pass(5, 1, 0, 1.4)
    costs.record_pass(1, 4, 0, 3.0)
    assert costs.pass_seconds(5, 4, 0) == pytest.approx(3.0 + 4 * 0.4)


def test_an_unmeasured_draft_costs_a_share_of_a_plain_pass():
    model = MethodCosts(CostBook(), True)
    assert model.draft(4, 1, plain_pass=1.0) == pytest.approx(0.4)
    assert model.draft(0, 1, plain_pass=1.0) == 0


def test_draft_costs_are_on_the_line_through_the_measurements():
    model = MethodCosts(CostBook(), True)
    for _ in range(10):
        for k in (2, 4, 8):
            model.record_drafts(k, 1, 0.5 + 0.3 * k)
    assert [model.draft(k, 1, plain_pass=1.0) for k in (1, 3, 12)] == pytest.approx([0.8, 1.4, 4.1], rel=0.1)
    assert model.draft(4, 8, plain_pass=1.0) == model.draft(4, 1, plain_pass=1.0)


def test_drafts_with_constant_cost_are_learned():
    model = MethodCosts(CostBook(), True)
    for k in (3, 7, 15, 15, 15):
        model.record_drafts(k, 1, 0.1)
    assert model.draft(15, 1, plain_pass=1.0) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("at", [0, 5])
def test_an_outlier_in_a_draft_is_forgotten(at):
    model = MethodCosts(CostBook(), True)
    for number in range(10):
        model.record_drafts(4, 1, 30.0 if number == at else 1.0)
    assert model.draft(4, 1, plain_pass=1.0) == pytest.approx(1.0, rel=0.15)


def test_an_outlier_while_prefilling_does_not_prevent_later_prefills():
    model = MethodCosts(CostBook(), True)
    model.record_catch_up(30.0, 100, plain_round=1.0)
    assert model.catch_up(100) == pytest.approx(5.0)
    for _ in range(6):
        model.record_catch_up(1.0, 100, plain_round=1.0)
    assert model.catch_up(100) == pytest.approx(1.0, rel=0.1)


def test_the_expected_speedup_equals_leviathans_formula():
    assert expected_speedup(0.0, 5, 0.1) == pytest.approx(1 / 1.5)
    assert expected_speedup(1.0, 5, 0.0) == 6
    assert expected_speedup(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / (0.2 * 1.25))


def test_passes_that_start_after_the_first_layers_have_separate_costs():
    costs = CostBook()
    model = MethodCosts(costs, True)
    for seconds in (0.8, 0.8, 0.8, 0.2):  # the last one compiled
        costs.record_round([0], 0, 1.0, overhead=0.0)
        costs.record_round([4], 0, seconds, overhead=0.0, first_layer=3)
    assert costs.pass_seconds(1, 1, 0) == 1.0
    assert costs.pass_seconds(5, 1, 0, first_layer=3) == pytest.approx(0.2)
    assert costs.pass_seconds(5, 1, 0, first_layer=2) is None
    assert model.round_costs(1, 0).score(5.0) >= 1.0
    model.record_drafts(4, 1, 0.4)
    model.record_drafted_round(1, 0.0, first_layer=3)
    assert model.round_costs(1, 0).score(5.0) == pytest.approx(0.2)
    assert model.round(4, [4], 4, 1, 0) == pytest.approx(0.2 + model.draft(4, 1, 1.0))
    assert model.round(0, [0], 0, 0, 0) == 1.0


def test_the_width_of_a_pass_is_tokens_per_request():
    assert CostBook().width([4]) == 5
    assert CostBook().width([0, 2, 0, 4]) == 2.5
    assert CostBook().width([0, 0, 1]) == 1.25
    assert CostBook(is_padded=True).width([0, 2, 0, 4]) == 5


def test_scores_equal_the_costs_of_single_widths():
    costs = CostBook()
    assert costs.score_seconds(4, 0)(5.0) == 0.0
    for width, seconds in ((1, 1.0), (1.5, 1.2), (5, 2.0)):
        costs.record_pass(width, 4, 0, seconds)
    score = costs.score_seconds(4, 300)
    for width in np.linspace(1, 9, 33):
        assert score(width) == pytest.approx(costs.pass_seconds(width, 4, 300))


def test_costs_of_tree_scores_are_monotonic_and_estimated_for_unmeasured_batches():
    costs = CostBook()
    for width, seconds in ((1, 1.0), (2, 1.9), (3, 1.4), (5, 1.8)):
        costs.record_pass(width, 1, 0, seconds)
    assert costs.tree_scores(4, 1, 0) == pytest.approx([1.0, 1.4, 1.4, 1.6, 1.8])
    assert costs.tree_scores(1, 2, 0) == pytest.approx([1.6, 1.6])
    assert CostBook().tree_scores(2, 1, 0) == [1.0, 1.0, 1.0]


def test_the_first_plain_round_of_a_bucket_counts_although_it_is_cold() -> None:
    book = CostBook()
    book.record_pass(5, 1, 0, 1.4)
    book.record_round([0], 1000, 1.2, 0.1, is_cold=True)
    assert book.plain_round(1, 1000) is not None
