"""Chains of drafts end where the next one is not worth its price, and the draft's cache stays right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runner.rounds import make_model, make_request, untouched, verdict_of
from runner.test_architectures import small_config
from test_draft_model import Drafting

from outrider import LLM, SamplingParams
from outrider.proposers.chain_stops import FIRST_RATE, ChainStops
from outrider.proposers.tree_chances import Calibration
from outrider.types import Context, DraftPrices

FREE = DraftPrices(0.0, 0.0)


class Priced(Drafting):
    """Rounds with prices."""

    prices = FREE

    def context(self, limits):
        return replace(super().context(limits), prices=self.prices)


def started(prices, limits=(9,), stops=None):
    return (stops or ChainStops()).start([f"r{b}" for b in range(len(limits))], limits, prices)


def taught(outcomes):
    """Return stops that saw one draft per round: pairs of confidence and whether it was accepted."""
    stops = ChainStops()
    for confidence, is_accepted in outcomes:
        stops.start(["r0"], [1], FREE).add([confidence])
        context = Context((make_request("r0", [1]),), (1,), None)
        stops.learn(context, verdict_of([[0]] if is_accepted else [[]], [5]))
    return stops


def test_a_chain_ends_when_its_chance_is_below_the_price_of_a_step():
    chains = started(DraftPrices(0.5, 0.0))
    assert chains.add([0.9]) and chains.add([0.9])  # 0.81 of 0.8
    assert not chains.add([0.7])  # 0.57 of 0.8: less than 0.5
    assert chains.lens == [3]


def test_a_chain_of_free_drafts_reaches_its_limit():
    chains = started(FREE, (2,))
    assert chains.add([0.01]) and not chains.add([0.01])
    assert chains.lens == [2]


def test_requests_share_the_price_of_a_step():
    alone, together = started(DraftPrices(0.7, 0.0)), started(DraftPrices(0.7, 0.0), (9, 9))
    assert not alone.add([0.5]) and together.add([0.5, 0.5])


def test_the_price_of_a_row_ends_single_chains():
    chains = started(DraftPrices(0.1, 0.3), (9, 9))
    assert chains.add([0.9, 0.2]) and chains.add([0.9, 0.9])
    assert chains.lens == [2, 1]


def test_confidences_are_calibrated_by_what_is_accepted():
    trusted, doubted = taught([(0.5, True)] * 60), taught([(0.95, False)] * 60)
    assert started(DraftPrices(0.6, 0.0), stops=trusted).add([0.5])  # accepted more often than the draft model says
    assert not started(DraftPrices(0.1, 0.0), stops=doubted).add([0.95])
    assert not started(DraftPrices(0.9 * FIRST_RATE, 0.0)).add([0.5])


def test_the_next_draft_is_expected_to_be_accepted_as_often_as_earlier_ones():
    doubted = taught([(0.05, False)] * 60)  # of another confidence
    assert started(DraftPrices(0.5, 0.0)).add([0.99])
    assert not started(DraftPrices(0.5, 0.0), stops=doubted).add([0.99])


@pytest.mark.parametrize("others", [{"temperature": 0.8}, {}])
def test_a_verdict_does_not_count_for_the_chains_of_an_earlier_round(others, monkeypatch):
    """The round before had prices and got no verdict, because the target failed."""
    counted = []
    monkeypatch.setattr(Calibration, "learn", lambda self, confidences, taken: counted.append(taken))
    drafting = Priced(lengths=(5,))
    drafting.propose(4)
    drafting.prices = None
    drafting.requests[0].params = SamplingParams(**others)
    drafting.propose(4)
    drafting.commit([2], [50])
    assert counted == []


@pytest.mark.parametrize("temperature, coupled", [(0.0, False), (0.8, False), (0.8, True)])
def test_drafts_follow_the_model_after_chains_that_ended_early(temperature, coupled):
    """Prices by the seen confidences, so that each chain can end at each depth."""
    drafting, lens = Priced(temperature=temperature, coupled=coupled), []
    for drafting.prices, accepted in [
        (DraftPrices(9.0, 0.0), [1, 0, 1]),
        (DraftPrices(0.0, 1e-4), [0, 1, 1]),
        (DraftPrices(1e-3, 1e-5), [1, 1, 0]),
        (FREE, [4, 0, 2]),
        (DraftPrices(1e-2, 0.0), [0, 0, 0]),
        (FREE, [1, 3, 4]),
    ]:
        proposal = drafting.propose(4)
        drafting.check()
        lens.append(proposal.lens.tolist())
        assert proposal.token_ids.shape[1] == max(lens[-1])
        assert (proposal.probs is None) == (temperature == 0 or coupled)
        drafting.commit([min(pair) for pair in zip(accepted, lens[-1], strict=True)], [50, 51, 52])
    assert lens[0] == [1, 1, 1] and lens[3] == lens[5] == [4, 4, 4]
    assert 1 < torch.tensor(lens).float().mean() < 4


@pytest.mark.parametrize("k, looks", [(5, False), ("auto", True)])
def test_only_a_k_that_the_policy_chooses_depends_on_confidences(k, looks, monkeypatch):
    started, start = [], ChainStops.start
    monkeypatch.setattr(ChainStops, "start", lambda *args: started.append(args) or start(*args))
    model = make_model(small_config("llama"))
    llm = LLM(untouched(model), draft=untouched(model), num_draft_tokens=k, compile="never")
    (out,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=24, ignore_eos=True))[0].outputs
    assert bool(started) == looks and out.stats.faults == 0
    assert looks or out.stats.acceptance_histogram == {5: 4}  # the draft model is the target


def test_nan_in_a_draft_model_only_costs_the_drafts_of_that_request():
    model, draft = make_model(small_config("llama")), make_model(small_config("llama"))
    draft.get_input_embeddings().weight.data[50] = float("nan")
    params, prompts = SamplingParams(max_tokens=12, ignore_eos=True), [[1, 2, 3], [50, 6, 7]]
    llm = LLM(untouched(model), draft=draft, compile="never")
    found = [each.outputs[0] for each in llm.generate(prompts, params)]
    plain = [each.outputs[0] for each in LLM(model, method="plain", compile="never").generate(prompts, params)]
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert found[0].stats.faults == 0 and found[0].stats.num_drafts > 0
    assert found[1].stats.faults > 0 and found[1].stats.num_drafts == 0
