"""The target's first layers draft, and the score continues after them: same output, same cache, fewer layers run."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from runner.rounds import (
    OPERATORS,
    contents,
    force,
    make_model,
    make_request,
    make_text,
    plain_logits,
    proposal_of,
    untouched,
    verdict_of,
)
from runner.test_architectures import small_config
from tiny_folder import make_folder, make_tokenizer
from torch import nn
from toy import outputs_of

from outrider import LLM, SamplingParams, native
from outrider.proposers.early_exit import METHOD, measure_exits, pick_exit
from outrider.proposers.method import Setting
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.cost_book import CostBook
from outrider.runner.layer_span import WHOLE, LayerSpan
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError

LAYERS, DEPTH, VOCAB = 4, 2, 67
TYPES = ["llama", "gpt2", "gemma2", "gemma3_text", "qwen3", "gpt_neox", "phi3", "cohere2", "deepseek_v3", "granite"]


# Multiples of the vector width: otherwise torch rounds the remaining elements at the end of a tensor differently.
EVEN = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


def four_layers(model_type="llama", **shape):
    changes = {"num_hidden_layers": LAYERS} | ({"n_layer": LAYERS} if model_type == "gpt2" else {})
    if model_type in ("gemma2", "gemma3_text", "cohere2"):
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    return small_config(model_type, **changes, **shape)


class Drafting:
    """A target that drafts for itself, compared with its plain forward pass and with a second runner without drafts."""

    def __init__(self, model_type="llama", lengths=(3, 20, 37), depth=DEPTH, temperature=0.0, model=None, compile="never"):
        """``model``: use this one instead of a random one of ``model_type``."""
        self.model = model or make_model(four_layers(model_type, **(EVEN if model_type == "llama" else {})))
        config = RunnerConfig(compile=compile, prefill_chunk=16)
        self.runner = ModelRunner.load(untouched(self.model), config)
        self.config = config
        self.proposer = METHOD.build(Setting(self.runner, options={"layers": depth}))
        self.requests = [make_request(f"r{index}", make_text(length, index, 60)) for index, length in enumerate(lengths)]
        for request in self.requests:
            request.params = SamplingParams(temperature=temperature)
        self.hidden = ()  # hidden states to report
        self.spans = []
        run = self.runner.passes.run

        def spy(tokens, layout, layers, places, span=WHOLE):
            self.spans.append((span, tuple(tokens.shape[:2])))
            return run(tokens, layout, layers, places, span)

        self.runner.passes.run = spy

    def context(self, limits):
        return Context(tuple(self.requests), tuple(limits), Sampler(self.requests, VOCAB))

    def step(self, limits, accepted, proposal=None):
        """Draft, score, compare every row with the plain forward pass, and accept the given number of drafts per request."""
        context = self.context(limits)
        drafts = self.proposer.propose(context, max(limits))
        proposal = drafts if proposal is None else replace(proposal, partial_pass=drafts.partial_pass)
        self.spans.clear()
        scores = self.runner.score(context, proposal, self.hidden)
        for b, request in enumerate(self.requests):
            n = int(proposal.lens[b])
            text = request.token_ids + proposal.token_ids[b, :n].tolist()
            expected = plain_logits(self.model, text)[-n - 1 :]
            torch.testing.assert_close(scores.logits[b, : n + 1], expected, rtol=2e-3, atol=2e-4)
        verdict = verdict_of([list(range(count)) for count in accepted], [b + 1 for b in range(len(accepted))])
        self.runner.commit(context, verdict)
        self.proposer.commit(context, verdict)
        for b, (request, count) in enumerate(zip(self.requests, accepted, strict=True)):
            request.token_ids += [*proposal.token_ids[b, :count].tolist(), b + 1]
        return drafts, scores

    def assert_cache_is_a_fresh_forwards(self, exact):
        fresh = ModelRunner.load(untouched(self.model), self.config)
        for request in self.requests:
            text = request.token_ids[:-1]
            assert self.runner.cache.cached_len(request.request_id) == len(text)
            fresh.extend([request.request_id], [text])
            pairs = zip(contents(self.runner.cache, request.request_id), contents(fresh.cache, request.request_id), strict=True)
            for got, expected in pairs:
                torch.testing.assert_close(got, expected, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)


@pytest.fixture(params=OPERATORS)
def operators(request, monkeypatch):
    force(request.param, monkeypatch)
    return request.param


@pytest.mark.parametrize("model_type", TYPES)
def test_scores_and_cache_equal_those_of_full_passes(model_type, operators):
    drafting = Drafting(model_type)
    drafting.step([3, 3, 3], [3, 0, 1])
    drafting.step([4, 0, 2], [2, 0, 2])
    drafting.step([1, 1, 1], [1, 0, 1])
    exact = model_type == "llama" and operators == "kernels" and native.load()
    drafting.assert_cache_is_a_fresh_forwards(exact)


def test_scoring_runs_only_layers_that_drafting_did_not_run():
    drafting = Drafting()
    drafting.step([3, 3, 3], [3, 0, 1])
    _, scores = drafting.step([3, 3, 3], [3, 0, 1])
    assert drafting.spans == [(LayerSpan(0, DEPTH, head=False), (1, 3)), (LayerSpan(DEPTH), (1, 3 * 4))]
    assert scores.first_layer == DEPTH


def test_drafts_equal_the_output_of_the_first_layers():
    drafting = Drafting(lengths=(9,))
    shallow = make_model(four_layers(**EVEN))
    shallow.model.layers = shallow.model.layers[:DEPTH]
    shallow.config.num_hidden_layers = DEPTH
    drafts, _ = drafting.step([4], [0])
    text = drafting.requests[0].token_ids[:-1]
    for token in drafts.token_ids[0].tolist():
        assert token == int(plain_logits(shallow, text)[-1].argmax())
        text.append(token)


def test_sampled_drafts_have_their_own_distribution_in_probs():
    drafting = Drafting(temperature=0.8)
    drafts, _ = drafting.step([3, 3, 3], [1, 0, 2])
    assert drafts.probs.shape == (3, 3, VOCAB)
    torch.testing.assert_close(drafts.probs.sum(-1), torch.ones(3, 3))
    drafting.step([3, 3, 3], [1, 0, 2])
    drafting.assert_cache_is_a_fresh_forwards(exact=native.load())


def test_drafts_of_another_source_are_scored_correctly():
    """For example, another proposer's drafts, shortened drafts, or none."""
    drafting = Drafting()
    own = drafting.proposer.propose(drafting.context([3, 3, 3]), 3).token_ids.tolist()
    others = proposal_of([[own[0][0], (own[0][1] + 1) % VOCAB, 5], [own[1][0]], []])
    drafting.step([3, 3, 3], [2, 1, 0], others)
    drafting.step([3, 3, 3], [0, 0, 0], proposal_of([[], [], []]))
    tree = proposal_of([own[0], own[1], own[2]], [[-1, -1, -1]] * 3)
    context = drafting.context([3, 3, 3])
    tree = replace(tree, partial_pass=drafting.proposer.propose(context, 3).partial_pass)
    assert drafting.runner.score(context, tree).first_layer == 0
    drafting.runner.release(["r0", "r1", "r2"])
    drafting.step([3, 3, 3], [1, 1, 1])
    drafting.assert_cache_is_a_fresh_forwards(exact=native.load())


