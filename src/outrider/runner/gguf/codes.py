"""Decode quantised tensors of GGUF files into codes, scales and offsets, which blocks hold exactly.

A row is a sequence of ggml's blocks of 32 or 256 weights. The layouts are those of ggml's ``ggml-common.h``; the values are
bit for bit those of ``gguf.quants.dequantize``, because products of these scales and codes are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.runner import blocks

CHUNK = 1 << 24  # weights decoded at a time

# Codes [n, weights of a block], scales and, in some formats, offsets [n, groups]. If these are products, each is two
# tensors: factors int8 [n, groups] and bases float16 [n, 1].
Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Format:
    """One of ggml's formats: weights and bytes per block, bits per code, weights per scale, zero code and decoder.

    ``zero`` is subtracted from codes; None for formats with offsets. Scales of blocks of 256 weights are products.
    ``kind``: one of ``blocks.CODES`` if codes are not integers.
    """

    weights: int
    bytes: int
    bits: int
    group: int
    zero: int | None
    decode: Callable[[Tensor], Parts]
    kind: str | None = None


def pack(data: Tensor, kind: str) -> Tensor:
    """Pack the rows of a tensor, uint8 [outputs, bytes], of a format of ``FORMATS``, into blocks (see blocks.py).

    Raises ``OutriderError`` for scales that are NaN or infinite.
    """
    form = FORMATS[kind]
    outputs, per_row = len(data), data.shape[1] // form.bytes
    inputs = per_row * form.weights
    codes, found = torch.empty(outputs, inputs, dtype=torch.uint8), []
    step = max(1, CHUNK // inputs)
    for at in range(0, outputs, step):
        part, *numbers = form.decode(data[at : at + step].reshape(-1, form.bytes))
        codes[at : at + step] = part.view(-1, inputs)
        found.append([number.reshape(-1, per_row * number.shape[1]) for number in numbers])
    whole = [torch.cat(each) for each in zip(*found, strict=True)]
    pairs = zip(whole[::2], whole[1::2], strict=True)
    scales, *offsets = [blocks.Products(*pair) for pair in pairs] if form.weights == blocks.SPAN else whole
    return blocks.pack_codes(codes, form.bits, scales, *offsets, group=form.group, zeros=form.zero, kind=form.kind)


def _half(raw: Tensor) -> Tensor:
    """Return the float16 number [n, 1] in two bytes [n, 2] of each block."""
    return raw.contiguous().view(torch.float16)


def _planes(raw: Tensor, width: int, bits: int) -> Tensor:
    """Unpack codes of ``bits`` bits from bytes [n, m]: for each ``width`` bytes, the codes in the lowest bits come first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (raw.reshape(len(raw), -1, 1, width) >> shifts & (1 << bits) - 1).flatten(1)


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 8 scales and 8 minimums of 6 bits from 12 bytes [n, 12]."""
    first, second, rest = raw.split(4, 1)
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], 1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], 1)
    return scales.view(torch.int8), minimums.view(torch.int8)


def _q8_0(raw: Tensor) -> Parts:
    return raw[:, 2:] ^ 128, _half(raw[:, :2])


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
    return _planes(raw[:, 1:], 16, 4), blocks.float4_scales(raw[:, :1])


FORMATS = {
    "Q8_0": Format(32, 34, 8, 32, 128, _q8_0),
    "Q4_0": Format(32, 18, 4, 32, 8, _q4_0),
    "Q4_1": Format(32, 20, 4, 32, None, _q4_1),
    "Q5_0": Format(32, 22, 5, 32, 16, _q5_0),
    "Q5_1": Format(32, 24, 5, 32, None, _q5_1),
    "Q2_K": Format(256, 84, 2, 16, None, _q2_k),
    "Q3_K": Format(256, 110, 3, 16, 4, _q3_k),
    "Q4_K": Format(256, 144, 4, 32, None, _q4_k),
    "Q5_K": Format(256, 176, 5, 32, None, _q5_k),
    "Q6_K": Format(256, 210, 6, 16, 32, _q6_k),
    "MXFP4": Format(32, 17, 4, 32, None, _mxfp4, "float4"),
}
