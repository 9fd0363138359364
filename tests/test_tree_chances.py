"""Acceptance learned from earlier rounds: from given drafts, and in whole generations with random heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from heads.writers import HIDDEN, write_eagle3, write_medusa
from tiny_folder import make_folder

from outrider import LLM, OutriderError, SamplingParams
from outrider.heads.head_runner import Step
from outrider.proposers.head_trees import TreeConfig
from outrider.proposers.medusa import MedusaConfig
from outrider.proposers.method import Setting
from outrider.proposers.tree_chances import ACCURACY_WEIGHT, MAX_COUNT, REFRESH, Calibration, DrawnTree, GrownTree, SiblingRates
from outrider.proposers.trees import best_tree, shape_of


def test_before_any_observation_the_confidence_is_returned():
    said = np.array([[0.9, 0.05, 0.01], [0.5, 0.3, 0.002]])
    assert Calibration().chances(said) == pytest.approx(said, rel=0.15, abs=1e-3)


def test_accepted_drafts_raise_the_calibrated_probability():
    calibration = Calibration()
    for number in range(200):
        calibration.learn([0.4, 0.1], None if number % 10 == 0 else 0)  # nine of ten
    first, second = calibration.chances(np.array([0.4, 0.1]))
    assert first == pytest.approx(0.9, abs=0.05) and second < 0.02
    # other confidences, and the same one for a second child, were not observed
    assert calibration.chances(np.array([0.97]))[0] == pytest.approx(0.97, abs=0.02)
    assert calibration.chances(np.array([0.5, 0.4]))[1] == pytest.approx(0.4, abs=0.05)


def test_old_observations_decay():
    calibration, rates = Calibration(), SiblingRates([(0.5, 0.1)])
    for taken in [None] * 2000 + [0] * 600:
        calibration.learn([0.5], taken)
        rates.learn([1], [taken])
    assert calibration.chances(np.array([0.5]))[0] > 0.9 and rates.table[0][0] > 0.9
    assert max(map(max, calibration._tried)) <= MAX_COUNT


def test_only_tokens_with_confidence_zero_have_probability_zero():
    calibration = Calibration()
    calibration.learn([1.0, 0.0], 1)  # an emitted token had a probability too small for float32, but not zero
    first, second, third = calibration.chances(np.array([1.0, 1e-30, 0.0]))
    assert 0 < second < first < 1 and third == 0


def test_rates_count_only_drafts_whose_parents_were_accepted():
    rates = SiblingRates([(0.5, 0.2, 0.1), (0.5, 0.2, 0.1)])
    before = rates.table
    for _ in range(REFRESH):
        assert rates.table is before  # a tree is not reshaped every round
        rates.learn([2, 2], [1])  # the second at depth 1; depth 2 was not reached
    tried = ACCURACY_WEIGHT + REFRESH
    assert rates.table[0] == pytest.approx((0.5 * ACCURACY_WEIGHT / tried, (0.2 * ACCURACY_WEIGHT + REFRESH) / tried, 0.1))
    assert rates.table[1] == before[1]


def test_a_grown_tree_learns_from_all_candidates_on_the_accepted_path():
    # The root's children 7 and 8, of which only 7 is a node; its children 5 and 6.
    seen = []

    class Counting(Calibration):
        def learn(self, confidences, taken):
            seen.append((confidences, taken))

    tree = GrownTree([7, 8, 5, 6], [-1, -1, 0, 0], [0.6, 0.3, 0.5, 0.4], [0, 3], Counting())
    for path, token, counted in (
        ([0, 1], 9, [([0.6, 0.3], 0), ([0.5, 0.4], 1)]),  # 7, 6 and an unknown token
        ([0], 5, [([0.6, 0.3], 0), ([0.5, 0.4], 0)]),  # 7, then 5, which was left out
        ([], 8, [([0.6, 0.3], 1)]),
        ([], 1, [([0.6, 0.3], None)]),
    ):
        tree.learn(path, token)
        assert seen == counted
        seen.clear()


def test_a_sampled_tree_learns_from_its_own_nodes():
    seen = []

    class Counting(SiblingRates):
        def learn(self, ranks, taken):
            seen.append((ranks, taken))

    shape = shape_of(best_tree([(0.7, 0.5), (0.6, 0.2)], 4)[0])
    assert shape.parents == (-1, -1, 0, 1)
    tree = DrawnTree(shape, 4, Counting([(0.5,)]))
    for path, counted in (([], ([2], [None])), ([1], ([2, 1], [1, None])), ([0, 2], ([2, 1], [0, 0]))):
        tree.learn(path, 3)
        assert seen.pop() == counted
    DrawnTree(shape, 2, Counting([(0.5,)])).learn([0], 3)  # cut before the second level
    assert seen.pop() == ([2], [0])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chances")
    make_folder(folder / "target", hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4)
    write_medusa(folder / "medusa", 320, 3)
    write_eagle3(folder / "eagle3", 320, 100)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", ["eagle3", "medusa"])
def test_methods_learn_the_acceptance_of_their_heads(home, head, temperature):
    """Random heads are rarely accepted, and the expected acceptance soon falls. A fixed size does not change."""
    method = "eagle" if head == "eagle3" else head
    for fixed in (False, True):
        said = f"{method}:draft={home / head}" + (":max_nodes=6" if fixed else "")
        llm = LLM(home / "target", method=said, compile="never", device="cpu", num_draft_tokens=3)
        proposer = llm.engine.proposer
        calibrations = proposer._calibrations.values() if method == "eagle" else ()
        of = proposer._rates if method == "eagle" else proposer._rates[temperature > 0]
        before = of.table, [sum(map(sum, each._tried)) for each in calibrations]
        llm.generate([[5, 6, 7], [9, 8, 7, 6]], SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True))
        after = of.table, [sum(map(sum, each._tried)) for each in calibrations]
        grows_by_confidence = method == "eagle" and temperature == 0
        if grows_by_confidence:
            assert after[1][0] > before[1][0] and after[0] == before[0]
        elif fixed:
            assert after == before
        else:
            assert after[0][0][0] < before[0][0][0] and after[1] == before[1]
        assert llm.stats.faults == 0


def test_a_head_output_that_is_nan_pauses_only_its_request(home, monkeypatch):
    options = {"compile": "never", "device": "cpu", "num_draft_tokens": 3, "max_batch": 2}
    prompts, params = [[5, 6, 7], [9, 8, 7, 6]], SamplingParams(max_tokens=12, ignore_eos=True)
    expected = LLM(home / "target", method="plain", **options).generate(prompts, params)
    llm = LLM(home / "target", method=f"eagle:draft={home / 'eagle3'}", **options)
    extend, calls = llm.engine.proposer.head.extend, []

    def broken(ids, *args):
        step = Step(*(each.clone() for each in extend(ids, *args)))
        calls.append(list(ids))
        if len(calls) == 2:
            step.feedback[0] = math.nan
        return step

    monkeypatch.setattr(llm.engine.proposer.head, "extend", broken)
    found = llm.generate(prompts, params)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert [each.outputs[0].stats.faults for each in found] == [1, 0]
    assert calls[1] == ["r0", "r1"] and all(ids == ["r1"] for ids in calls[2:]) and len(calls) > 3


def test_a_level_whose_logits_are_nan_stops_nobodys_drafts(home, monkeypatch):
    options = {"compile": "never", "device": "cpu", "num_draft_tokens": 3, "max_batch": 2}
    llm = LLM(home / "target", method=f"eagle:draft={home / 'eagle3'}:max_nodes=12", **options)
    level = llm.engine.proposer.head.level

    def broken(*args):
        step = Step(*(each.clone() for each in level(*args)))
        step.logits[0] = math.nan
        return step

    monkeypatch.setattr(llm.engine.proposer.head, "level", broken)
    found = llm.generate([[5, 6, 7], [9, 8, 7, 6]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert [each.outputs[0].stats.faults for each in found] == [0, 0]
    rounds = [each.outputs[0].stats.num_drafted_rounds for each in found]
    assert rounds[0] == rounds[1] > 3


@pytest.mark.parametrize(
    "options", [{"acceptance": (0.5, True)}, {"acceptance": (math.nan,)}, {"acceptance": (1.5,)}, {"acceptance": ()}]
)
def test_acceptance_rates_are_numbers_from_0_to_1(options):
    with pytest.raises(OutriderError, match="invalid acceptance"):
        Setting.without_target(options=options).config(TreeConfig)
    rows = {"accuracies": ((0.5, 0.1), options["acceptance"])}
    with pytest.raises(OutriderError, match="invalid accuracies"):
        Setting.without_target(options=rows).config(MedusaConfig)