def test_drafts_of_an_earlier_request_with_the_same_id_are_forgotten():
    drafting = Drafting(lengths=(9,))
    drafting.step([2], [1])
    stale = drafting.proposer.propose(drafting.context([2]), 2)
    drafting.runner.release(["r0"])
    length = len(drafting.requests[0].token_ids)
    drafting.requests[0].token_ids[:] = [*make_text(length - 1, 9, 60), drafting.requests[0].token_ids[-1]]
    assert drafting.runner.score(drafting.context([2]), stale).first_layer == 0
    drafting.runner.release(["r0"])
    drafting.step([2], [1])
    drafting.assert_cache_is_a_fresh_forwards(exact=native.load())


def test_hidden_states_of_skipped_layers_are_available():
    drafting = Drafting(lengths=(9,))
    drafting.hidden = (0, 3)
    _, scores = drafting.step([2], [1])
    assert set(scores.hidden) == {0, 3} and scores.first_layer == 0
    drafting.hidden = (DEPTH, 3)
    _, scores = drafting.step([2], [1])
    assert set(scores.hidden) == {DEPTH, 3} and scores.first_layer == DEPTH


def test_hidden_states_equal_those_of_a_plain_forward_pass():
    drafting = Drafting(lengths=(40,))  # longer than a prompt that is prefilled with the drafts
    layers = drafting.hidden = (DEPTH, drafting.runner.num_layers)
    text = list(drafting.requests[0].token_ids)
    while not all(drafting.runner.prefill(["r0"], [text], layers)):
        pass
    _, scores = drafting.step([2], [0])
    assert scores.first_layer == DEPTH
    wanted = drafting.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    for index in layers:
        found = scores.hidden[index][0][: len(text)]
        torch.testing.assert_close(found, wanted[index][0].detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("same_text", [False, True])
def test_output_equals_plain_decoding(same_text):
    model = make_model(four_layers())
    prompts = [make_text(length, length, 60) for length in (1, 18, 40)]
    params = SamplingParams(max_tokens=20, temperature=0.9 if same_text else 0.0, seed=3, ignore_eos=True)
    plain = outputs_of(LLM(model, method="plain", compile="never", same_text=same_text).generate(prompts, params))
    llm = LLM(model, method="early-exit:layers=2", num_draft_tokens=4, compile="never", same_text=same_text)
    drafted = outputs_of(llm.generate(prompts, params))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


def test_partial_passes_do_not_count_as_costs_of_full_passes(monkeypatch):
    seen = set()
    record_pass = CostBook.record_pass

    def spy(costs, width, batch, cache_len, seconds, first_layer=0, is_cold=False):
        seen.add((width, first_layer == 0))
        record_pass(costs, width, batch, cache_len, seconds, first_layer, is_cold)

    monkeypatch.setattr(CostBook, "record_pass", spy)
    llm = LLM(make_model(four_layers()), method="early-exit:layers=3", num_draft_tokens=4, compile="never")
    llm.generate([make_text(9, 1, 60)], SamplingParams(max_tokens=12, ignore_eos=True))
    assert (5, False) in seen and all(is_whole == (width == 1) for width, is_whole in seen)
    assert llm.runner.costs.pass_seconds(5, 1, 9, first_layer=3) is not None


def still(model, first):
    """Make the layers from ``first`` on add nothing."""
    for layer in model.model.layers[first:]:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def test_the_exit_is_chosen_by_agreement_and_cost(monkeypatch):
    runner = ModelRunner.load(still(make_model(four_layers(vocab_size=320)), 2), RunnerConfig(compile="never"))
    monkeypatch.setattr(runner, "measure_pass", lambda *_, span=WHOLE, **__: 4.0 if span.stop is None else 1.0)
    exits = {found.layers: found for found in measure_exits(runner, make_text(60, 1, 320))}
    assert list(exits) == [1, 2, 3]
    assert exits[1].agreement < 0.5 and exits[2].agreement == exits[3].agreement == 1
    assert [found.cost_ratio for found in exits.values()] == [0.25, 0.5, 0.75]
    assert pick_exit(runner, make_tokenizer()) == 2
    assert pick_exit(runner, None) == 1


def test_a_target_without_a_useful_exit_is_reported(tmp_path, caplog):
    runner = ModelRunner.load(make_folder(tmp_path, num_hidden_layers=4), RunnerConfig(compile="never"))
    runner.measure_pass = lambda *_, span=WHOLE, **__: 4.0 if span.stop is None else 3.9
    with caplog.at_level(logging.WARNING):
        pick_exit(runner, make_tokenizer())
    assert "is expected to be faster" in caplog.text


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(0, "a whole number, at least 1"), (4, "1 to 3"), (9, "1 to 3"), (-1, "a whole number, at least 1")],
)
def test_layers_that_the_target_lacks_are_rejected_in_one_line(layers, expected):
    with pytest.raises(OutriderError, match=f"expected {expected}") as error:
        LLM(make_model(four_layers()), method=f"early-exit:layers={layers}", compile="never")
    assert "\n" not in str(error.value)


