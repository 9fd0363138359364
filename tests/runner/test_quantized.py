"""Weights in 8 and 4 bits: the C++ reads what the reference reads, and the error is that of rounding to the nearest code."""

from __future__ import annotations

import pytest
import torch

from outrider.runner import ModelRunner, RunnerConfig, kernels
from outrider.runner.quantized import quantize, quantized_bytes, quantized_copy

from .rounds import make_model, untouched
from .test_architectures import small_config

needs_kernels = pytest.mark.skipif(not kernels.load_cpu_kernels(), reason="no C++ compiler")
SHAPES = [(1, 1), (31, 7), (32, 128), (97, 513), (200, 1030), (416, 64)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_every_weight_becomes_the_nearest_code(outputs, inputs, bits):
    torch.manual_seed(outputs)
    packed = kernels.pack_weight(torch.randn(outputs, inputs).bfloat16())
    codes, scales = quantize(packed, bits)
    assert codes.shape == (*packed.shape[:2], 32 * bits // 8) and codes.dtype == (torch.int8 if bits == 8 else torch.uint8)
    assert scales.shape == (-(-inputs // 128), packed.shape[0] * 32)
    restored = kernels.unpack_codes(codes, scales)
    numbers = torch.tensor(kernels.CODES) if bits == 4 else torch.arange(-127, 128) / 127
    for start in range(0, inputs, 128):
        group, got = packed[:, start : start + 128].float(), restored[:, start : start + 128]
        choices = group.abs().amax(1, keepdim=True)[..., None] * numbers  # [panels, 1, 32, codes]
        nearest = (group[..., None] - choices).abs().amin(-1)
        torch.testing.assert_close((group - got).abs(), nearest, rtol=1e-4, atol=5e-4)  # codes are looked up in steps of 2^-15


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_the_kernel_computes_what_the_reference_does_whatever_the_number_of_rows(outputs, inputs, bits):
    torch.manual_seed(inputs)
    codes, scales = quantize(kernels.pack_weight(torch.randn(outputs, inputs)), bits)
    x, bias = torch.randn(40, inputs), torch.randn(outputs)
    whole = torch.ops.outrider.linear_scaled(x, codes, scales, bias, outputs)
    expected = kernels.reference_linear_scaled(x.double().float(), codes, scales, bias, outputs)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 5, 7, 12, 13, 25):
        assert torch.equal(torch.ops.outrider.linear_scaled(x[:rows], codes, scales, bias, outputs), whole[:rows])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_in_pairs_has_the_same_codes(bits):
    weight = torch.randn(97, 416).bfloat16()
    ours, theirs = (quantize(kernels.pack_weight(weight, in_pairs), bits) for in_pairs in (False, True))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@needs_kernels
def test_codes_without_scales_and_scales_of_another_shape_are_refused():
    codes, scales = quantize(kernels.pack_weight(torch.randn(64, 200)), 8)
    with pytest.raises(RuntimeError, match="need scales"):
        torch.ops.outrider.linear(torch.randn(2, 200), codes, None, 64)
    with pytest.raises(RuntimeError, match="linear_scaled: scales"):
        torch.ops.outrider.linear_scaled(torch.randn(2, 200), codes, scales[:1], None, 64)


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_copy_takes_the_memory_told_and_leaves_the_model_alone(bits):
    model = ModelRunner.load(untouched(make_model(small_config("llama", tie_word_embeddings=True))), RunnerConfig()).model
    before = {name: tensor.clone() for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    copy = quantized_copy(model, bits)
    shared = {tensor.data_ptr() for tensor in [*model.buffers(), *model.parameters()]}
    own = [tensor for tensor in [*copy.buffers(), *copy.parameters()] if tensor.data_ptr() not in shared]
    assert sum(tensor.numel() * tensor.element_size() for tensor in own) == quantized_bytes(model, bits)
    assert copy.lm_head.packed.dtype == torch.int8
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        assert torch.equal(tensor, before[name])
