"""Decode quantised tensors of GGUF files into codes, scales and offsets, which blocks hold exactly.

A row is a sequence of ggml's blocks of 32 or 256 weights. The layouts are those of ggml's ``ggml-common.h``; the values are
bit for bit those of ``gguf.quants.dequantize``, because products of these scales and codes are exact in float32.

In the formats with few bits (IQ1 to IQ3) a number in the file selects 4 or 8 weights: a row of a grid, which the package gguf
has. Blocks hold 4-bit codes of those weights: the place of the magnitude among the grid's, plus 8 for a negative sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from outrider.runner import blocks

CHUNK = 1 << 22  # weights decoded at a time; with 2^20, torch computes most steps on one core

# Codes [n, weights of a block], scales and, in some formats, offsets [n, groups]. If these are products, each is two
# tensors: factors int8 [n, groups] and bases float16 [n, 1].
Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Format:
    """One of ggml's formats: weights and bytes per block, bits per code, weights per scale, zero code and decoder.

    ``zero`` is subtracted from codes; None for formats with offsets or a ``kind``. ``memory``: bits per weight in blocks.
    ``kind``: one of ``blocks.CODES``; None: integers without a sign.
    """

    weights: int
    bytes: int
    bits: int
    group: int
    zero: int | None
    decode: Callable[[Tensor], Parts]
    memory: float
    kind: str | None = None


def pack(data: Tensor, kind: str, factors: Tensor | None = None) -> Tensor:
    """Pack the rows of a tensor, uint8 [outputs, bytes], of a format of ``FORMATS``, into blocks (see blocks.py).

    ``factors`` float32 [outputs] multiply the scales of a row, which are rounded to float32 and must not be products.

    Raises ``OutriderError`` for scales that are NaN or infinite.
    """
    form = FORMATS[kind]
    outputs, per_row = len(data), data.shape[1] // form.bytes
    inputs = per_row * form.weights
    codes, found = torch.empty(outputs, inputs, dtype=torch.uint8), []
    step = max(1, CHUNK // inputs)
    for at in range(0, outputs, step):
        part, *numbers = form.decode(data[at : at + step].reshape(-1, form.bytes))
        codes[at : at + step].view(part.shape).copy_(part)
        found.append([number.reshape(-1, per_row * number.shape[1]) for number in numbers])
    whole = [torch.cat(each) for each in zip(*found, strict=True)]
    has_products = whole[0].dtype == torch.int8
    pairs = zip(whole[::2], whole[1::2], strict=True)
    scales, *offsets = [blocks.Products(*pair) for pair in pairs] if has_products else whole
    if factors is not None:
        assert isinstance(scales, Tensor)
        scales = scales.float() * factors[:, None]
    return blocks.pack_codes(codes, form.bits, scales, *offsets, group=form.group, zeros=form.zero, kind=form.kind)


def _half(raw: Tensor) -> Tensor:
    """Return the float16 number [n, 1] in two bytes [n, 2] of each block."""
    return raw.contiguous().view(torch.float16)


def _planes(raw: Tensor, width: int, bits: int) -> Tensor:
    """Unpack codes of ``bits`` bits from bytes [n, m]: for each ``width`` bytes, the codes in the lowest bits come first."""
    groups = raw.reshape(len(raw), -1, width)
    if width % 8 == 0:  # eight bytes at a time: the mask drops what a shift moves from one byte to the next
        groups = groups.contiguous().view(torch.int64)
    mask = int.from_bytes(bytes([(1 << bits) - 1] * groups.element_size()))
    return torch.stack([groups >> shift & mask for shift in range(0, 8, bits)], 2).view(torch.uint8).flatten(1)


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 8 scales and 8 minimums of 6 bits from 12 bytes [n, 12]."""
    first, second, rest = raw.split(4, 1)
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], 1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], 1)
    return scales.view(torch.int8), minimums.view(torch.int8)


def _q8_0(raw: Tensor) -> Parts:
    return raw[:, 2:], _half(raw[:, :2])


def _q4_0(raw: Tensor) -> Parts:
    return _planes(raw[:, 2:], 16, 4), _half(raw[:, :2])


def _q4_1(raw: Tensor) -> Parts:
    return _planes(raw[:, 4:], 16, 4), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Parts:
    return _planes(raw[:, 6:], 16, 4) | _planes(raw[:, 2:6], 1, 1) << 4, _half(raw[:, :2])


def _q5_1(raw: Tensor) -> Parts:
    codes = _planes(raw[:, 8:], 16, 4) | _planes(raw[:, 4:8], 1, 1) << 4
    return codes, _half(raw[:, :2]), _half(raw[:, 2:4])


def _q2_k(raw: Tensor) -> Parts:
    scales, minimums = (each.view(torch.int8) for each in (raw[:, :16] & 15, raw[:, :16] >> 4))
    return _planes(raw[:, 16:80], 32, 2), scales, _half(raw[:, 80:82]), minimums, -_half(raw[:, 82:84])


