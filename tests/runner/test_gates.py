"""Gates fused into linear layers: same values, same bits in any pass, for any architecture."""

from __future__ import annotations

import pytest
import torch

from outrider import native
from outrider.runner import ModelRunner, RunnerConfig, blocks, compiled, kernels
from outrider.runner.forward import Pass
from outrider.runner.gates import fuse_gates
from outrider.runner.quantized import quantized_copy

from . import references
from .rounds import make_model, untouched
from .test_architectures import small_config

needs_kernels = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
needs_pairs = pytest.mark.skipif(not kernels.has_fast_bfloat16(), reason="neither matrix units (AMX) nor AVX-512 BF16")
FORMS = ["float32", "float16", "bfloat16", pytest.param("pairs", marks=needs_pairs)]


def weight_in(form, weight):
    if form == "pairs":
        return kernels.pack_weight(weight.bfloat16(), in_pairs=True)
    return kernels.pack_weight(weight.to(getattr(torch, form)))


def operators(which):
    """Return (linear, linear_gated)."""
    if which == "kernel":
        return torch.ops.outrider.linear, torch.ops.outrider.linear_gated
    return references.linear, references.linear_gated


@pytest.mark.parametrize("which", [pytest.param("kernel", marks=needs_kernels), "reference"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", references.GATES)
def test_a_gated_layer_equals_activation_times_product(which, form, activation):
    linear, gated = operators(which)
    torch.manual_seed(1)
    packed = weight_in(form, torch.randn(192, 320) / 4)
    x = torch.randn(3, 20, 320)
    x[0, 0], x[0, 1] = 100 * x[0, 0], 0  # large gates, and gates at zero
    gate, up = linear(x, packed, None, 192, 32).double().chunk(2, -1)
    expected = references.GATES[activation](gate) * up
    got = gated(x, packed, activation, 32)
    assert got.dtype == torch.float32 and got.shape == (3, 20, 96)
    torch.testing.assert_close(got.double(), expected, rtol=3e-6, atol=3e-5)
    assert gated(x[:, :0], packed, activation, 32).shape == (3, 0, 96)
    assert gated(x.bfloat16(), packed, activation, 32).dtype == torch.bfloat16


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inputs", [320, 6016])
def test_a_gated_row_has_the_same_bits_in_passes_of_any_width(form, inputs):
    """For 100 rows and more, 6016 inputs are summed in parts, with intermediate sums in a separate buffer."""
    torch.manual_seed(inputs)
    packed = weight_in(form, torch.randn(128, inputs) / inputs**0.5)
    x, gated = torch.randn(600, inputs), torch.ops.outrider.linear_gated
    together = gated(x, packed, "silu", 32)
    for rows in (1, 2, 12, 13, 16, 17, 31, 32, 33, 100, 257):
        assert torch.equal(gated(x[:rows], packed, "silu", 32), together[:rows]), rows
        assert torch.equal(gated(x[600 - rows :], packed, "silu", 32), together[600 - rows :]), rows


@needs_kernels
@pytest.mark.parametrize("activation", references.GATES)
def test_an_activation_of_any_shape_equals_torchs_and_does_not_depend_on_the_other_elements(activation):
    activate = torch.ops.outrider.activate
    both = torch.cat([torch.linspace(-100, 100, 4003), torch.linspace(-6, 6, 4003), torch.zeros(4)]).view(2, 5, -1)
    x = both[..., :777]  # rows that are not adjacent
    got = activate(x, activation)
    assert got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), references.GATES[activation](x.double()), rtol=4e-7, atol=5e-7)
    for row in (0, 3):
        assert torch.equal(activate(x[1, row], activation), got[1, row])
    for start in range(9):
        assert torch.equal(activate(x[0, 0, start : start + 20], activation), got[0, 0, start : start + 20])
    assert activate(x[:0], activation).shape == (0, 5, 777)
    assert torch.equal(activate(x.bfloat16(), activation), activate(x.bfloat16().float(), activation).bfloat16())
    extremes = torch.tensor([torch.nan, torch.inf, 0.0])
    assert activate(extremes, activation).nan_to_num(7.0, 8.0).tolist() == [7.0, 8.0, 0.0]


@needs_kernels
def test_invalid_gates_are_rejected():
    x, packed = torch.randn(2, 64), kernels.pack_weight(torch.randn(64, 64))
    with pytest.raises(RuntimeError, match="no activation relu"):
        torch.ops.outrider.linear_gated(x, packed, "relu", 32)
    with pytest.raises(RuntimeError, match="no activation relu"):
        torch.ops.outrider.activate(x, "relu")
    with pytest.raises(RuntimeError, match="expected an even number"):
        torch.ops.outrider.linear_gated(x, kernels.pack_weight(torch.randn(96, 64)), "silu", 32)


SIZES = {"hidden_size": 64, "intermediate_size": 96}
FOUND = {
    "llama": (2, SIZES),
    "phi3": (2, SIZES),  # one layer in its checkpoint; factors of the product are swapped
    "gemma": (2, SIZES),  # gelu
    "gpt2": (0, {}),  # none
    "olmo2": (2, SIZES),
    "starcoder2": (0, SIZES),  # none
}


@needs_kernels
@pytest.mark.parametrize("model_type", FOUND)
def test_gates_are_found_in_a_models_graph(model_type):
    num_found, sizes = FOUND[model_type]
    program, before, after = fused(small_config(model_type, **sizes))
    assert count(program) == num_found
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    linears = [node for node in program.graph.nodes if node.target is torch.ops.outrider.linear.default]
    assert sum(node.meta["val"].shape[-1] == 2 * sizes.get("intermediate_size", 0) for node in linears) == 0


@needs_kernels
@pytest.mark.parametrize("changes", [{"intermediate_size": 80}, {"mlp_bias": True}, {"hidden_act": "relu"}])
def test_unsupported_layers_are_unchanged(changes):
    """Halves that are not whole panels, a bias, another activation."""
    program, before, after = fused(small_config("llama", **SIZES | changes))
    assert count(program) == 0
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@needs_kernels
def test_a_copy_in_fewer_bits_computes_gates_in_one_operator_and_knows_its_arithmetic_before_it_is_traced():
    runner = ModelRunner.load(untouched(make_model(small_config("llama", **SIZES))), RunnerConfig(compile="never"))
    blocks.fastest_activation_bits.cache_clear()
    program = compiled.export(Pass(quantized_copy(runner.model, 4), runner.cache, ()))
    fuse_gates(program)
    ops, targets = torch.ops.outrider, [node.target for node in program.graph.nodes]
    assert targets.count(ops.linear_gated.default) == 2 and ops.linear.default in targets
    assert ops.block_activation_bits.default not in targets


def fused(config):
    """Return a model's pass as a graph with fused gates, and its logits before and after."""
    runner = ModelRunner.load(untouched(make_model(config)), RunnerConfig(compile="never", max_batch=2))
    program = compiled.export(Pass(runner.model, runner.cache, ()))
    inputs = program.example_inputs[0]
    inputs[0].copy_(torch.tensor([[5, 6, 7, 8, 9]]))
    before = program.module()(*inputs)[0]
    fuse_gates(program)
    return program, before, program.module()(*inputs)[0]


def count(program):
    return sum(node.target is torch.ops.outrider.linear_gated.default for node in program.graph.nodes)
