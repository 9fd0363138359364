"""What passes and drafts cost: learned from readings, some of which lie."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.stats import expected_speedup
from outrider.runner.costs import PassCosts
from outrider.tune import CostModel
from outrider.types import PhaseTimes


def test_a_hiccup_in_the_first_pass_is_forgotten():
    passes = PassCosts()
    passes.observe(1, 1, 0, 30.0)  # it held a compilation
    passes.observe(1, 1, 0, 0.1)
    assert passes.seconds(1, 1, 0) == 0.1
    passes.observe(1, 1, 0, 30.0)
    assert passes.seconds(1, 1, 0) < 0.13


def test_a_pass_that_was_slow_for_a_while_leaves_the_others_alone():
    passes = PassCosts()
    passes.observe(1, 1, 0, 1.0)
    for _ in range(9):
        passes.observe(5, 1, 0, 2.4)
    passes.observe(5, 1, 0, 1.2)
    assert passes.seconds(5, 1, 0) == 1.2 and passes.seconds(1, 1, 0) == 1.0


def test_of_other_passes_the_first_tells_by_how_much_all_differ():
    passes = PassCosts()
    behind = passes.behind(3)
    for table in (passes, behind):
        table.observe(1, 1, 0, 1.0)
        table.observe(16, 1, 0, 1.5)
        table.observe_outside(1, 0.1)
    passes.renew()
    assert passes.seconds(1, 1, 0) is behind.seconds(1, 1, 0) is passes.plain_round(1, 0) is None
    passes.observe(1, 1, 0, 0.4)
    assert passes.seconds(1, 1, 0) == 0.4 and passes.seconds(16, 1, 0) == pytest.approx(0.6)
    assert passes.plain_round(1, 0).outside is None and behind.seconds(16, 1, 0) is None
    passes.observe(16, 1, 0, 0.5)
    assert passes.seconds(16, 1, 0) == pytest.approx(0.5) and passes.seconds(1, 1, 0) == 0.4
    assert passes.behind(3) is behind


def test_one_slow_pass_does_not_say_that_rows_cost_more_than_passes_of_one_row():
    passes = PassCosts()
    for _ in range(3):
        passes.observe(1, 4, 0, 1.0)
    passes.observe(1.25, 4, 0, 2.0)  # the first with drafts, of one request of four
    assert passes.seconds(1.25, 4, 0) == pytest.approx(1.25)
    assert passes.seconds(5, 4, 0) == pytest.approx(5.0)
    passes.observe(1.25, 4, 0, 2.0)  # once more is no accident
    assert passes.seconds(1.25, 4, 0) > 1.5
    assert passes.seconds(5, 4, 0) <= 4 * passes.seconds(1.25, 4, 0)


def test_a_plain_round_just_behind_another_model_says_something_only_where_nothing_is_known():
    passes = PassCosts()
    model = CostModel(passes)
    for is_cold, score, outside in [(True, 1.5, 0.6), *[(False, 1.0, 0.2)] * 20, *[(True, 1.4, 0.5)] * 20]:
        passes.observe(1, 1, 0, score, is_cold)
        passes.observe_outside(1, outside, is_cold)
        model.observe_plain(1, PhaseTimes(host=outside), is_cold)
        if is_cold:
            assert model.plain_round(1, 0) == pytest.approx(2.1 if score > 1.4 else 1.2)
    assert passes.plain_round(1, 0).outside == pytest.approx(0.2)


def test_unmeasured_passes_are_interpolated():
    passes = PassCosts()
    assert passes.seconds(1, 1, 0) is None
    passes.observe(1, 1, 0, 1.0)
    passes.observe(5, 1, 0, 1.8)
    assert passes.seconds(3, 1, 0) == pytest.approx(1.4)
    assert passes.seconds(9, 1, 0) > 1.8
    assert passes.seconds(1, 1, 10_000) == 1.0
    assert passes.seconds(1, 2, 0) is None


def test_a_width_seen_once_is_not_believed_to_cost_many_times_its_neighbours():
    passes = PassCosts()
    passes.observe(1, 1, 0, 1.0)
    passes.observe(2, 1, 0, 9.0)
    assert passes.seconds(2, 1, 0) < 2.5
    for _ in range(9):
        passes.observe(2, 1, 0, 4.0)
    assert passes.seconds(2, 1, 0) > 3  # it really is that steep


def test_narrower_passes_than_any_measured_are_cheaper_than_it():
    passes = PassCosts()
    passes.observe(9, 1, 0, 1.4)
    assert passes.seconds(1, 1, 0) == pytest.approx(1.0) and passes.seconds(5, 1, 0) == pytest.approx(1.2)


def test_wider_passes_than_any_measured_follow_the_slope_up_to_it():
    passes = PassCosts()
    passes.observe(1, 1, 0, 1.0)
    passes.observe(3, 1, 0, 1.4)
    assert passes.seconds(6, 1, 0) == pytest.approx(2.0)


def test_a_longer_text_takes_over_prices_and_scales_them_by_its_first_pass():
    passes = PassCosts()
    passes.observe(1, 1, 0, 1.0)
    passes.observe(5, 1, 0, 1.4)
    passes.observe(5, 1, 1000, 2.8)
    assert passes.seconds(1, 1, 1000) == pytest.approx(2.0)
    assert passes.seconds(1, 1, 0) == 1.0


def test_a_row_costs_what_it_does_in_other_batches_until_it_was_measured():
    passes = PassCosts()
    passes.observe(1, 1, 0, 1.0)
    passes.observe(5, 1, 0, 1.4)
    passes.observe(1, 4, 0, 3.0)
    assert passes.seconds(5, 4, 0) == pytest.approx(3.0 + 4 * 0.4)


def observe_draft(model: CostModel, k: int, seconds: float, is_catch_up: bool = False, batch: int = 1) -> None:
    model.observe(k, batch, batch, PhaseTimes(draft=seconds), is_catch_up, has_drafts=True)


def test_an_unmeasured_draft_costs_a_part_of_a_plain_pass():
    model = CostModel(PassCosts())
    observe_draft(model, 4, 2.0, is_catch_up=True)
    assert model.draft(4, 1, plain_pass=1.0) == pytest.approx(0.4)
    assert model.draft(0, 1, plain_pass=1.0) == 0


def test_draft_costs_lie_on_the_line_through_what_was_measured():
    model = CostModel(PassCosts())
    for _ in range(10):
        for k in (2, 4, 8):
            observe_draft(model, k, 0.5 + 0.3 * k)
    assert [model.draft(k, 1, plain_pass=1.0) for k in (1, 3, 12)] == pytest.approx([0.8, 1.4, 4.1], rel=0.1)
    assert model.draft(4, 8, plain_pass=1.0) == model.draft(4, 1, plain_pass=1.0)


def test_drafts_that_cost_the_same_at_any_length_are_learned_as_such():
    model = CostModel(PassCosts())
    for k in (3, 7, 15, 15, 15):
        observe_draft(model, k, 0.1)
    assert model.draft(15, 1, plain_pass=1.0) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("at", [0, 5])
def test_a_hiccup_in_a_draft_is_forgotten(at):
    model = CostModel(PassCosts())
    for number in range(10):
        observe_draft(model, 4, 30.0 if number == at else 1.0)
    assert model.draft(4, 1, plain_pass=1.0) == pytest.approx(1.0, rel=0.15)


def test_a_hiccup_while_a_prompt_is_read_does_not_price_reading_out_of_reach():
    model = CostModel(PassCosts())
    model.observe_catch_up(30.0, 100, plain_round=1.0)
    assert model.catch_up(100) == pytest.approx(5.0)
    for _ in range(6):
        model.observe_catch_up(1.0, 100, plain_round=1.0)
    assert model.catch_up(100) == pytest.approx(1.0, rel=0.1)


def test_the_expected_speedup_is_leviathans():
    assert expected_speedup(0.0, 5, 0.1) == pytest.approx(1 / 1.5)
    assert expected_speedup(1.0, 5, 0.0) == 6
    assert expected_speedup(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / (0.2 * 1.25))


def test_passes_that_begin_behind_the_first_layers_have_prices_of_their_own():
    passes = PassCosts()
    model = CostModel(passes)
    for seconds in (0.8, 0.8, 0.8, 0.2):  # the last one compiled
        passes.observe(1, 1, 0, 1.0)
        passes.behind(3).observe(5, 1, 0, seconds)
    assert passes.seconds(1, 1, 0) == 1.0
    assert passes.behind(3).seconds(5, 1, 0) == pytest.approx(0.2)
    assert passes.behind(2).seconds(5, 1, 0) is None
    model.observe_plain(1, PhaseTimes(), False)
    assert model.prices(1, 0).score(5.0) >= 1.0
    model.observe(4, 1, 1, PhaseTimes(draft=0.4), False, True, first_layer=3)
    assert model.prices(1, 0).score(5.0) == pytest.approx(0.2)
    assert model.round(4, [4], 4, 1, 0) == pytest.approx(0.2 + model.draft(4, 1, 1.0))
    assert model.round(0, [0], 0, 0, 0) == 1.0


def test_the_width_of_a_pass_is_its_tokens_over_its_requests():
    assert PassCosts().width([4]) == 5
    assert PassCosts().width([0, 2, 0, 4]) == 2.5
    assert PassCosts().width([0, 0, 1]) == 1.25
    assert PassCosts(is_padded=True).width([0, 2, 0, 4]) == 5
    assert PassCosts(is_padded=True).behind(2).width([0, 4]) == 5


def test_the_curve_is_what_single_widths_cost():
    passes = PassCosts()
    assert passes.curve(9, 4, 0) is None
    for width, seconds in ((1, 1.0), (1.5, 1.2), (5, 2.0)):
        passes.observe(width, 4, 0, seconds)
    for widest in (1.25, 3.0, 5.0, 9.0):
        known = passes.curve(widest, 4, 300)
        for width in np.linspace(1, widest, 9):
            assert np.interp(width, *known) == pytest.approx(passes.seconds(width, 4, 300))
