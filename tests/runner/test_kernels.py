"""Operators compared with float64 arithmetic, and the guarantee of the C++ ones: a row's bits do not depend on the pass."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch.nn import functional

from outrider import native
from outrider.runner import kernels
from outrider.runner.linear import PackedLinear

from . import references

needs_kernels = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = pytest.param("cpu", marks=needs_kernels)
no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, no_cuda])


def linear(which, *inputs):
    return (torch.ops.outrider.linear if which == "cpu" else references.linear)(*inputs, 32)


def attend(which, *inputs):
    if which == "triton":
        return attend_in_triton(*inputs)
    return (torch.ops.outrider.attend if which == "cpu" else kernels.reference_attend)(*inputs)


def attend_in_triton(*inputs):
    """Run the kernels for GPUs, and write the caches back."""
    moved = [each.cuda() if isinstance(each, torch.Tensor) else each for each in inputs]
    out = torch.ops.outrider.attend(*moved)
    for given, changed in zip(inputs[3:5], moved[3:5], strict=True):
        given.copy_(changed)
    return out.cpu()


@pytest.mark.parametrize("outputs, inputs", [(1, 1), (31, 7), (32, 33), (97, 513), (200, 1030), (416, 64)])
def test_packing_is_lossless(outputs, inputs):
    weight = torch.randn(outputs, inputs)
    packed = kernels.pack_weight(weight)
    assert packed.shape == (math.ceil(outputs / 32), inputs, 32)
    assert torch.equal(kernels.unpack_weight(packed, outputs), weight)


@pytest.mark.parametrize("which", [CPU, "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (31, 7), (32, 33), (97, 513), (200, 1030), (416, 64)])
def test_linear_is_exact_to_float32(which, dtype, outputs, inputs):
    torch.manual_seed(outputs)
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(40, inputs)
    packed = kernels.pack_weight(weight)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 40):
        for bias in (None, torch.randn(outputs)):
            expected = x[:rows].double() @ weight.double().T + (0 if bias is None else bias.double())
            got = linear(which, x[:rows], packed, bias, outputs)
            assert got.dtype == torch.float32
            assert got.shape == expected.shape
            assert (got - expected).abs().max() < 2e-6 * inputs**0.5 * 4
    deep = linear(which, x.view(2, 5, 4, inputs), packed, None, outputs)
    assert torch.equal(deep, linear(which, x, packed, None, outputs).view(2, 5, 4, outputs))


@pytest.mark.parametrize("which", [CPU, "reference"])
def test_linear_takes_strided_16_bit_and_empty_inputs(which):
    weight = torch.randn(40, 24).bfloat16()
    packed, x = kernels.pack_weight(weight), torch.randn(24, 6).T
    torch.testing.assert_close(linear(which, x, packed, None, 40), x @ weight.float().T, rtol=1e-5, atol=1e-5)
    half = linear(which, x.bfloat16(), packed, None, 40)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), x.bfloat16().float() @ weight.float().T, rtol=1e-2, atol=1e-2)
    assert linear(which, torch.empty(0, 24), packed, None, 40).shape == (0, 40)


@needs_kernels
def test_linear_rejects_an_input_of_another_size():
    with pytest.raises(RuntimeError, match="input of size 5"):
        torch.ops.outrider.linear(torch.zeros(2, 5), kernels.pack_weight(torch.zeros(8, 6)), None, 8, 32)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(97, 513), (416, 1100), (1600, 40)])
def test_a_row_of_linear_has_the_same_bits_in_passes_of_any_width(dtype, outputs, inputs):
    torch.manual_seed(0)
    packed, x, bias = kernels.pack_weight(torch.randn(outputs, inputs).to(dtype)), torch.randn(40, inputs), torch.randn(outputs)
    alone = torch.cat([torch.ops.outrider.linear(row[None], packed, bias, outputs, 32) for row in x])
    for rows in range(1, 41):
        assert torch.equal(torch.ops.outrider.linear(x[:rows], packed, bias, outputs, 32), alone[:rows]), rows
        assert torch.equal(torch.ops.outrider.linear(x[40 - rows :], packed, bias, outputs, 32), alone[40 - rows :]), rows


needs_pairs = pytest.mark.skipif(not kernels.has_fast_bfloat16(), reason="neither matrix units (AMX) nor AVX-512 BF16")
IN_PAIRS = pytest.param("cpu", marks=needs_pairs)
PAIRS = [(32, 32), (97, 64), (40, 512), (200, 1056), (416, 96)]  # depths of 1, 2, 16, 33 and 3 tiles


@needs_kernels
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_eight_rows_are_as_fast_as_torch(bits):
    """A kernel that fails this is broken: with AVX2, torch's float32 product takes more than twice as long."""
    weight, x = torch.randn(4096, 1024), torch.randn(8, 1024)
    layer = PackedLinear.of(weight if bits else weight.bfloat16(), None, bits)
    products = {"outrider": lambda: layer(x), "torch": lambda: functional.linear(x, weight)}
    seconds = dict.fromkeys(products, math.inf)
    for _ in range(20):
        for name, product in products.items():
            started = time.perf_counter()
            product()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    assert seconds["outrider"] < seconds["torch"]


