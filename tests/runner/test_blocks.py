"""Weights in blocks of 8, 6 and 4 bits: quantisation error, C++ against the reference, equal bits of a row in any pass."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from outrider import native
from outrider.runner import blocks
from outrider.types import OutriderError

from . import references

pytestmark = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
SHAPES = [(1, 1), (31, 7), (32, 128), (97, 513), (200, 1030), (416, 64)]


def supported():
    """Return the activation bits that this CPU's instructions support."""
    packed = blocks.pack(torch.ones(32, 32), 8)
    found = []
    for bits in (8, 32):
        try:
            torch.ops.outrider.linear(torch.ones(1, 32), packed, None, 32, bits)
        except RuntimeError as error:
            assert "does not multiply activations" in str(error)
        else:
            found.append(bits)
    return found


PRECISIONS = supported()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_8_bits_round_to_the_nearest_code_without_clipping(outputs, inputs, dtype):
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
def test_4_bits_have_a_smaller_error_than_scaling_by_the_largest_weight(outputs, inputs):
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs)
    packed = blocks.pack(weight, 4)
    assert blocks.bits_of(packed) == 4 and packed.nbytes == blocks.num_bytes(outputs, inputs, 4)
    parts = functional.pad(weight, (0, -inputs % 32)).unflatten(1, (-1, 32))
    values = torch.tensor(native.CODES4["table4"]) / 127
    nearest = (parts[..., None] - parts.abs().amax(-1, keepdim=True)[..., None] * values).abs().amin(-1)
    error = blocks.unpack(packed, outputs, inputs) - weight
    assert error.square().sum() <= nearest.square().sum() + 1e-9
    if inputs >= 32:
        assert error.norm() < 0.08 * weight.norm()  # uniform codes scaled by the largest weight: 0.10


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_zeros_and_of_tiny_weights_stay_finite(bits):
    for weight in (torch.zeros(40, 70), torch.full((40, 70), 1e-38), torch.full((40, 70), -3e4)):
        restored = blocks.unpack(blocks.pack(weight, bits), 40, 70)
        assert torch.isfinite(restored).all()
        torch.testing.assert_close(restored, weight, rtol=0.02, atol=1e-30)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("place", [0, 20, 69])
def test_nan_activations_give_nan_outputs(place, bits, precision):
    packed = coded(40, 70, 6, 32, "middle", torch.float16)[0] if bits == 6 else blocks.pack(torch.randn(40, 70), bits)
    x = torch.randn(3, 70)
    x[1, place] = torch.nan
    out = torch.ops.outrider.linear(x, packed, None, 40, precision)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_the_operator_equals_the_exact_product(outputs, inputs, bits, precision):
    torch.manual_seed(inputs)
    packed = blocks.pack(torch.randn(outputs, inputs), bits)
    x, bias = torch.randn(2, 20, inputs), torch.randn(outputs)
    x[0, 3], x[1, 2] = 0, 1000 * x[1, 2]  # each row has its own scale
    got = torch.ops.outrider.linear(x, packed, bias, outputs, precision)
    weight = blocks.unpack(packed, outputs, inputs).double()
    exact = references.round_activations(x, precision).double() @ weight.T + bias.double()
    size = (x.double().abs() @ weight.abs().T).clamp_min(1)
    assert ((got.double() - exact).abs() <= 1e-5 * size).all()
    reference = references.linear(x, packed, bias, outputs, precision)
    assert ((reference.double() - exact).abs() <= 1e-5 * size).all()
    assert torch.ops.outrider.linear(x[:, :0], packed, None, outputs, precision).shape == (2, 0, outputs)
    assert torch.ops.outrider.linear(x.bfloat16(), packed, None, outputs, precision).dtype == torch.bfloat16


@pytest.mark.parametrize("precision, error", [(8, 0.02), (32, 1e-6)])
def test_rounded_activations_are_close(precision, error):
    x = torch.randn(5, 7, 100)
    assert (references.round_activations(x, precision) - x).norm() <= error * x.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", [(97, 513), (416, 1100), (1600, 40)])
