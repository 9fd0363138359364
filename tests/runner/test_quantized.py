"""Weights in 8 and 4 bits: copies of a model, and heads."""

from __future__ import annotations

import pytest
import torch

from outrider import native
from outrider.runner import ModelRunner, RunnerConfig, blocks, kernels, linear, quantized
from outrider.runner.quantized import quantized_bytes, quantized_copy
from outrider.types import OutriderError

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


@needs_kernels
@pytest.mark.parametrize(
    "bits, limit, is_rounded", [(None, 0, True), (None, 1 << 20, False), (8, 1 << 20, True), (16, 0, False)]
)
def test_a_head_larger_than_the_limit_gets_8_bits(bits, limit, is_rounded, monkeypatch):
    """Such a head is read from memory for every draft; 16 bits are kept if the user says so."""
    monkeypatch.setattr(quantized, "MAX_16_BIT_BYTES", limit)
    target = ModelRunner.load(untouched(make_model(small_config("llama"))), RunnerConfig()).model
    head = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    x = torch.randn(7, 64)
    exact, size = head(x), sum(weight.nbytes for weight in head.parameters())
    quantized.place_head(head, target, bits)
    assert all(blocks.is_blocks(layer.packed) == is_rounded for layer in linear.packed_layers(head))
    assert (quantized.packed_bytes(head) <= size / 1.8) == is_rounded
    assert (head(x) - exact).norm() < (0.02 if is_rounded else 1e-5) * exact.norm()


def test_8_bits_of_a_head_need_the_kernels(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: False)
    monkeypatch.setattr(quantized, "MAX_16_BIT_BYTES", 0)
    target = ModelRunner.load(untouched(make_model(small_config("llama"))), RunnerConfig()).model
    quantized.place_head(torch.nn.Linear(64, 64), target, None)
    with pytest.raises(OutriderError, match="bits=8 needs a head that runs on Outrider's CPU kernels: leave it out"):
        quantized.place_head(torch.nn.Linear(64, 64), target, 8)