@pytest.mark.parametrize("outputs, inputs", PAIRS)
def test_packing_in_pairs_is_lossless(outputs, inputs):
    weight = torch.randn(outputs, inputs).bfloat16()
    packed = kernels.pack_weight(weight, in_pairs=True)
    assert packed.shape == (math.ceil(outputs / 32), inputs // 2, 32, 2) and kernels.is_interleaved(packed)
    assert torch.equal(kernels.unpack_weight(packed, outputs), weight)


@pytest.mark.parametrize("which", [IN_PAIRS, "reference"])
@pytest.mark.parametrize("outputs, inputs", PAIRS)
def test_weights_in_pairs_multiply_rounded_inputs_and_add_in_float32(which, outputs, inputs):
    torch.manual_seed(outputs)
    weight, x, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(2, 35, inputs), torch.randn(outputs)
    packed = kernels.pack_weight(weight, in_pairs=True)
    expected = x.bfloat16().double() @ weight.double().T + bias.double()
    got = linear(which, x, packed, bias, outputs)
    assert got.dtype == torch.float32 and (got - expected).abs().max() < 2e-6 * inputs**0.5 * 4
    assert linear(which, x[:, :0], packed, bias, outputs).shape == (2, 0, outputs)


@needs_pairs
@pytest.mark.parametrize("outputs, inputs", PAIRS)
def test_weights_in_pairs_give_a_row_the_same_bits_in_passes_of_any_width(outputs, inputs):
    torch.manual_seed(0)
    packed = kernels.pack_weight(torch.randn(outputs, inputs).bfloat16(), in_pairs=True)
    x, bias = torch.randn(100, inputs), torch.randn(outputs)
    alone = torch.cat([torch.ops.outrider.linear(row[None], packed, bias, outputs, 32) for row in x])
    for rows in range(1, 101):
        assert torch.equal(torch.ops.outrider.linear(x[:rows], packed, bias, outputs, 32), alone[:rows]), rows
        assert torch.equal(torch.ops.outrider.linear(x[100 - rows :], packed, bias, outputs, 32), alone[100 - rows :]), rows


@needs_pairs
@pytest.mark.parametrize("inputs", [2048, 2080, 6048])
def test_more_rows_than_fit_the_cache_have_the_same_bits(inputs):
    """256 rows at once, and 64 tiles of inputs (2048) at a time: intermediate sums are stored in the output."""
    packed, x = kernels.pack_weight(torch.randn(96, inputs).bfloat16(), in_pairs=True), torch.randn(600, inputs)
    together = torch.ops.outrider.linear(x, packed, None, 96, 32)
    alone = torch.cat([torch.ops.outrider.linear(row[None], packed, None, 96, 32) for row in x])
    assert torch.equal(together, alone)
    assert torch.equal(torch.ops.outrider.linear(x[:130], packed, None, 96, 32), alone[:130])


@needs_pairs
def test_layers_multiply_in_bfloat16_if_that_is_faster():
    assert kernels.can_use_bfloat16_products(torch.zeros(40, 64).bfloat16())
    assert not kernels.can_use_bfloat16_products(torch.zeros(40, 48).bfloat16())  # tiles are 32 inputs deep
    assert not kernels.can_use_bfloat16_products(torch.zeros(40, 64).half())
    with pytest.raises(RuntimeError, match="does not multiply weights packed so"):
        torch.ops.outrider.linear(torch.zeros(1, 64), kernels.pack_weight(torch.zeros(40, 64), in_pairs=True), None, 40, 32)


@pytest.mark.parametrize("which", [CPU, "reference"])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_an_embedding_reads_the_rows_of_a_packed_weight(which, in_pairs):
    weight, ids = torch.randn(70, 64).bfloat16(), torch.tensor([[3, 69, 0], [40, 3, 31]])
    packed = kernels.pack_weight(weight, in_pairs)
    got = (torch.ops.outrider.embed if which == "cpu" else references.embed)(ids, packed, 64)
    assert torch.equal(got, weight[ids].float())


def flat(tensor, lens):
    """Flatten [B, H, W, D] to [1, H, T, D]: the first ``lens[b]`` tokens of each request, concatenated."""
    return torch.cat([each[:, :length] for each, length in zip(tensor, lens, strict=True)], 1)[None]


class Pass:
    """Inputs of ``attend`` on a random cache whose unwritten slots are NaN. They are flattened when it is called."""

    def __init__(self, bases, width, kv_heads=2, dims=(24, 24), capacity=75, dtype=torch.float32):
        generator, heads = torch.Generator().manual_seed(0), 4
        self.bases, self.batch, self.width = list(bases), len(bases), width
        key_dim, value_dim = dims

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        self.query, self.key = randn(self.batch, heads, width, key_dim), randn(self.batch, kv_heads, width, key_dim)
        self.value = randn(self.batch, kv_heads, width, value_dim)
        self.sinks = 2 * randn(heads)
        rows = self.batch + 2
        self.keys = torch.full((2, rows, kv_heads, capacity, key_dim), math.nan, dtype=dtype)
        self.values = torch.full((2, rows, kv_heads, capacity, value_dim), math.nan, dtype=dtype)
        self.cache_rows = torch.randperm(rows, generator=generator)[: self.batch]
        for row, base in zip(self.cache_rows.tolist(), self.bases, strict=True):
            self.keys[:, row, :, :base] = randn(2, kv_heads, base, key_dim).to(dtype)
            self.values[:, row, :, :base] = randn(2, kv_heads, base, value_dim).to(dtype)
        self.positions = torch.tensor(self.bases)[:, None] + torch.arange(width)
        self.visible = torch.ones(width, width, dtype=torch.bool).tril().repeat(self.batch, 1, 1)

    def branch(self):
        """Make the pass a tree: a root, two children, and two interleaved chains."""
        for node in range(1, self.width):
            path = [0, *range(2 - node % 2, node + 1, 2)]
            self.visible[:, node] = False
            self.visible[:, node, path] = True
            self.positions[:, node] = torch.tensor(self.bases) + len(path) - 1
        return self

    def deep_first(self):
        """Make the pass a tree: a root, a long chain, and then a second chain."""
        half = self.width // 2
        for node in range(half + 1, self.width):
            self.visible[:, node, 1 : half + 1] = False
            self.positions[:, node] -= half
        return self

    def run(  # noqa: PLR0913
        self, which, rows=None, span=None, lens=None, scale=0.3, softcap=0.0, window=0, chunk=0, sinks=False, layer=1
    ):
        """Run the operator on a copy of the cache -> [B, W, H, D], zero where a request has no token.

        ``rows``: rows of the batch; ``span``: use only the first tokens of the pass; ``lens``: tokens of each request.
        """
        at, upto = (list(range(self.batch)) if rows is None else rows), slice(0, span)
        lens = lens or [span or self.width] * len(at)
        self.after = (self.keys.clone(), self.values.clone())
        inputs = [*(flat(x[at], lens) for x in (self.query, self.key, self.value)), *self.after, layer]
        positions = flat(self.positions[at][:, None, :, None], lens)[:, 0, :, 0]
        inputs += [self.cache_rows[at], torch.tensor(self.bases)[at], torch.tensor(lens).cumsum(0), positions]
        out = attend(which, *inputs, self.visible[at, upto, upto], scale, softcap, window, chunk, self.sinks if sinks else None)
        assert out.shape == (1, sum(lens), self.query.shape[1], self.value.shape[3])
        return torch.nn.utils.rnn.pad_sequence(out[0].split(lens), batch_first=True)

    def expected(self, scale=0.3, softcap=0.0, window=0, chunk=0, sinks=False, layer=1, rounded=False):
        """Compute one query at a time in float64.

        ``rounded``: round queries and weights to bfloat16, as products of pairs do.
        """
        read = (lambda x: x.bfloat16().double()) if rounded else torch.Tensor.double
        heads, group = self.query.shape[1], self.query.shape[1] // self.key.shape[1]
        out = torch.empty(self.batch, self.width, heads, self.value.shape[3], dtype=torch.float64)
        for b, row in enumerate(self.cache_rows.tolist()):
            for w in range(self.width):
                own = [j for j in range(self.width) if self.visible[b, w, j]]
                places = [*range(self.bases[b]), *(int(self.positions[b, j]) for j in own)]
                at = int(self.positions[b, w])
                near = [i for i, place in enumerate(places) if not window or at - place < window]
                near = [i for i in near if not chunk or at // chunk == places[i] // chunk]
                for h in range(heads):
                    kv, base = h // group, self.bases[b]
                    keys = torch.cat([self.keys[layer, row, kv, :base], self.key[b, kv, own].to(self.keys.dtype)])
                    values = torch.cat([self.values[layer, row, kv, :base], self.value[b, kv, own].to(self.keys.dtype)])
                    scores = keys.double()[near] @ read(self.query[b, h, w]) * scale
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    sink = self.sinks[h].double() if sinks else torch.tensor(-math.inf)
                    most = max(scores.max(), sink)
                    weights = (scores - most).exp()
                    out[b, w, h] = read(weights) @ values.double()[near] / (weights.sum() + (sink - most).exp())
        return out


def rounds(dtype, key_dim, value_dim):
    """Return whether attention rounds queries and weights: with matrix units, or products of pairs."""
    if not kernels.has_fast_bfloat16():
        return False
    side = 16 if torch.ops.outrider.has_matrix_units() else 32
    return dtype == torch.bfloat16 and key_dim % 32 == 0 and value_dim % side == 0


def assert_close_but_for_rounding(got, expected):
    """A few weights in a thousand round to the neighbouring bfloat16 with another order of additions."""
    off = (got.double() - expected).abs()
    assert off.median() < 1e-6 and off.quantile(0.99) < 1e-4 and off.max() < 5e-3


OPTIONS = [
    {},
    {"window": 5},
    {"window": 30},
    {"softcap": 1.5},
    {"softcap": 1.5, "window": 9},
    {"chunk": 8},
    {"chunk": 30},
    {"sinks": True},
    {"sinks": True, "window": 9},
    {"sinks": True, "softcap": 1.5, "chunk": 16},
]
SHAPES = {
    "grouped heads": {},
    "one kv head": {"kv_heads": 1},
    "a head each": {"kv_heads": 4},
    "64": {"dims": (64, 64)},
    "128": {"dims": (128, 128)},
    "uneven": {"dims": (32, 80)},
    "odd": {"dims": (7, 19)},
    "latent": {"dims": (24, 16)},
    "full cache": {"capacity": 48},
}


@pytest.mark.parametrize("which", [CPU, "reference", TRITON])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attend_equals_softmax_attention_over_visible_slots(which, dtype, shape):
    for make in (lambda p: p, Pass.branch):
        there = make(Pass([40, 0, 17], 7, dtype=dtype, **({"capacity": 47} if shape == "full cache" else SHAPES[shape])))
        for options in OPTIONS:
            got = there.run(which, **options)
            assert torch.isfinite(got).all()
            if which == "cpu" and rounds(dtype, there.query.shape[3], there.value.shape[3]):
                assert_close_but_for_rounding(got, there.expected(**options, rounded=True))
            else:
                torch.testing.assert_close(got.double(), there.expected(**options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", [CPU, "reference", TRITON])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_window_starts_at_each_nodes_position_for_any_order_of_a_tree(which, kind):
    there = Pass([40, 0, 17], 19, kv_heads=1).deep_first()
    for size in (3, 5, 9):
        torch.testing.assert_close(
            there.run(which, **{kind: size}).double(), there.expected(**{kind: size}), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("which", [CPU, "reference", TRITON])
@pytest.mark.parametrize("lens", [[7, 1, 4], [1, 7, 1], [2, 3, 7]])
def test_requests_of_different_lengths_are_concatenated(which, lens):
    for make in (lambda p: p, Pass.branch):
        there = make(Pass([40, 0, 17], 7))
        for options in ({}, {"window": 5}, {"softcap": 1.5, "window": 9}, {"sinks": True, "chunk": 16}):
            got, expected = there.run(which, lens=lens, **options), there.expected(**options)
            for b, length in enumerate(lens):
                torch.testing.assert_close(got[b, :length].double(), expected[b, :length], rtol=1e-4, atol=1e-5)
                row, base = there.cache_rows[b], there.bases[b]
                assert torch.isfinite(there.after[0][1, row, :, : base + length]).all()
                assert torch.isnan(there.after[0][1, row, :, base + length :]).all()  # and no slot after them is written
            needed = max(map(sum, zip(there.bases, lens, strict=True)))
            tight = make(Pass([40, 0, 17], 7))
            tight.keys, tight.values = tight.keys[:, :, :, :needed].contiguous(), tight.values[:, :, :, :needed].contiguous()
            torch.testing.assert_close(tight.run(which, lens=lens, **options), got, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_attend_of_no_tokens_is_empty():
    assert Pass([40, 17], 0).run("cpu", lens=[0, 0]).shape == (2, 0, 4, 24)


@pytest.mark.parametrize("which", [CPU, "reference", TRITON])
def test_attend_writes_only_the_slots_of_its_rows_and_layer(which):
    there = Pass([40, 0, 17], 5, dtype=torch.bfloat16)
    there.run(which)
    for before, after, new in zip((there.keys, there.values), there.after, (there.key, there.value), strict=True):
        expected = before.clone()
        for b, row in enumerate(there.cache_rows.tolist()):
            expected[1, row, :, there.bases[b] : there.bases[b] + 5] = new[b].bfloat16()
        assert torch.equal(after.view(torch.int16), expected.view(torch.int16))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(24, 24), (64, 64), (128, 128), (32, 80), (7, 19)])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_requests_attention_has_the_same_bits_in_any_batch_width_and_cache(dtype, dims, options):
    there = Pass([40, 0, 17], 9, dims=dims, dtype=dtype)
    together = there.run("cpu", **options)
    for b in range(3):
        assert torch.equal(there.run("cpu", rows=[b], **options), together[b : b + 1])
    for span in range(1, 9):
        assert torch.equal(there.run("cpu", span=span, **options), together[:, :span])
    ragged = there.run("cpu", lens=[9, 2, 5], **options)
    assert all([torch.equal(ragged[b, :length], together[b, :length]) for b, length in enumerate([9, 2, 5])])
    short = Pass([40, 0, 17], 9, dims=dims, dtype=dtype)
    short.keys, short.values = there.keys[:, :, :, :41].contiguous(), there.values[:, :, :, :41].contiguous()
    ragged = short.run("cpu", lens=[1, 9, 5], **options)
    assert all([torch.equal(ragged[b, :length], together[b, :length]) for b, length in enumerate([1, 9, 5])])
    tight = Pass([40, 0, 17], 9, dims=dims, dtype=dtype, capacity=75)
    tight.keys, tight.values = there.keys[:, :, :, :49].contiguous(), there.values[:, :, :, :49].contiguous()
    assert torch.equal(tight.run("cpu", **options), together)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [Pass.branch, Pass.deep_first])
def test_a_node_of_a_tree_has_the_same_bits_as_in_a_chain(make, dtype, shape):
    for width in (7, 19, 40):
        there = make(Pass([40, 0, 17], width, dtype=dtype, **SHAPES[shape] | {"capacity": 80}))
        for options in ({}, {"window": 9}, {"softcap": 1.5}, {"chunk": 16}, {"sinks": True}):
            tree = there.run("cpu", **options)
            for node in range(width):
                path = there.visible[0, node].nonzero().flatten()
                chain = Pass([40, 0, 17], len(path), dtype=dtype, **SHAPES[shape] | {"capacity": 80})
                chain.keys, chain.values, chain.cache_rows = there.keys, there.values, there.cache_rows
                chain.sinks = there.sinks
                chain.query, chain.key, chain.value = (each[:, :, path] for each in (there.query, there.key, there.value))
                assert torch.equal(chain.run("cpu", **options)[:, -1], tree[:, node]), (width, node, options)


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"window": 300}, {"chunk": 256}, {"sinks": True, "window": 300}])
def test_long_sequences_have_the_same_bits_and_correct_values(options):
    """Matrix units process values in blocks of 256 slots, products of pairs in blocks of 32; both in blocks of 64 queries."""
    there = Pass([530, 250, 0], 40, dims=(64, 64), dtype=torch.bfloat16, capacity=600)
    together = there.run("cpu", **options)
    for span in (1, 6, 16, 17, 33):
        assert torch.equal(there.run("cpu", span=span, **options), together[:, :span]), span
    for b in range(3):
        assert torch.equal(there.run("cpu", rows=[b], **options), together[b : b + 1])
    rounded = rounds(torch.bfloat16, 64, 64)
    assert_close_but_for_rounding(together, there.expected(**options, rounded=rounded))


