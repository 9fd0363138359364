"""Targets with 8- and 4-bit weights: the dequantised model's logits, output independent of drafts, and one-line errors."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from runner.rounds import make_model, make_text, plain_logits, untouched
from runner.test_architectures import small_config
from tiny_folder import make_folder
from tiny_hybrids import hybrid, noisy
from torch import nn
from toy import outputs_of

from outrider import LLM, SamplingParams, native
from outrider.bench.provenance import provenance
from outrider.doctor import DoctorOptions, check_draft
from outrider.engine.plan import Plan
from outrider.export.deployment import read_deployment
from outrider.export.vllm import Vllm
from outrider.heads import copied_tables
from outrider.runner import ModelRunner, RunnerConfig, blocks, linear, packing
from outrider.types import OutriderError

needs_kernels = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
WEIGHTS = {"int8": 8, "int4": 4}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def wide_config(model_type="llama", **changes):
    """Return a config with layers large enough for 4 bits."""
    return small_config(model_type, **SIZES | changes)


@torch.no_grad()
def rounded(model, bits):
    """Return the model in float32 with the values of its weights in blocks."""
    own, head, table = copy.deepcopy(model), model.get_output_embeddings(), model.get_input_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or module is table:
            width = 8 if module is table else packing.layer_bits(module.weight.shape, bits, module is head)
            values = blocks.unpack(blocks.pack(module.weight, width), *module.weight.shape)
            own.get_submodule(name).weight.copy_(values)
    return own


@needs_kernels
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("precision", [8, 32])
def test_logits_equal_those_of_the_dequantised_model(model_type, weights, precision, monkeypatch):
    """Within float32's rounding for float32 activations, and within 8-bit rounding for 8-bit ones."""
    if precision == 32:
        monkeypatch.setattr(blocks, "activation_bits", lambda: 32)
        monkeypatch.setattr(linear.kernels, "has_fast_bfloat16", lambda: False)  # attention and its cache in float32
    elif blocks.activation_bits() != 8:
        pytest.skip("no AVX-512 VNNI")
    model = make_model(wide_config(model_type))
    runner = ModelRunner.load(untouched(model), RunnerConfig(weights=weights, compile="never"))
    packed = {blocks.bits_of(layer.packed) for layer in linear.packed_layers(runner.model)}
    assert packed == ({8} if weights == "int8" else {4, 8})
    text = make_text(30, 1)
    expected = plain_logits(rounded(model, WEIGHTS[weights]), text)[-1]
    got = runner.extend(["a"], [text])[0]
    plain = plain_logits(model, text)[-1]
    if precision == 32:
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    else:
        assert (got - expected).norm() < 0.04 * expected.norm()
    assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-3)  # quantisation has an effect


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_linear_layer_and_the_embedding_are_packed_and_the_originals_freed(tied, dtype):
    model = make_model(wide_config(tie_word_embeddings=tied)).to(getattr(torch, dtype))
    own = ModelRunner.load(untouched(model), RunnerConfig(weights="int4", compile="never")).model
    assert not any(isinstance(module, (nn.Linear, nn.Embedding)) for module in own.modules())
    assert own.get_input_embeddings().packed.dtype == torch.uint8
    assert (own.get_input_embeddings().packed.data_ptr() == own.get_output_embeddings().packed.data_ptr()) == tied
    assert sum(p.numel() for p in own.parameters()) == sum(p.numel() for p in model.parameters() if p.dim() == 1)
    ids = torch.tensor([3, 5])
    weight = model.get_input_embeddings().weight.detach()
    table = blocks.unpack(blocks.pack(weight, 8), *weight.shape)
    assert torch.equal(own.get_input_embeddings()(ids), table[ids])
    assert torch.equal(linear.weight_of(own.get_input_embeddings()), table)


@needs_kernels
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_stored_copy_of_a_packed_table_is_found_without_unpacking_the_whole(weights, monkeypatch):
    model = make_model(wide_config())
    table = model.get_input_embeddings().weight.detach().clone()
    packed = ModelRunner.load(untouched(model), RunnerConfig(weights=weights, compile="never")).model.get_output_embeddings()
    own, unpacked = model.get_output_embeddings().weight.detach().clone(), []
    real = linear._unpacked
    monkeypatch.setattr(copied_tables, "SLICE", linear.kernels.PANEL)
    monkeypatch.setattr(linear, "_unpacked", lambda *args: unpacked.append(len(real(*args))) or real(*args))
    assert len(own) > linear.kernels.PANEL
    assert copied_tables.is_copy(own, packed)
    assert max(unpacked) == linear.kernels.PANEL and sum(unpacked) == len(own)
    assert copied_tables.is_copy(own[:-3], packed)  # padding rows
    assert not copied_tables.is_copy(own + 1, packed)
    assert not copied_tables.is_copy(own[:, 1:], packed)
    assert not copied_tables.is_copy(table.flip(0), packed)


