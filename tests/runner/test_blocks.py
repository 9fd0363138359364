"""Weights in blocks of 8 and 4 bits: what rounding loses, the C++ against the reference, and a row's bits in any pass."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from outrider import native
from outrider.runner import blocks, kernels

pytestmark = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
SHAPES = [(1, 1), (31, 7), (32, 128), (97, 513), (200, 1030), (416, 64)]


def supported():
    """Bits of activations that this CPU's instructions allow."""
    packed = blocks.pack(torch.ones(32, 32), 8)
    found = []
    for bits in (8, 16, 32):
        try:
            torch.ops.outrider.linear_blocks(torch.ones(1, 32), packed, None, 32, bits)
        except RuntimeError as error:
            assert "does not multiply activations" in str(error)
        else:
            found.append(bits)
    return found


PRECISIONS = supported()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_8_bits_round_to_the_nearest_code_of_a_scale_that_clips_nothing(outputs, inputs, dtype):
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs).to(dtype)
    weight[0, : inputs // 2] = 0
    packed = blocks.pack(weight, 8)
    assert blocks.is_blocks(packed) and blocks.bits_of(packed) == 8
    assert packed.nbytes == blocks.num_bytes(outputs, inputs, 8)
    parts = functional.pad(weight.float(), (0, -inputs % 32)).unflatten(1, (-1, 32))
    step = parts.abs().amax(-1, keepdim=True) / 127
    error = (functional.pad(blocks.unpack(packed, outputs, inputs), (0, -inputs % 32)).unflatten(1, (-1, 32)) - parts).abs()
    assert (error <= 0.506 * step + 1e-12).all()  # a bfloat16 scale is up to 2^-7 larger


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_4_bits_lose_less_than_rounding_by_the_largest_weight(outputs, inputs):
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs)
    packed = blocks.pack(weight, 4)
    assert blocks.bits_of(packed) == 4 and packed.nbytes == blocks.num_bytes(outputs, inputs, 4)
    parts = functional.pad(weight, (0, -inputs % 32)).unflatten(1, (-1, 32))
    values = torch.tensor(native.CODES4) / 127
    nearest = (parts[..., None] - parts.abs().amax(-1, keepdim=True)[..., None] * values).abs().amin(-1)
    error = blocks.unpack(packed, outputs, inputs) - weight
    assert error.square().sum() <= nearest.square().sum() + 1e-9
    if inputs >= 32:
        assert error.norm() < 0.08 * weight.norm()  # evenly spaced codes of the largest weight: 0.10


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_zeros_and_of_tiny_weights_stay_finite(bits):
    for weight in (torch.zeros(40, 70), torch.full((40, 70), 1e-38), torch.full((40, 70), -3e4)):
        restored = blocks.unpack(blocks.pack(weight, bits), 40, 70)
        assert torch.isfinite(restored).all()
        torch.testing.assert_close(restored, weight, rtol=0.02, atol=1e-30)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_the_operator_computes_what_the_reference_does(outputs, inputs, bits, precision):
    torch.manual_seed(inputs)
    packed = blocks.pack(torch.randn(outputs, inputs), bits)
    x, bias = torch.randn(2, 20, inputs), torch.randn(outputs)
    x[0, 3], x[1, 2] = 0, 1000 * x[1, 2]  # a row's scales are its own
    got = torch.ops.outrider.linear_blocks(x, packed, bias, outputs, precision)
    weight = blocks.unpack(packed, outputs, inputs).double()
    exact = blocks.round_activations(x, precision).double() @ weight.T + bias.double()
    size = (x.double().abs() @ weight.abs().T).clamp_min(1)
    assert ((got.double() - exact).abs() <= 1e-5 * size).all()
    reference = blocks.reference_linear_blocks(x, packed, bias, outputs, precision)
    assert ((reference.double() - exact).abs() <= 1e-5 * size).all()
    assert torch.ops.outrider.linear_blocks(x[:, :0], packed, None, outputs, precision).shape == (2, 0, outputs)
    assert torch.ops.outrider.linear_blocks(x.bfloat16(), packed, None, outputs, precision).dtype == torch.bfloat16


@pytest.mark.parametrize("precision, error", [(8, 0.02), (16, 0.005), (32, 1e-6)])
def test_rounded_activations_are_close(precision, error):
    x = torch.randn(5, 7, 100)
    assert (blocks.round_activations(x, precision) - x).norm() <= error * x.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", [(97, 513), (416, 1100), (1600, 40)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(outputs, inputs, bits, precision):
    torch.manual_seed(0)
    packed, x, bias = blocks.pack(torch.randn(outputs, inputs), bits), torch.randn(60, inputs), torch.randn(outputs)
    multiply = torch.ops.outrider.linear_blocks
    alone = torch.cat([multiply(row[None], packed, bias, outputs, precision) for row in x])
    for rows in range(1, 61):
        assert torch.equal(multiply(x[:rows], packed, bias, outputs, precision), alone[:rows]), rows
        assert torch.equal(multiply(x[60 - rows :], packed, bias, outputs, precision), alone[60 - rows :]), rows


@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_reads_the_rows_of_a_weight_in_blocks(bits):
    packed, ids = blocks.pack(torch.randn(70, 100), bits), torch.tensor([[3, 69, 0], [40, 3, 31]])
    expected = blocks.unpack(packed, 70, 100)[ids]
    assert torch.equal(torch.ops.outrider.embed_blocks(ids, packed, 100), expected)
    assert torch.equal(blocks.reference_embed_blocks(ids, packed, 100), expected)
    with pytest.raises(IndexError, match="no token 96"):
        torch.ops.outrider.embed_blocks(torch.tensor([96]), packed, 100)


def test_weights_of_another_form_and_inputs_of_another_size_are_refused():
    packed = blocks.pack(torch.randn(64, 100), 8)
    with pytest.raises(RuntimeError, match="input of size 200, weight for 4 blocks of 32"):
        torch.ops.outrider.linear_blocks(torch.randn(2, 200), packed, None, 64, 32)
    with pytest.raises(RuntimeError, match="are not blocks of 8 or 4 bits"):
        torch.ops.outrider.linear_blocks(torch.randn(2, 100), packed[..., :500].contiguous(), None, 64, 32)


@pytest.mark.parametrize("activation", kernels.GATES)
def test_gated_halves(activation):
    both = 4 * torch.randn(3, 5, 96)
    gate, up = both.double().chunk(2, -1)
    got = torch.ops.outrider.gate_halves(both, activation)
    torch.testing.assert_close(got.double(), kernels.GATES[activation](gate) * up, rtol=3e-6, atol=3e-5)
    torch.testing.assert_close(got, kernels.reference_gate_halves(both, activation), rtol=3e-6, atol=3e-5)
    with pytest.raises(RuntimeError, match="no activation relu"):
        torch.ops.outrider.gate_halves(both, "relu")