def test_a_row_has_the_same_bits_in_passes_of_any_width(outputs, inputs, bits, precision):
    torch.manual_seed(0)
    packed, x, bias = blocks.pack(torch.randn(outputs, inputs), bits), torch.randn(60, inputs), torch.randn(outputs)
    multiply = torch.ops.outrider.linear
    alone = torch.cat([multiply(row[None], packed, bias, outputs, precision) for row in x])
    for rows in range(1, 61):
        assert torch.equal(multiply(x[:rows], packed, bias, outputs, precision), alone[:rows]), rows
        assert torch.equal(multiply(x[60 - rows :], packed, bias, outputs, precision), alone[60 - rows :]), rows


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("kind", [*native.CODES4, "5", "6", "5 symmetric", "6 symmetric", "7", "8 symmetric"])
def test_the_largest_sums_of_integers_are_exact(kind, group):
    """Sums of products of the extreme numbers and activations, of equal and of alternating signs: none leaves 16 or 32 bits."""
    inputs = 96
    is_table, bits, is_symmetric = kind in native.CODES4, 4 if kind in native.CODES4 else int(kind[0]), "symmetric" in kind
    middle = 1 << bits - 1 if is_symmetric else 0
    table = torch.tensor(native.CODES4[kind]) if is_table else torch.arange(1 << bits) - middle
    ends = torch.tensor([table.argmin(), table.argmax(), int(table.abs().argmin())])
    codes = ends[torch.randint(3, (40, inputs))].to(torch.uint8)
    codes[0], codes[1], codes[2, ::2], codes[2, 1::2] = ends[0], ends[1], ends[0], ends[1]
    named = {"kind": kind} if is_table else {"zeros": middle} if is_symmetric else {}
    packed = blocks.pack_codes(codes, bits, torch.ones(40, inputs // group), group=group, **named)
    # The scale of their codes is 1.
    x = 127.0 * torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]]).repeat(5, inputs // 2)
    expected = x.double() @ (table[codes.long()].double() * blocks.UNITS.get(kind, 1)).T
    for precision in PRECISIONS:
        for rows in (1, 5, 12, 20):
            got = torch.ops.outrider.linear(x[:rows], packed, None, 40, precision)
            assert torch.equal(got.double(), expected[:rows]), (precision, rows)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_reads_the_rows_of_a_weight_in_blocks(bits):
    packed, ids = blocks.pack(torch.randn(70, 100), bits), torch.tensor([[3, 69, 0], [40, 3, 31]])
    expected = blocks.unpack(packed, 70, 100)[ids]
    assert torch.equal(torch.ops.outrider.embed(ids, packed, 100), expected)
    assert torch.equal(references.embed(ids, packed, 100), expected)
    with pytest.raises(IndexError, match="no token 96"):
        torch.ops.outrider.embed(torch.tensor([96]), packed, 100)


def test_unsupported_weights_and_inputs_of_another_size_are_rejected():
    packed = blocks.pack(torch.randn(64, 100), 8)
    with pytest.raises(RuntimeError, match="input of size 200, weight for 4 blocks of 32"):
        torch.ops.outrider.linear(torch.randn(2, 200), packed, None, 64, 32)
    with pytest.raises(RuntimeError, match="are not in blocks of 1088 bytes"):
        torch.ops.outrider.linear(torch.randn(2, 100), packed[..., :500].contiguous(), None, 64, 32)
    packed[:, 0] = len(blocks.CODES)
    with pytest.raises(RuntimeError, match="are in blocks of an unknown form"):
        torch.ops.outrider.linear(torch.randn(2, 100), packed, None, 64, 32)


# Codes of a checkpoint: bits, inputs per scale, what is added to a code, and the dtype of scales.
EXACT = [
    (4, 32, "none", torch.bfloat16),
    (4, 32, "middle", torch.float16),  # Q4_0 of GGUF, symmetric GPTQ
    (4, 32, "offsets", torch.float16),  # Q4_1
    (4, 32, "offsets", "products"),  # Q4_K
    (2, 16, "offsets", "products"),  # Q2_K
    (3, 16, "middle", "products"),  # Q3_K
    (4, 128, "zeros", torch.float16),  # GPTQ, AWQ
    (4, 64, "zeros", torch.float32),
    (8, 32, "middle", torch.float16),  # Q8_0
    (8, 128, "zeros", torch.bfloat16),
    (8, 32, "none", torch.float32),
    (8, 10_000, "zeros", torch.float32),  # one scale per output
    (6, 16, "middle", "products"),  # Q6_K
    (5, 32, "offsets", "products"),  # Q5_K
    (5, 16, "zeros", torch.float32),
    (5, 16, "offsets", torch.float16),
    (5, 32, "middle", torch.float16),  # Q5_0
    (5, 32, "offsets", torch.float16),  # Q5_1
    (6, 10_000, "none", torch.float32),
    (7, 32, "middle", torch.float16),
    (4, 32, "zeros", "products"),
]


def coded(outputs, inputs, bits, group, added, dtype, seed=0):
    """Return a weight in blocks, and its float32 values from a reference. "products" needs a multiple of 256 inputs."""
    torch.manual_seed(seed)
    if dtype == "products":
        inputs = -(-inputs // 256) * 256
    groups = max(1, -(-inputs // group)) if group < inputs else 1
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    if dtype == "products":
        made = [torch.randint(-64, 64, (outputs, groups), dtype=torch.int8) for _ in range(2)]
        bases = [torch.randn(outputs, inputs // 256).half() / 50 for _ in range(2)]
        scales, offsets = (blocks.Products(*pair) for pair in zip(made, bases, strict=True))
    else:
        scales, offsets = torch.randn(outputs, groups).to(dtype).float(), 4 * torch.randn(outputs, groups)
    zeros = (
        torch.randint(0, 1 << bits, (outputs, groups)) if added == "zeros" else torch.full((outputs, groups), 1 << (bits - 1))
    )

    def each(numbers):
        if isinstance(numbers, blocks.Products):
            return each(numbers.factors.float()) * numbers.bases.float().repeat_interleave(256, 1)
        return numbers.repeat_interleave(group, 1)[:, :inputs] if groups > 1 else numbers.expand(-1, inputs)

    given = {"none": {}, "offsets": {"offsets": offsets}}.get(added, {"zeros": zeros})
    packed = blocks.pack_codes(codes, bits, scales, group=group, **given)
    if "zeros" in given:
        return packed, each(scales) * (codes.float() - each(zeros))
    return packed, each(scales) * codes.float() + (each(offsets) if given else 0)


@pytest.mark.parametrize("bits, group, added, dtype", EXACT)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (31, 7), (97, 513), (70, 1024)])
def test_codes_of_a_checkpoint_keep_their_values_bit_for_bit(outputs, inputs, bits, group, added, dtype):
    packed, values = coded(outputs, inputs, bits, group, added, dtype)
    inputs = values.shape[1]
    assert torch.equal(blocks.unpack(packed, outputs, inputs), values)
    ids = torch.arange(outputs)
    assert torch.equal(torch.ops.outrider.embed(ids, packed, inputs), values)
    assert torch.equal(references.embed(ids, packed, inputs), values)
    identity = torch.ops.outrider.linear(torch.eye(inputs), packed, None, outputs, 32)
    assert torch.equal(identity, values.T)  # one product and zeros, which is exact in float32
    assert blocks.bits_of(packed) == (4 if bits <= 4 else 6 if bits <= 6 else 8)
    assert blocks.shape_of(packed) == (-(-outputs // 32) * 32, -(-inputs // 32) * 32)


@pytest.mark.parametrize("bits, group, added, dtype", EXACT)
@pytest.mark.parametrize("width", [4, 8])
def test_blocks_are_rounded_like_the_weight_that_they_hold(width, bits, group, added, dtype):
    packed, _ = coded(97, 513, bits, group, added, dtype)
    weight = blocks.unpack(packed, *blocks.shape_of(packed))
    assert torch.equal(blocks.repack(packed, width), blocks.pack(weight, width))


def test_scales_use_the_smallest_sufficient_dtype():
    sizes = {
        (8, "middle", torch.float16): 34,
        (4, "middle", torch.float16): 18,
        (4, "middle", torch.bfloat16): 18,
        (4, "zeros", torch.float16): 19,
        (4, "offsets", torch.float32): 24,
        (4, "offsets", "products"): 18.5,
        (6, "middle", "products"): 25.25,
        (5, "offsets", torch.float32): 32,
    }
    for (bits, added, dtype), expected in sizes.items():
        packed, _ = coded(32, 256, bits, 32, added, dtype)
        assert packed.nbytes == blocks.HEADER + 8 * 32 * expected, (bits, added, dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits, group, added, dtype", EXACT)
def test_the_operator_computes_with_the_values_of_the_codes(bits, group, added, dtype, precision):
    packed, values = coded(97, 513, bits, group, added, dtype)
    x, bias = torch.randn(2, 20, values.shape[1]), torch.randn(97)
    x[0, 3], x[1, 2] = 0, 1000 * x[1, 2]
    got = torch.ops.outrider.linear(x, packed, bias, 97, precision)
    exact = references.round_activations(x, precision).double() @ values.double().T + bias.double()
    # Numbers and offsets are summed separately, so the error is relative to both.
    largest = values.abs() + (values.abs().amax(1, keepdim=True) if added in ("offsets", "zeros") else 0)
    assert ((got.double() - exact).abs() <= 1e-5 * (x.double().abs() @ largest.double().T).clamp_min(1)).all()
    reference = references.linear(x, packed, bias, 97, precision)
    assert ((reference.double() - exact).abs() <= 1e-5 * (x.double().abs() @ largest.double().T).clamp_min(1)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits, group, added, dtype", EXACT)
def test_a_row_of_exact_codes_has_the_same_bits_in_passes_of_any_width(bits, group, added, dtype, precision):
    packed, values = coded(97, 1100, bits, group, added, dtype)
    x, multiply = torch.randn(40, values.shape[1]), torch.ops.outrider.linear
    alone = torch.cat([multiply(row[None], packed, None, 97, precision) for row in x])
    for rows in (*range(1, 27), 40):
        assert torch.equal(multiply(x[:rows], packed, None, 97, precision), alone[:rows]), rows
        assert torch.equal(multiply(x[40 - rows :], packed, None, 97, precision), alone[40 - rows :]), rows


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_are_no_numbers_stay_visible(bits, number):
    """Rounded to an integer they would be plausible."""
    weight = torch.randn(40, 96)
    weight[3, 40] = number
    found = blocks.unpack(blocks.pack(weight, bits), 40, 96)
    assert found[3, 32:64].isnan().any()
    assert found[3, :32].isfinite().all() and found[:3].isfinite().all() and found[4:].isfinite().all()
    out = torch.ops.outrider.linear(torch.randn(2, 96), blocks.pack(weight, bits), None, 40, PRECISIONS[0])
    assert out[:, 3].isnan().all() and out[:, 4:].isfinite().all()


def test_codes_without_an_exact_representation_are_rejected():
    codes, scales = torch.full((32, 64), 200, dtype=torch.uint8), torch.ones(32, 2)
    for match, given in (
        ("unsupported group of 24 inputs", {"group": 24}),
        ("codes above 127 with offsets", {"group": 32, "offsets": scales}),
        ("expected integers up to 255", {"group": 32, "zeros": scales * 256}),
        ("expected integers up to 255", {"group": 32, "zeros": scales * 7.5}),
    ):
        with pytest.raises(OutriderError, match=match):
            blocks.pack_codes(codes, 8, scales, **given)
    for number in (torch.nan, torch.inf):
        with pytest.raises(OutriderError, match="scales are NaN or infinite"):
            blocks.pack_codes(codes, 8, scales * number, group=32)
        with pytest.raises(OutriderError, match="offsets are NaN or infinite"):
            blocks.pack_codes(codes // 2, 8, scales, scales * number, group=32)
    products = blocks.Products(torch.ones(32, 2, dtype=torch.int8), torch.ones(32, 1).half())
    with pytest.raises(OutriderError, match="unsupported products of 64 inputs: expected a multiple of 256"):
        blocks.pack_codes(codes, 8, products, group=32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("activation", references.GATES)
def test_gates_are_computed_with_their_layer(activation, bits, precision):
    packed = coded(192, 700, 6, 16, "middle", torch.float16)[0] if bits == 6 else blocks.pack(torch.randn(192, 700), bits)
    x = torch.randn(3, 11, 700) / (200 if bits == 6 else 8)
    gated = torch.ops.outrider.linear_gated
    got = gated(x, packed, activation, precision)
    gate, up = torch.ops.outrider.linear(x, packed, None, 192, precision).double().chunk(2, -1)
    torch.testing.assert_close(got.double(), references.GATES[activation](gate) * up, rtol=3e-6, atol=3e-5)
    for rows in (1, 6, 12, 13):  # the same bits in any pass
        assert torch.equal(gated(x.flatten(0, 1)[:rows], packed, activation, precision), got.flatten(0, 1)[:rows]), rows
    assert gated(x.bfloat16(), packed, activation, precision).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="no activation relu"):
        gated(x, packed, "relu", precision)
    with pytest.raises(RuntimeError, match="5 panels: expected an even number"):
        gated(x, packed[:5], activation, precision)
