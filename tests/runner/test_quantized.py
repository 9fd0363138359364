"""Weights in 8 and 4 bits: copies of a model in blocks, and heads that multiply codes by codes."""

from __future__ import annotations

import pytest
import torch

from outrider import native
from outrider.runner import ModelRunner, RunnerConfig, blocks, kernels, linear
from outrider.runner.quantized import make_8_bits, quantize_in_fours, quantized_bytes, quantized_copy
from outrider.types import OutriderError

from . import references
from .rounds import make_model, untouched
from .test_architectures import small_config

needs_kernels = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
SHAPES = [(1, 1), (31, 7), (32, 128), (97, 513), (200, 1030), (416, 64)]


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_a_packed_weight_becomes_the_blocks_of_the_weight(outputs, inputs, bits):
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        expected = blocks.pack(weight.to(dtype), bits)
        assert torch.equal(blocks.repack(kernels.pack_weight(weight.to(dtype)), bits), expected)
    if inputs % 2 == 0:
        assert torch.equal(blocks.repack(kernels.pack_weight(weight.bfloat16(), in_pairs=True), bits), expected)


@needs_kernels
def test_codes_without_scales_and_scales_of_another_shape_are_refused():
    codes, scales = quantize_in_fours(kernels.pack_weight(torch.randn(64, 192)))
    with pytest.raises(RuntimeError, match="need scales"):
        torch.ops.outrider.linear(torch.randn(2, 192), codes, None, 64)
    plain = kernels.deinterleaved(codes).contiguous()
    for weight, wrong in ((codes, scales[:, :32]), (plain, scales), (codes.float(), scales)):
        with pytest.raises(RuntimeError, match="linear_scaled: scales"):
            torch.ops.outrider.linear_scaled(torch.randn(2, 192), weight, wrong, None, 64)


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_copy_allocates_the_predicted_memory_and_keeps_the_model(bits):
    model = ModelRunner.load(untouched(make_model(small_config("llama", tie_word_embeddings=True))), RunnerConfig()).model
    before = {name: tensor.clone() for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    copy = quantized_copy(model, bits)
    shared = {tensor.data_ptr() for tensor in [*model.buffers(), *model.parameters()]}
    own = [tensor for tensor in [*copy.buffers(), *copy.parameters()] if tensor.data_ptr() not in shared]
    assert sum(tensor.numel() * tensor.element_size() for tensor in own) == quantized_bytes(model, bits)
    assert {blocks.bits_of(layer.packed) for layer in linear.packed_layers(copy)} == {bits, 8}
    assert blocks.bits_of(copy.lm_head.packed) == 8
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        assert torch.equal(tensor, before[name])


needs_fours = pytest.mark.skipif(not kernels.has_int8_products(), reason="neither matrix units (AMX) nor AVX-512 VNNI")
KERNEL = pytest.param(torch.ops.outrider.linear_scaled, marks=needs_fours, id="kernel")
IN_FOURS = [(31, 64), (97, 128), (200, 1088), (416, 320)]  # depths of 1, 2, 17 and 5 tiles


def decoded(codes, scales, outputs, inputs):
    """Return the weight, float32 [outputs, inputs], of codes in fours with their scales."""
    panels = kernels.deinterleaved(codes).float() * scales.view(-1, 1, kernels.PANEL)  # [panels, inputs, 32]
    return panels.transpose(1, 2).reshape(-1, inputs)[:outputs]


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("outputs, inputs", IN_FOURS)
def test_codes_in_fours_are_the_nearest_with_one_scale_per_output(outputs, inputs, in_pairs):
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs).bfloat16()
    packed = kernels.pack_weight(weight, in_pairs)
    codes, scales = quantize_in_fours(packed)
    assert codes.shape == (packed.shape[0], inputs // 4, 32, 4) and codes.dtype == torch.int8
    assert kernels.packed_shape(codes) == kernels.packed_shape(packed)
    step = weight.float().abs().amax(1) / 127
    torch.testing.assert_close(scales[0, :outputs], step)
    restored = decoded(codes, scales, outputs, inputs)
    assert ((restored - weight.float()).abs() <= 0.501 * step[:, None]).all()


@pytest.mark.parametrize("multiply", [KERNEL, pytest.param(references.linear_scaled, id="reference")])
@pytest.mark.parametrize("outputs, inputs", IN_FOURS)
def test_integer_products_equal_the_reference(multiply, outputs, inputs):
    torch.manual_seed(inputs)
    weight, x, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(2, 35, inputs), torch.randn(outputs)
    x[0, 3], x[1, 2] = 0, 1000 * x[1, 2]  # each row has its own scale
    codes, scales = quantize_in_fours(kernels.pack_weight(weight))
    got = multiply(x, codes, scales, bias, outputs)
    step = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / step.clamp_min(1e-30)).round() * step
    expected = rounded.double() @ decoded(codes, scales, outputs, inputs).double().T
    torch.testing.assert_close(got, (expected + bias).float(), rtol=1e-5, atol=1e-4)
    assert multiply(x[:, :0], codes, scales, bias, outputs).shape == (2, 0, outputs)


@pytest.mark.parametrize("multiply", [KERNEL, pytest.param(references.linear_scaled, id="reference")])
@pytest.mark.parametrize("place", [0, 3, 127])
def test_nan_inputs_give_nan_outputs(multiply, place):
    codes, scales = quantize_in_fours(kernels.pack_weight(torch.randn(97, 128)))
    x = torch.randn(3, 128)
    x[1, place] = torch.nan
    out = multiply(x, codes, scales, None, 97)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@needs_fours
@pytest.mark.parametrize("outputs, inputs", [(97, 128), (64, 6016)])
def test_codes_in_fours_give_a_row_the_same_bits_in_passes_of_any_width(outputs, inputs):
    codes, scales = quantize_in_fours(kernels.pack_weight(torch.randn(outputs, inputs)))
    x = torch.randn(600, inputs)
    together = torch.ops.outrider.linear_scaled(x, codes, scales, None, outputs)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 100, 513):
        assert torch.equal(torch.ops.outrider.linear_scaled(x[:rows], codes, scales, None, outputs), together[:rows]), rows
        assert torch.equal(
            torch.ops.outrider.linear_scaled(x[600 - rows :], codes, scales, None, outputs), together[600 - rows :]
        )


@needs_kernels
@pytest.mark.parametrize("in_fours", [pytest.param(True, marks=needs_fours), False])
def test_an_8_bit_head_approximates_the_head_and_needs_cpu_kernels(in_fours, monkeypatch):
    if not in_fours:
        monkeypatch.setattr(kernels, "has_int8_products", lambda: False)
    config = small_config("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    runner = ModelRunner.load(untouched(make_model(config)), RunnerConfig())
    layers = linear.packed_layers(runner.model)
    x = {layer: torch.randn(7, layer.in_features) for layer in layers}
    before = {layer: layer(x[layer]) for layer in layers}
    size = sum(layer.packed.nbytes for layer in layers)
    make_8_bits(runner.model)
    assert {blocks.is_blocks(layer.packed) for layer in layers} == {not in_fours}
    assert sum(layer.packed.nbytes for layer in layers) <= size / (2 if in_fours else 1.8)
    for layer in layers:
        assert 0 < (layer(x[layer]) - before[layer]).norm() < 0.02 * before[layer].norm()
    with pytest.raises(OutriderError, match="leave out bits=8"):
        make_8_bits(torch.nn.Linear(64, 64))