def _q3_k(raw: Tensor) -> Parts:
    codes = _planes(raw[:, 32:96], 32, 2) | _planes(raw[:, :32], 32, 1) << 2
    scales = _planes(raw[:, 96:104], 8, 4) | _planes(raw[:, 104:108], 4, 2) << 4
    return codes, scales.view(torch.int8) - 32, _half(raw[:, 108:])


def _q4_k(raw: Tensor) -> Parts:
    scales, minimums = _six_bits(raw[:, 4:16])
    return _planes(raw[:, 16:], 32, 4), scales, _half(raw[:, :2]), minimums, -_half(raw[:, 2:4])


def _q5_k(raw: Tensor) -> Parts:
    scales, minimums = _six_bits(raw[:, 4:16])
    codes = _planes(raw[:, 48:], 32, 4) | _planes(raw[:, 16:48], 32, 1) << 4
    return codes, scales, _half(raw[:, :2]), minimums, -_half(raw[:, 2:4])


def _q6_k(raw: Tensor) -> Parts:
    codes = _planes(raw[:, :128], 64, 4) | _planes(raw[:, 128:192], 32, 2) << 4
    return codes, raw[:, 192:208].contiguous().view(torch.int8), _half(raw[:, 208:])


def _mxfp4(raw: Tensor) -> Parts:
    return _planes(raw[:, 1:], 16, 4), blocks.float4_scales(raw[:, :1], "it")


def _nvfp4(raw: Tensor) -> Parts:
    return _planes(raw[:, 4:], 8, 4), _scales_of_8_bits()[raw[:, :4].int()]


def _iq4_xs(raw: Tensor) -> Parts:
    scales = _planes(raw[:, 4:8], 1, 4) | _planes(raw[:, 2:4], 1, 2) << 4
    return _planes(raw[:, 8:], 16, 4), scales.view(torch.int8) - 32, _half(raw[:, :2])


def _iq3_s(raw: Tensor) -> Parts:
    rows = raw[:, 2:66].int() | _planes(raw[:, 66:74], 1, 1).int() << 8
    codes = _grid("IQ3_S")[rows].flatten(1) | _planes(raw[:, 74:106], 1, 1) << 3
    return codes, _odd(_planes(raw[:, 106:], 1, 4)), _half(raw[:, :2])


def _iq3_xxs(raw: Tensor) -> Parts:
    words = _words(raw[:, 66:])
    codes = _grid("IQ3_XXS")[raw[:, 2:66].int()].flatten(1) | _paired_signs(words).flatten(1) << 3
    return codes, _odd(words >> 28 & 15), _half(raw[:, :2])


def _iq2_xxs(raw: Tensor) -> Parts:
    pairs = raw[:, 2:].unflatten(1, (8, 8))  # of four rows of the grid, and of signs and a scale
    words = _words(pairs[..., 4:].flatten(1))
    codes = _grid("IQ2_XXS")[pairs[..., :4].int()].flatten(1) | _paired_signs(words).flatten(1) << 3
    return codes, _odd(words >> 28 & 15), _half(raw[:, :2])


def _iq2_xs(raw: Tensor) -> Parts:
    words = _shorts(raw[:, 2:66])
    codes = _grid("IQ2_XS")[words & 511].flatten(1) | _signs()[words >> 9].flatten(1) << 3
    return codes, _odd(_planes(raw[:, 66:], 1, 4)), _half(raw[:, :2])


def _iq2_s(raw: Tensor) -> Parts:
    rows = raw[:, 2:34].int() | _planes(raw[:, 66:74], 1, 2).int() << 8
    codes = _grid("IQ2_S")[rows].flatten(1) | _planes(raw[:, 34:66], 1, 1) << 3
    return codes, _odd(_planes(raw[:, 74:], 1, 4)), _half(raw[:, :2])


def _iq1_s(raw: Tensor) -> Parts:
    words = _shorts(raw[:, 34:])
    rows = raw[:, 2:34].int().view(-1, 8, 4) | (words[:, :, None] >> torch.tensor([0, 3, 6, 9]) & 7) << 8
    codes = _grid("IQ1_S")[rows] | (words >> 15 << 3).to(torch.uint8)[..., None, None]
    return codes.flatten(1), _odd(words >> 12 & 7), _half(raw[:, :2])


def _iq1_m(raw: Tensor) -> Parts:
    high = _planes(raw[:, 32:48], 1, 4).int()  # for each row of the grid, three bits of its number and a sign
    codes = _grid("IQ1_M")[raw[:, :32].int() | (high & 7) << 8] | (high & 8).to(torch.uint8)[..., None]
    words = _shorts(raw[:, 48:])
    base = (words >> 12 << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(1, dtype=torch.int32, keepdim=True)
    scales = (words[:, :, None] >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1)
    return codes.flatten(1), _odd(scales), base.to(torch.int16).view(torch.float16)


def _odd(numbers: Tensor) -> Tensor:
    """Return the factors 2n + 1 of scales."""
    return (2 * numbers + 1).to(torch.int8)


def _tq1_0(raw: Tensor) -> Parts:
    # five digits to base 3 in a byte; those of all bytes that come first, first
    def digits(packed: Tensor, count: int) -> Tensor:
        powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:count, None]
        return ((packed[:, None] * powers).int() * 3 >> 8).flatten(1)  # the product wraps around at 256

    found = torch.cat([digits(raw[:, :32], 5), digits(raw[:, 32:48], 5), digits(raw[:, 48:52], 4)], 1)
    return found.to(torch.uint8) + 7, _half(raw[:, 52:])


