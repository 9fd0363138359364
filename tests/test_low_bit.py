"""A quantised copy of the target drafts: same output, and a cache in full precision."""

from __future__ import annotations

import logging

import pytest
import torch
from runner.rounds import contents, force_reference, make_model, make_request, make_text, plain_logits, untouched, verdict_of
from runner.test_architectures import small_config
from toy import outputs_of

from outrider import LLM, SamplingParams, native
from outrider.proposers.low_bit import METHOD
from outrider.proposers.method import Setting
from outrider.runner import ModelRunner, RunnerConfig
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError

needs_kernels = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
EAGER = RunnerConfig(compile="never", prefill_chunk=16)
VOCAB = 67


def even_model(model_type="llama"):
    """Return a model with multiples of the vector width: otherwise torch rounds the end of a tensor differently."""
    return make_model(small_config(model_type, hidden_size=64, intermediate_size=64, head_dim=16))


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_and_cache_are_full_precision_after_every_commit(bits, temperature):
    model = even_model()
    runner, fresh = ModelRunner.load(untouched(model), EAGER), ModelRunner.load(untouched(model), EAGER)
    proposer = METHOD.build(Setting(runner, options={"bits": bits}))
    requests = tuple(make_request(f"r{index}", make_text(length, index, 60)) for index, length in enumerate((3, 20, 37)))
    for request in requests:
        request.params = SamplingParams(temperature=temperature)
    agreed = 0
    for limits, accepted in [((3, 3, 3), (3, 0, 1)), ((4, 0, 2), (2, 0, 2)), ((1, 1, 1), (1, 0, 1))]:
        context = Context(requests, limits, Sampler(requests, VOCAB))
        proposal = proposer.propose(context, max(limits))
        assert proposal.lens.tolist() == list(limits) and (proposal.probs is None) == (temperature == 0)
        scores = runner.score(context, proposal)
        for b, request in enumerate(requests):
            text = request.token_ids + proposal.token_ids[b, : limits[b]].tolist()
            expected = plain_logits(model, text)[-limits[b] - 1 :]
            torch.testing.assert_close(scores.logits[b, : limits[b] + 1], expected, rtol=2e-3, atol=2e-4)
            agreed += int((expected[:-1].argmax(-1) == proposal.token_ids[b, : limits[b]]).sum())
        runner.commit(context, verdict_of([list(range(count)) for count in accepted], [1, 2, 3]))
        proposer.commit(context, verdict_of([list(range(count)) for count in accepted], [1, 2, 3]))
        for b, (request, count) in enumerate(zip(requests, accepted, strict=True)):
            request.token_ids += [*proposal.token_ids[b, :count].tolist(), b + 1]
            text = request.token_ids[:-1]
            fresh.extend([request.request_id], [text])
            assert runner.cache.cached_len(request.request_id) == len(text)
            for got, kept in zip(
                contents(runner.cache, request.request_id), contents(fresh.cache, request.request_id), strict=True
            ):
                assert torch.equal(got, kept)
    if temperature == 0:
        assert agreed >= 12 if bits == 8 else agreed >= 6  # of 18


@needs_kernels
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_output_equals_plain_decoding(model_type, bits):
    model = make_model(small_config(model_type))
    prompts = [make_text(length, length, 60) for length in (1, 18, 40)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain = outputs_of(LLM(model, method="plain", compile="never").generate(prompts, params))
    llm = LLM(model, method=f"low-bit:bits={bits}", num_draft_tokens=4, compile="never")
    assert [c.token_ids for c in outputs_of(llm.generate(prompts, params))] == [c.token_ids for c in plain]
    assert llm.stats.faults == 0 and llm.stats.num_drafts > 0


@needs_kernels
def test_added_memory_is_logged_before_it_is_allocated(caplog, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.proposers.low_bit.quantized_copy", stop)
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        LLM(even_model(), method="low-bit", compile="never")
    assert "the 4-bit drafting weights add" in caplog.text and "MB of memory" in caplog.text


@needs_kernels
@pytest.mark.parametrize("bits", [2, 16])
def test_other_numbers_of_bits_are_rejected_in_one_line(bits):
    with pytest.raises(OutriderError, match=f"invalid bits {bits}: expected 4 or 8"):
        LLM(even_model(), method=f"low-bit:bits={bits}", compile="never")


def test_a_target_without_packed_weights_is_rejected_in_one_line(monkeypatch):
    force_reference(monkeypatch)
    with pytest.raises(
        OutriderError, match=r"needs a target on Outrider's CPU kernels: .* runs without them, because"
    ) as error:
        LLM(even_model(), method="low-bit", compile="never")
    assert "\n" not in str(error.value)