def test_a_target_of_one_layer_is_rejected():
    with pytest.raises(OutriderError, match="at least two layers"):
        LLM(make_model(small_config("llama", num_hidden_layers=1)), method="early-exit", compile="never")


class Pair(nn.Module):
    """A layer of a model that passes two states from layer to layer."""

    def __init__(self, layer, is_last):
        super().__init__()
        self.layer, self.is_last = layer, is_last

    def forward(self, states, **options):
        hidden, scale = states if isinstance(states, tuple) else (states, 1.0)
        out = self.layer(hidden * scale, **options)
        return out if self.is_last else (out, scale + 0.5)


def test_a_model_whose_layers_pass_on_several_states_is_rejected():
    model = make_model(four_layers())
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = Pair(layer, index == LAYERS - 1)
    with pytest.raises(OutriderError, match="LlamaForCausalLM does not run its layers one after another") as error:
        LLM(model, method="early-exit:layers=2", compile="never")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "method, message",
    [
        ("early-exit:depth=2", "the method has no option depth; it has layers"),
        ("early-exit:layers=two", "invalid layers 'two': expected a whole number"),
        ("early-exit:layers", "write options as early-exit:option=value"),
        ("plain:layers=2", "the method has no option layers; it has none"),
        ("early:layers=2", "unknown method 'early'"),
    ],
)
def test_invalid_method_options_are_rejected_in_one_line(method, message):
    with pytest.raises(OutriderError, match=message):
        LLM(make_model(four_layers()), method=method, compile="never")


@pytest.mark.parametrize("value", [2.0, True, [2]])
def test_method_options_of_another_type_are_rejected(value):
    with pytest.raises(OutriderError, match=r"invalid layers .*: expected a whole number"):
        LLM(make_model(four_layers()), method="early-exit", method_options={"layers": value}, compile="never")