def _tq2_0(raw: Tensor) -> Parts:
    return _planes(raw[:, :64], 32, 2) + 7, _half(raw[:, 64:])


def _words(raw: Tensor) -> Tensor:
    """Return the 32-bit words of bytes [n, m], as int64."""
    return raw.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _shorts(raw: Tensor) -> Tensor:
    """Return the 16-bit words of bytes [n, m], as int32."""
    return raw.contiguous().view(torch.int16).int() & 0xFFFF


def _paired_signs(words: Tensor) -> Tensor:
    """Return the signs of the 32 weights of each word [n, m], in four numbers of 7 bits."""
    return _signs()[words[..., None] >> torch.tensor([0, 7, 14, 21]) & 127]


@cache
def _scales_of_8_bits() -> Tensor:
    """Return halves of the 256 numbers of 8 bits (E4M3), of which ggml ignores the sign and takes NaN as 0."""
    numbers = np.arange(256, dtype=np.uint8)
    return torch.from_numpy(import_module("gguf").quants.NVFP4.ue4m3_to_fp32(numbers).astype(np.float32))


@cache
def _signs() -> Tensor:
    """Return the signs of 8 weights [128, 8] for each number of 7 bits: the last sign makes the negative ones even."""
    raw = np.frombuffer(import_module("gguf").quants.IQ2_XXS.ksigns, np.uint8)
    return _planes(torch.from_numpy(raw.copy())[:, None], 1, 1)


@cache
def _grid(name: str) -> Tensor:
    """Return a format's grid [rows, 4 or 8] as uint8 places among its magnitudes."""
    form = getattr(import_module("gguf").quants, name)
    form.init_grid()
    values = torch.from_numpy(form.grid.copy()).flatten(0, -2).long()
    magnitudes = torch.tensor(form.grid_map)
    return torch.searchsorted(magnitudes, values).to(torch.uint8)


FORMATS = {
    "Q8_0": Format(32, 34, 8, 32, None, _q8_0, 8.5, "int8"),
    "Q4_0": Format(32, 18, 4, 32, None, _q4_0, 4.5, "int4"),
    "Q4_1": Format(32, 20, 4, 32, None, _q4_1, 5.0),
    "Q5_0": Format(32, 22, 5, 32, 16, _q5_0, 6.5),
    "Q5_1": Format(32, 24, 5, 32, None, _q5_1, 7.0),
    "Q2_K": Format(256, 84, 2, 16, None, _q2_k, 5.125),
    "Q3_K": Format(256, 110, 3, 16, 4, _q3_k, 4.5625),
    "Q4_K": Format(256, 144, 4, 32, None, _q4_k, 4.625),
    "Q5_K": Format(256, 176, 5, 32, None, _q5_k, 6.625),
    "Q6_K": Format(256, 210, 6, 16, 32, _q6_k, 6.5625),
    "MXFP4": Format(32, 17, 4, 32, None, _mxfp4, 4.5, "float4"),
    "NVFP4": Format(64, 36, 4, 16, None, _nvfp4, 5.0, "float4"),  # 6 with factors, see file.FileTensor
    "IQ4_NL": Format(32, 18, 4, 32, None, _q4_0, 4.5, "table4"),
    "IQ4_XS": Format(256, 136, 4, 32, None, _iq4_xs, 4.3125, "table4"),
    "IQ3_S": Format(256, 110, 4, 32, None, _iq3_s, 4.3125, "iq3_s"),
    "IQ3_XXS": Format(256, 98, 4, 32, None, _iq3_xxs, 4.3125, "iq3_xxs"),
    "IQ2_S": Format(256, 82, 4, 16, None, _iq2_s, 4.5625, "iq2"),
    "IQ2_XS": Format(256, 74, 4, 16, None, _iq2_xs, 4.5625, "iq2"),
    "IQ2_XXS": Format(256, 66, 4, 32, None, _iq2_xxs, 4.3125, "iq2"),
    "IQ1_M": Format(256, 56, 4, 16, None, _iq1_m, 4.5625, "iq1"),
    "IQ1_S": Format(256, 50, 4, 32, None, _iq1_s, 4.3125, "iq1"),
    "TQ2_0": Format(256, 66, 4, 256, None, _tq2_0, 4.5, "int4"),
    "TQ1_0": Format(256, 54, 4, 256, None, _tq1_0, 4.5, "int4"),
}
