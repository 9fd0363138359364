"""Experts on the CPU kernels: the operator against torch, models against transformers, and the bits of a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from toy import outputs_of

from outrider import LLM, SamplingParams, native
from outrider.runner import ModelRunner, RunnerConfig, blocks, linear
from outrider.runner.experts import ExpertLinears, PackedExperts, multiplies_own_weight
from outrider.types import OutriderError

from .rounds import make_model, make_text, plain_logits, untouched
from .test_architectures import small_config

pytestmark = pytest.mark.skipif(not native.load(), reason="no C++ compiler")

NUM, INPUTS, INNER, TOP = 6, 64, 96, 3
TEXT = make_text(40, 1)
# Models whose experts are packed: experts of their own widths, with routers, shared experts, biases or a clamped activation.
WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    "phimoe": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "nemotron_h": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention", "moe", "linear_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 32,
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 32),
    },
}


def model_of(kind: str, **more: Any):
    return make_model(small_config(kind, **WIDE | MODELS[kind] | more))


def weights() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    up, down = torch.randn(NUM, 2 * INNER, INPUTS) / 8, torch.randn(NUM, INPUTS, INNER) / 8
    return up, down, torch.randn(NUM, 2 * INNER), torch.randn(NUM, INPUTS)


def choices(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    chosen = torch.stack([torch.randperm(NUM)[:TOP] for _ in range(rows)])
    return torch.randn(rows, INPUTS), chosen, torch.rand(rows, TOP)


def reference(x: Tensor, chosen: Tensor, shares: Tensor, activation: str, *parts: Tensor) -> Tensor:
    """Compute experts in float64 from their written formula."""
    up, down, up_bias, down_bias = (part.double() for part in parts)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, share in zip(chosen[row].tolist(), shares[row].double(), strict=True):
            wide = up[expert] @ x[row].double() + up_bias[expert]
            gate, through = (wide, 1.0) if activation == "relu_squared" else wide.chunk(2)
            if activation == "relu_squared":  # without gates
                gate = gate.clamp(min=0.0) ** 2
            elif activation == "swish_clamped":
                gate, through = gate.clamp(max=7.0), through.clamp(-7.0, 7.0) + 1
                gate = gate * torch.sigmoid(1.702 * gate)
            else:
                gate = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
            out[row] += share * (down[expert] @ (gate * through) + down_bias[expert])
    return out


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swish_clamped", "relu_squared"])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_the_operator_computes_the_formula(rows: int, bits: int | None, activation: str, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "activation_bits", lambda: 32)
    up, down, up_bias, down_bias = weights()
    if activation == "swish_clamped":  # numbers beyond the limits
        up = up * 20
    has_gate = activation != "relu_squared"
    if not has_gate:
        up, up_bias = up[:, :INNER], up_bias[:, :INNER]
    layers = [ExpertLinears.of(each.flatten(0, 1), bias.flatten(), bits) for each, bias in ((up, up_bias), (down, down_bias))]
    packed = PackedExperts(layers[0], layers[1], NUM, activation, has_gate)
    values = [
        linear.weight_of(layer).float().view(NUM, *shape)
        for layer, shape in zip(layers, (up.shape[1:], down.shape[1:]), strict=True)
    ]
    x, chosen, shares = choices(rows)
    expected = reference(x, chosen, shares, activation, *values, up_bias, down_bias)
    torch.testing.assert_close(packed(x, chosen, shares).double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_do_not_depend_on_each_other() -> None:
    up, down, *_ = weights()
    for bits in (None, 8, 4):
        packed = PackedExperts(
            ExpertLinears.of(up.flatten(0, 1), None, bits), ExpertLinears.of(down.flatten(0, 1), None, bits), NUM, "silu"
        )
        x, chosen, shares = choices(40)
        whole = packed(x, chosen, shares)
        alone = torch.cat([packed(x[row : row + 1], chosen[row : row + 1], shares[row : row + 1]) for row in range(40)])
        assert torch.equal(whole, alone)
        assert torch.equal(packed(x[None], chosen, shares)[0], whole)
        assert packed(x[:0], chosen[:0], shares[:0]).shape == (0, INPUTS)


@pytest.mark.parametrize("wrong", [-1, NUM])
def test_an_expert_that_does_not_exist_is_an_error(wrong: int) -> None:
    up, down, *_ = weights()
    packed = PackedExperts(ExpertLinears.of(up.flatten(0, 1), None), ExpertLinears.of(down.flatten(0, 1), None), NUM, "silu")
    x, chosen, shares = choices(2)
    chosen[1, 2] = wrong
    with pytest.raises(IndexError, match=f"no expert {wrong} of {NUM}"):
        packed(x, chosen, shares)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind: str) -> None:
    model = model_of(kind)
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never"))
    assert any(isinstance(module, PackedExperts) for module in runner.model.modules())
    assert not any("experts" in name for name, _ in runner.model.named_parameters())
    expected = plain_logits(model, TEXT)[-1]
    torch.testing.assert_close(runner.extend(["a"], [TEXT])[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "phimoe"])
def test_a_token_has_the_same_bits_in_passes_of_any_width(kind: str, weights: str | None, three_threads: None) -> None:
    model, found = model_of(kind), []
    for chunk in (1, 7, 256):
        runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never", prefill_chunk=chunk, weights=weights))
        assert runner.is_row_invariant
        with torch.inference_mode():
            found.append(runner.extend(["a"], [TEXT])[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_compiled_passes_keep_the_bits_of_sigmoids(kind: str, three_threads: None) -> None:
    """Shared experts of Qwen2 have a sigmoid for a gate, routers of DeepSeek one for each expert."""
    model, found = model_of(kind), []
    for chunk in (1, 7, 256):
        runner = ModelRunner.load(untouched(model), RunnerConfig(compile="always", prefill_chunk=chunk))
        assert runner.is_row_invariant
        with torch.inference_mode():
            found.append(runner.extend(["a"], [TEXT])[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_order_of_choices_does_not_matter() -> None:
    up, down, *_ = weights()
    packed = PackedExperts(ExpertLinears.of(up.flatten(0, 1), None), ExpertLinears.of(down.flatten(0, 1), None), NUM, "silu")
    x, chosen, shares = choices(40)
    assert torch.equal(packed(x, chosen, shares), packed(x, chosen.flip(1), shares.flip(1)))


def test_sigmoids_in_eager_passes_are_not_promised() -> None:
    for kind, compile, promised in (("qwen2_moe", "never", False), ("qwen2_moe", "always", True), ("gpt_oss", "never", True)):
        runner = ModelRunner.load(untouched(model_of(kind)), RunnerConfig(compile=compile, self_check=False))
        assert runner.is_row_invariant is promised


class TwoProducts(torch.nn.Module):
    """A router that multiplies two weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (torch.nn.Parameter(torch.randn(NUM, INPUTS)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + functional.linear(x, self.other)


def test_a_router_with_two_weights_of_one_shape_keeps_its_values() -> None:
    """The product with either was taken for the one with its own weight, and the self-check compares packed models only."""
    assert not multiplies_own_weight(TwoProducts())


def test_experts_that_do_not_begin_with_a_panel_stay_as_they_are() -> None:
    model = make_model(small_config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48))
    runner = ModelRunner.load(untouched(model), RunnerConfig(compile="never"))
    assert not runner.is_row_invariant
    expected = plain_logits(model, TEXT)[-1]
    torch.testing.assert_close(runner.extend(["a"], [TEXT])[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    with pytest.raises(OutriderError, match="of the weights of this qwen3_moe model"):
        ModelRunner.load(untouched(model), RunnerConfig(compile="never", weights="int4"))


@pytest.mark.parametrize("weights", [None, "int4"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_drafts_do_not_change_the_text(kind: str, weights: str | None) -> None:
    model = model_of(kind, vocab_size=67)
    prompts = [[7, 3, 9], make_text(45, 2), [(3 * i) % 11 + 1 for i in range(30)], [8]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain = None
    for method, k in (("plain", 0), ("ngram", 4), *([] if weights else [("low-bit", 4)])):
        llm = LLM(untouched(model), method=method, num_draft_tokens=k, compile="never", weights=weights, max_batch=4)
        tokens = [output.token_ids for output in outputs_of(llm.generate(prompts, params))]
        plain = plain or tokens
        assert tokens == plain, method


def test_low_bit_weights_of_experts_take_what_blocks_take() -> None:
    runner = ModelRunner.load(untouched(model_of("qwen3_moe")), RunnerConfig(compile="never", weights="int4"))
    layers = [layer for layer in linear.packed_layers(runner.model) if isinstance(layer, ExpertLinears)]
    assert len(layers) == 2 * runner.num_layers
    assert {blocks.bits_of(layer.packed) for layer in layers} == {4}
    assert sum(layer.packed.nbytes for layer in layers) == 2 * 8 * (blocks.num_bytes(128, 64, 4) + blocks.num_bytes(64, 64, 4))
    small = ModelRunner.load(
        untouched(model_of("qwen3_moe", moe_intermediate_size=32)), RunnerConfig(compile="never", weights="int4")
    )
    assert {
        blocks.bits_of(layer.packed) for layer in linear.packed_layers(small.model) if isinstance(layer, ExpertLinears)
    } == {8}


def test_a_compiled_pass_equals_an_eager_one() -> None:
    model = model_of("qwen3_moe")
    found = [
        ModelRunner.load(untouched(model), RunnerConfig(compile=compile)).extend(["a"], [TEXT])[0]
        for compile in ("never", "always")
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
