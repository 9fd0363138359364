"""Weights in blocks of 32 inputs x 32 outputs with codes of 8, 6 or 4 bits, and how weights are packed.

A weight is scale * number(code) + offset, or scale * (number(code) - zero); 32 or 16 inputs of one output share a scale.
``Form`` describes the blocks of a weight. Two functions create them:

- ``pack`` rounds a weight to 8 or 4 bits. Rounding needs no data: 8-bit codes are integers; 4-bit codes index a table of 16
  values that is denser around 0, where most weights are (llama.cpp's IQ4_NL has the idea; the integers are smaller here, so
  that AVX2 adds two products in 16 bits), and the scale with the least squared error is searched for each block.
- ``pack_codes`` takes the codes, scales and offsets of a quantised checkpoint and keeps its values exactly.

``native/blocks.cpp`` describes the layout of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from outrider import native
from outrider.runner import huge_pages
from outrider.runner.kernels import PANEL
from outrider.types import OutriderError

BLOCK = 32  # inputs of an output in a block
HEADER = 64  # bytes at the start of a packed weight's panel; the form comes first
SPAN = 256  # inputs that share a base
CODES = ("int8", "int6", *native.CODES4)  # meaning of codes: integers, or indices into a table of values
UNITS = {"iq3_xxs": 1 / 4, "iq2": 1 / 8, "iq1": 1 / 8}  # fractions of the table's integers that are the numbers of these codes
NUMBERS = ("none", "bfloat16", "float16", "float32", "zeros", "products")  # storage formats of scales and offsets
WIDTHS = dict(zip(NUMBERS, (0, 2, 2, 4, 1, 1), strict=True))  # bytes per number
LARGEST_EXPONENT = 252  # of "float4" scales: 6 * 2^(252 - 127) is the largest value in float32


@dataclass(frozen=True)
class Form:
    """Format of blocks: one of ``CODES``, one of ``NUMBERS`` each for scales and offsets, and the scales per 32 inputs.

    ``lowest``: the lowest number of "int6" codes, which are numbers minus it. Offsets of kind "zeros" are integers,
    subtracted from the codes before scaling. Numbers of kind "products" are integers times a float16 base; each output has
    one base per 256 inputs, and the bases precede the blocks of a panel.
    """

    codes: str
    scales: str
    offsets: str = "none"
    groups: int = 1
    lowest: int = 0

    @property
    def bits(self) -> int:
        """Return the bits of a code."""
        return {"int8": 8, "int6": 6}.get(self.codes, 4)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block."""
        return PANEL * (BLOCK * self.bits // 8 + self.groups * (WIDTHS[self.scales] + WIDTHS[self.offsets]))

    @property
    def base_bytes(self) -> int:
        """Return the bytes of the bases of 256 inputs."""
        return 2 * PANEL * (self.scales, self.offsets).count("products")

    def panel_bytes(self, inputs: int) -> int:
        """Return the bytes of a panel of 32 outputs; ``inputs`` must be a multiple of 256 if the form has bases."""
        return HEADER + inputs // SPAN * self.base_bytes + -(-inputs // BLOCK) * self.block_bytes

    def header(self) -> Tensor:
        """Return uint8 [64], which ``form_of`` and the C++ read."""
        fields = (CODES.index(self.codes), NUMBERS.index(self.scales), NUMBERS.index(self.offsets), self.groups, self.lowest)
        return functional.pad(torch.tensor(fields, dtype=torch.int8), (0, HEADER - len(fields))).view(torch.uint8)


@dataclass(frozen=True)
class Products:
    """Scales or offsets as products: factors int8 [outputs, groups] times bases float16 [outputs, inputs / 256]."""

    factors: Tensor
    bases: Tensor


ROUNDED = {8: Form("int8", "bfloat16"), 4: Form("rounded4", "bfloat16")}  # forms of ``pack``, by bits


_is_exact = ContextVar("is_exact", default=False)


def activation_bits() -> int:
    """Return the activation bits of layers in blocks: 32 within ``exact_activations``, else the fastest on this CPU."""
    return 32 if _is_exact.get() else fastest_activation_bits()


@cache
def fastest_activation_bits() -> int:
    """Return the activation bits with which layers in blocks run fastest on this CPU: 8 (VNNI, AVX2) or 32."""
    return int(torch.ops.outrider.block_activation_bits()) if native.load() else 32


@contextmanager
def exact_activations() -> Iterator[None]:
    """Let layers in blocks multiply activations in float32 instead of rounding them, in this thread."""
    token = _is_exact.set(True)
    try:
        yield
    finally:
        _is_exact.reset(token)


def num_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of a weight [outputs, inputs] that is rounded to ``bits`` bits."""
    return -(-outputs // PANEL) * ROUNDED[bits].panel_bytes(inputs)


def pack(weight: Tensor, bits: int) -> Tensor:
    """Round [outputs, inputs] to blocks with codes of ``bits`` bits: uint8 [panels, bytes]. Needs the C++ operators."""
    outputs, inputs = weight.shape
    shape = (-(-outputs // PANEL), ROUNDED[bits].panel_bytes(inputs))
    if weight.is_meta:  # the packed weights will be read from a file
        return weight.new_empty(shape, dtype=torch.uint8)
    packed = huge_pages.empty(shape, torch.uint8)
    torch.ops.outrider.pack_blocks(weight, bits, packed)
    return packed


def repack(packed: Tensor, bits: int) -> Tensor:
    """Round a packed weight, of numbers or in blocks, to blocks with codes of ``bits`` bits. Needs the C++ operators."""
    inputs = shape_of(packed)[1]
    rounded = huge_pages.empty((len(packed), ROUNDED[bits].panel_bytes(inputs)), torch.uint8)
    torch.ops.outrider.repack_blocks(packed, inputs, bits, rounded)
    return rounded


def pack_codes(
    codes: Tensor,
    bits: int,
    scales: Tensor | Products,
    offsets: Tensor | Products | None = None,
    *,
    group: int,
    zeros: Tensor | int | None = None,
    kind: str | None = None,
) -> Tensor:
    """Pack the codes of a quantised weight into blocks that hold its values exactly: uint8 [panels, bytes].

    codes: uint8 [outputs, inputs], each below 2^bits, ``bits`` at most 8. scales, offsets or zeros: [outputs, groups] of
    ``group`` inputs each, a multiple of 16 or at least all inputs; zeros also one integer for all. A value is
    scale * code + offset, or scale * (code - zero) with integers as zeros, computed in float32 in this order. Scales and
    offsets are stored as ``Products`` if they are given so, else in the narrowest of bfloat16, float16 and float32 that holds
    them all. ``kind``: one of ``CODES`` if the codes are not integers. Needs the C++ operators.

    Raises ``OutriderError`` for groups of another size, for ``Products`` unless the inputs are a multiple of ``SPAN``, for
    numbers that are not finite, for codes above 127 with offsets, and for zeros that do not fit 8 bits.
    """
    outputs, inputs = codes.shape
    if group % 16 and group < inputs:
        raise OutriderError(f"unsupported group of {group} inputs: expected a multiple of 16")
    integers = None  # zeros of the kind's codes
    if kind is None:
        kind, codes, integers = _signed(codes, bits, zeros, has_offsets=offsets is not None)
    given = {"scales": scales, "offsets": integers if offsets is None else offsets}
    numbers = {name: each.factors if isinstance(each, Products) else each for name, each in given.items()}
    bases = [each.bases for each in given.values() if isinstance(each, Products)]
    for name, each in given.items():
        checked = each.bases if isinstance(each, Products) else each
        if checked is not None and not bool(torch.isfinite(checked).all()):
            raise OutriderError(f"{name} are NaN or infinite")
    kept = {name: "none" if each is None else _narrowest(each) for name, each in given.items()}
    is_symmetric = offsets is None and zeros is not None and integers is None
    lowest = -(1 << bits - 1) if kind == "int6" and is_symmetric else 0
    form = Form(kind, **kept, groups=2 if group % BLOCK and group < inputs else 1, lowest=lowest)
    if bases and inputs % SPAN:
        raise OutriderError(f"unsupported products of {inputs} inputs: expected a multiple of {SPAN}")
    panels = -(-outputs // PANEL)
    packed = huge_pages.empty((panels, form.panel_bytes(inputs)), torch.uint8)
    packed[0, :HEADER] = form.header()
    stored = [each if each is None else each.to(_dtype(kept[name])).contiguous() for name, each in numbers.items()]
    torch.ops.outrider.fill_blocks(codes.contiguous(), *stored, group, packed)
    if bases:
        missing = (0, 0, 0, panels * PANEL - outputs)
        transposed = [functional.pad(base, missing).view(panels, PANEL, -1).transpose(1, 2) for base in bases]
        start = HEADER + inputs // SPAN * form.base_bytes  # of the blocks
        packed[:, HEADER:start] = torch.cat(transposed, 2).contiguous().view(torch.uint8).flatten(1)
    return packed


def float4_scales(exponents: Tensor, what: str) -> Tensor:
    """Return the scales of "float4" codes whose E2M1 numbers are times 2^(exponent - 127); exponents uint8 of any shape.

    Raises ``OutriderError``, which begins with ``what``, for NaN and for scales whose largest value float32 cannot hold.
    """
    if not exponents.is_meta and bool((exponents > LARGEST_EXPONENT).any()):
        raise OutriderError(f"{what} contains NaN or exponents beyond float32")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)  # values of the codes are doubled


def _signed(codes: Tensor, bits: int, zeros: Tensor | int | None, has_offsets: bool) -> tuple[str, Tensor, Tensor | None]:
    """Return one of ``CODES``, codes of that kind as uint8, and zeros for them: int8, or None where all are 0."""
    kind, middle = "uint4" if bits <= 4 else "int6" if bits <= 6 else "int8", 1 << (bits - 1)
    if has_offsets or zeros is None:
        if bits == 8 and bool((codes > 127).any()):
            if has_offsets:
                raise OutriderError("codes above 127 with offsets are not supported")
            zeros = 0
        else:
            return kind, codes, None
    if isinstance(zeros, int):
        zeros = torch.full((len(codes), 1), zeros)
    if bool((zeros == middle).all()):  # symmetric: no zeros are needed for signed codes
        if kind == "int6":
            return kind, codes, None  # their lowest number has the sign
        return ("int4", codes + (8 - middle), None) if bits <= 4 else (kind, codes - middle, None)  # uint8 wraps around
    shift = 128 if bits == 8 else 0
    zeros = zeros.float() - shift
    if not torch.equal(zeros.to(torch.int8).float(), zeros):
        raise OutriderError(f"unsupported zeros of {bits}-bit codes: expected integers up to {127 + shift}")
    return kind, codes - shift, zeros.to(torch.int8)


def _narrowest(numbers: Tensor | Products) -> str:
    """Return the one of ``NUMBERS`` with the fewest bytes that holds these exactly."""
    if isinstance(numbers, Products):
        return "products"
    if numbers.dtype == torch.int8:
        return "zeros"
    fits = (name for name in ("bfloat16", "float16") if torch.equal(numbers.to(_dtype(name)).float(), numbers.float()))
    return next(fits, "float32")


def _dtype(numbers: str) -> torch.dtype:
    return torch.int8 if numbers in ("zeros", "products") else getattr(torch, numbers)


def is_blocks(packed: Tensor) -> bool:
    """Return whether a packed weight consists of blocks."""
    return packed.dtype == torch.uint8 and packed.dim() == 2


def form_of(packed: Tensor) -> Form:
    """Return the form of a weight in blocks."""
    codes, scales, offsets, groups, lowest = packed[0, :5].view(torch.int8).tolist()
    return Form(CODES[codes], NUMBERS[scales], NUMBERS[offsets], groups, lowest)


def shape_of(packed: Tensor) -> tuple[int, int]:
    """Return the outputs of a packed weight, with their padding to a multiple of 32, and its inputs, in blocks padded too."""
    if not is_blocks(packed):
        return packed.shape[0] * PANEL, packed.shape[1:].numel() // PANEL
    form = form_of(packed)
    per_block = form.block_bytes + form.base_bytes * BLOCK // SPAN
    return packed.shape[0] * PANEL, (packed.shape[1] - HEADER) // per_block * BLOCK


def bits_of(packed: Tensor) -> int:
    """Return the bits of each weight: 4, 6 or 8 in blocks, else those of its dtype."""
    return form_of(packed).bits if is_blocks(packed) else packed.dtype.itemsize * 8


def _numbers(words: Tensor, form: Form) -> Tensor:
    """Return the numbers of the codes in words uint8 [..., words, 32, 4] of blocks: [..., groups, 32, inputs of a group]."""
    if form.bits == 8:
        return words.view(torch.int8).float()
    if form.bits == 6:
        first, second, upper = words.unflatten(-3, (-1, 3)).unbind(-3)
        low = torch.cat([first & 15, first >> 4, second & 15, second >> 4], -1)
        return (low | torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], -1) << 4).float() + form.lowest
    table = torch.tensor(native.CODES4[form.codes], dtype=torch.float32, device=words.device)
    return table[torch.cat([words & 15, words >> 4], -1).long()] * UNITS.get(form.codes, 1)


def unpack(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """Decode a weight in blocks to [outputs, inputs] float32."""
    form, (rows, columns) = form_of(packed), shape_of(packed)
    panels, blocks = rows // PANEL, columns // BLOCK
    start = HEADER + columns // SPAN * form.base_bytes
    block = packed[:, start:].reshape(panels, blocks, form.block_bytes)
    size = PANEL * BLOCK * form.bits // 8
    words = block[..., :size].reshape(panels, blocks, -1, PANEL, 4)
    numbers = _numbers(words, form).permute(0, 1, 2, 4, 3).reshape(panels, blocks, form.groups, -1, PANEL)

    def stored(kind: str, at: int, base: int) -> Tensor:
        raw = block[..., at : at + form.groups * PANEL * WIDTHS[kind]].contiguous()
        found = raw.view(_dtype(kind)).float().view(panels, blocks, form.groups, 1, PANEL)
        if kind != "products":
            return found
        bases = packed[:, HEADER:start].reshape(panels, columns // SPAN, -1, 2 * PANEL)[:, :, base].contiguous()
        return found * bases.view(torch.float16).float().repeat_interleave(SPAN // BLOCK, 1)[:, :, None, None]

    scales, after = stored(form.scales, size, 0), size + form.groups * PANEL * WIDTHS[form.scales]
    offsets = None if form.offsets == "none" else stored(form.offsets, after, -1)
    if offsets is None:
        values = numbers * scales
    elif form.offsets == "zeros":
        values = (numbers - offsets) * scales
    else:
        values = numbers * scales + offsets
    return values.reshape(panels, blocks * BLOCK, PANEL).transpose(1, 2).reshape(-1, blocks * BLOCK)[:outputs, :inputs]