@needs_kernels
@pytest.mark.parametrize("window", [0, 3, 12])
@pytest.mark.parametrize("kind", [{}, {"dims": (64, 64), "dtype": torch.bfloat16}])
def test_a_token_has_the_same_bits_as_a_draft_and_after_its_commit(window, kind):
    wide = Pass([21], 8, **kind)
    together = wide.run("cpu", window=window)
    narrow = Pass([21], 8, **kind)
    narrow.keys, narrow.values = wide.after
    for at in range(8):
        inputs = [x[:, :, at : at + 1] for x in (wide.query, wide.key, wide.value)]
        where = [narrow.cache_rows, torch.tensor([21 + at]), torch.tensor([1]), torch.tensor([[21 + at]])]
        where += [torch.ones(1, 1, 1, dtype=torch.bool)]
        out = torch.ops.outrider.attend(*inputs, *wide.after, 1, *where, 0.3, 0.0, window)
        assert torch.equal(out, together[:, at : at + 1]), at


@needs_kernels
@pytest.mark.parametrize("kind", [{"kv_heads": 1}, {"kv_heads": 1, "dims": (64, 64), "dtype": torch.bfloat16}])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"window": 40}])
def test_a_token_has_the_same_bits_in_any_tile(kind, options):
    """Tiles, which threads take separately, have 8 or 16 tokens: a prompt in chunks that divide it elsewhere."""
    whole, parts = Pass([21], 50, **kind), Pass([21], 50, **kind)
    together, stores, done = whole.run("cpu", **options), (parts.keys, parts.values), []
    for first, last in ((0, 3), (3, 30), (30, 50)):
        width = last - first
        inputs = [x[:, :, first:last] for x in (whole.query, whole.key, whole.value)]
        where = [parts.cache_rows, torch.tensor([21 + first]), torch.tensor([width]), whole.positions[:, first:last]]
        where += [whole.visible[:, first:last, first:last], 0.3, options.get("softcap", 0.0), options.get("window", 0)]
        done.append(torch.ops.outrider.attend(*inputs, *stores, 1, *where))
    assert torch.equal(torch.cat(done, 1), together)


