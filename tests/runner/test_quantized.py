"""Weights in 8 and 4 bits: copies of a model, and heads."""

from __future__ import annotations

import pytest
import torch

from outrider import native
from outrider.runner import ModelRunner, RunnerConfig, blocks, kernels, linear
from outrider.runner.quantized import place_head, quantized_bytes, quantized_copy, round_weights
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
def test_an_8_bit_head_approximates_the_head_and_needs_cpu_kernels():
    config = small_config("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    runner = ModelRunner.load(untouched(make_model(config)), RunnerConfig())
    layers = linear.packed_layers(runner.model)
    x = {layer: torch.randn(7, layer.in_features) for layer in layers}
    before = {layer: layer(x[layer]) for layer in layers}
    size = sum(layer.packed.nbytes for layer in layers)
    round_weights(runner.model, 8)
    assert all(blocks.is_blocks(layer.packed) for layer in layers)
    assert sum(layer.packed.nbytes for layer in layers) <= size / 1.8
    for layer in layers:
        assert 0 < (layer(x[layer]) - before[layer]).norm() < 0.02 * before[layer].norm()
    with pytest.raises(OutriderError, match="leave out bits=8"):
        place_head(torch.nn.Linear(64, 64), make_model(config), bits=8)