METHODS = {
    "ngram": {"method": "ngram"},
    "draft": {"method": "draft"},
    "early-exit": {"method": "early-exit:layers=1"},
    "low-bit": {"method": "low-bit:bits=4"},
}
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [[7, 3, 9], [(5 * i * i + i) % 60 + 1 for i in range(45)], [(3 * i) % 11 + 1 for i in range(30)]]


@needs_kernels
@pytest.mark.parametrize("batch, k", itertools.product((1, 3), (0, 4)))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_drafts_do_not_change_the_output(weights, method, batch, k):
    if method == "low-bit" and weights == "int4":
        pytest.skip("not supported: see the test below")
    model = make_model(wide_config())
    options = {"weights": weights, "compile": "never", "max_batch": batch}
    expected = tokens_of(LLM(model, method="plain", **options | {"max_batch": 1}))
    given = METHODS[method] | ({"draft": noisy(model)} if method == "draft" else {})
    llm = LLM(model, num_draft_tokens=k, **given, **options)
    assert tokens_of(llm) == expected
    assert llm.stats.faults == 0 and (llm.stats.num_drafts > 0) == (k > 0)


@needs_kernels
@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_drafts_do_not_change_the_output_of_recurrent_hybrids(weights, kind):
    model = hybrid(kind)
    options = {"weights": weights, "compile": "never"}
    expected = tokens_of(LLM(model, method="plain", **options | {"max_batch": 1}))
    for given in ({"method": "ngram"}, {"method": "draft", "draft": noisy(model)}):
        llm = LLM(model, num_draft_tokens=4, **given, **options)
        assert tokens_of(llm) == expected and llm.stats.num_drafts > 0 and llm.stats.faults == 0


@needs_kernels
def test_a_compiled_pass_equals_an_eager_one():
    model = make_model(wide_config())
    options = {"weights": "int4", "method": "ngram", "num_draft_tokens": 3}
    assert tokens_of(LLM(model, compile="always", **options)) == tokens_of(LLM(model, compile="never", **options))


def tokens_of(llm):
    return [completion.token_ids for completion in outputs_of(llm.generate(PROMPTS, PARAMS))]


@needs_kernels
def test_the_draft_keeps_its_own_weights():
    llm = LLM(make_model(wide_config()), draft=make_model(wide_config(), seed=1), weights="int4", compile="never")
    assert linear.is_in_blocks(llm.runner.model) and not linear.is_in_blocks(llm.proposer.draft.model)


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_low_bit_drafts_need_fewer_bits_than_the_target(bits):
    said = f"invalid bits {bits}: expected fewer than the target's weights have; choose another method"
    with pytest.raises(OutriderError, match=said):
        LLM(make_model(wide_config()), method=f"low-bit:bits={bits}", weights=f"int{bits}", compile="never")


@needs_kernels
def test_models_that_cannot_be_quantised_are_rejected_before_weights_are_read(unread, tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "plain")
    assert "needs device=cpu, got cuda" in refusal(folder, monkeypatch, cuda=True, device="cuda")
    quantized = make_folder(tmp_path / "quantized", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "needs a checkpoint in 16 or 32 bits or FP8, got one quantised by gptq" in refusal(quantized, monkeypatch)
    experts = tmp_path / "experts"
    make_model(small_config("mixtral")).save_pretrained(experts)
    assert "of the weights of this mixtral model" in refusal(experts, monkeypatch)
    monkeypatch.setattr(native, "load", lambda: False)
    assert "needs Outrider's CPU kernels" in refusal(folder, monkeypatch)


def refusal(folder, monkeypatch, cuda=False, **config):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    with pytest.raises(OutriderError) as caught:
        ModelRunner.load(folder, RunnerConfig(weights="int8", **config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@needs_kernels
def test_doctor_and_provenance_name_the_precision(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    folder = make_folder(tmp_path / "target", hidden_size=64, intermediate_size=96)
    report = check_draft(DoctorOptions(folder, "ngram", {"weights": "int4", "compile": "never", "self_check": False}))
    said = next(finding.text for finding in report.findings if finding.topic == "weights")
    runner = ModelRunner.load(folder, RunnerConfig(weights="int4", compile="never"))
    assert said.startswith("the target's weights (int4) take 0 MB") and provenance(runner)["weights"] == "int4"


def test_a_plan_names_the_precision_and_exports_reject_it(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text('weights = "int4"\n')
    plan = Plan.read(file)
    plan.write(tmp_path / "copy.toml")
    assert plan.values == {"weights": "int4"} and 'weights = "int4"' in (tmp_path / "copy.toml").read_text()
    with pytest.raises(OutriderError, match="vLLM reads weights as in the checkpoint: remove weights from the plan"):
        Vllm().check(read_deployment(plan), own_code=False)
    file.write_text('weights = "int2"\n')
    with pytest.raises(OutriderError, match="invalid weights 'int2': expected int8 or int4"):
        Plan.read(file)