@pytest.mark.parametrize("which", [CPU, "reference", TRITON])
@pytest.mark.parametrize("cap", [1.0, 1e-3])
def test_capped_scores_are_close_to_the_hyperbolic_tangent(which, cap):
    """Each request has a committed token of score 0 and its own of capped score x: the output is the weight of the latter."""
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([0.0, 0.6249999, 0.625, 1e-5, 50.0, 3e38, -3e38])])
    batch, dim = len(x), 32
    unit = functional.one_hot(torch.tensor(0), dim).float().expand(1, 1, batch, dim)
    stores = (torch.zeros(1, batch, 1, 64, dim), torch.zeros(1, batch, 1, 64, dim))
    where = [torch.arange(batch), torch.ones(batch, dtype=torch.long), torch.arange(1, batch + 1)]
    where += [torch.ones(1, batch, dtype=torch.long), torch.ones(batch, 1, 1, dtype=torch.bool)]
    out = attend(which, x.view(-1, 1) * unit, unit, unit, *stores, 0, *where, 1.0, cap, 0)[0, :, 0, 0]
    assert (out.double().logit() - cap * (x.double() / cap).tanh()).abs().max() < 2e-6


@pytest.mark.parametrize("which", [CPU, "reference", TRITON])
@pytest.mark.parametrize("window", [0, 30])
def test_a_tree_in_several_passes_equals_a_tree_in_one(which, window):
    """Visibility may refer to slots of earlier passes, because trees are drafted level by level."""
    whole = Pass([21, 5], 9).branch()
    together, parts = whole.run(which, window=window), Pass([21, 5], 9).branch()
    stores, done = (parts.keys, parts.values), []
    for first, last in ((0, 1), (1, 4), (4, 9)):
        width = last - first
        inputs = [flat(x[:, :, first:last], [width] * 2) for x in (whole.query, whole.key, whole.value)]
        where = [parts.cache_rows, torch.tensor([21, 5]) + first, torch.tensor([width, 2 * width])]
        where += [whole.positions[:, first:last].reshape(1, -1), whole.visible[:, first:last, :last]]
        done.append(attend(which, *inputs, *stores, 1, *where, 0.3, 0.0, window).view(2, width, 4, -1))
    torch.testing.assert_close(torch.cat(done, 1), together, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_attend_rejects_a_pass_beyond_the_cache():
    with pytest.raises(RuntimeError, match="request 0 does not fit the cache: base 70, "):
        Pass([70], 9, capacity=75).run("cpu")
