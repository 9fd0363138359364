"""Interface of the format readers, and their shared functions: checks of tensors, unpacking of codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider import native
from outrider.types import OutriderError, dtype_name


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [outputs, inputs] of codes: value = (code - zero) * scale, with both per group of inputs.

    ``codes`` uint8 [outputs, inputs]; ``scales`` float32 [outputs, groups]; ``zeros`` int32 [outputs, groups], or None where
    each is the middle code, 2^(bits - 1). ``order`` int64 [inputs]: column i of the codes belongs to input ``order[i]``; None
    where inputs are in their own order. ``kind``: the name in ``native.CODES4`` of codes that are no integers; a value is then
    the code's number * scale.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None = None
    kind: str | None = None

    def dequantize(self) -> Tensor:
        """Return the values [outputs, inputs] float32, inputs in their own order.

        Exact for scales of at most 16 significant bits, which float16 and bfloat16 have; float32 scales round each value once.
        """
        inputs = self.codes.shape[1]
        if self.kind is not None:
            numbers = torch.tensor(native.CODES4[self.kind], dtype=torch.float32)[self.codes.int()]
        elif self.zeros is not None:
            numbers = (self.codes.int() - per_input(self.zeros, self.group, inputs)).float()
        else:
            numbers = self.codes.float() - (1 << (self.bits - 1))
        values = numbers * per_input(self.scales, self.group, inputs)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


def per_input(each: Tensor, group: int, inputs: int) -> Tensor:
    """Repeat the numbers of groups [outputs, groups] for each input: [outputs, inputs], or [outputs, 1] for one group."""
    return each if each.shape[1] == 1 else each.repeat_interleave(group, 1)[:, :inputs]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one quantised linear layer in a checkpoint, by the last part of their names, such as ``qweight``."""

    name: str  # the layer's name in the checkpoint
    outputs: int
    inputs: int
    tensors: Mapping[str, Tensor]  # on the meta device while only the headers of the files have been read

    def get(self, key: str, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> Tensor:
        """Return a tensor. Raises ``OutriderError``, naming it, unless it has one of these dtypes and one of these shapes."""
        tensor = self._stored(key)
        if tensor.dtype not in dtypes:
            expected = " or ".join(dtype_name(dtype) for dtype in dtypes)
            raise OutriderError(f"{self.name}.{key} is {dtype_name(tensor.dtype)}, expected {expected}")
        if list(tensor.shape) not in [list(shape) for shape in shapes]:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise OutriderError(f"{self.name}.{key} is {list(tensor.shape)}, expected {expected}")
        return tensor

    def scales(self, key: str, dtypes: Sequence[torch.dtype], *shapes: Sequence[int]) -> Tensor:
        """``get``, as float32. Raises ``OutriderError`` for NaN and infinity."""
        scales = self.get(key, dtypes, *shapes).float()
        if not scales.is_meta and not torch.isfinite(scales).all():
            raise OutriderError(f"{self.name}.{key} contains NaN or infinity")
        return scales

    def rows(self, key: str) -> int:
        """Return the size of the first dimension of a tensor, 0 if it has none. Raises ``OutriderError`` if it is missing."""
        tensor = self._stored(key)
        return tensor.shape[0] if tensor.dim() else 0

    def columns(self, key: str) -> int:
        """Return the size of the last of two dimensions of a tensor, 0 if it has another number of them."""
        tensor = self._stored(key)
        return tensor.shape[1] if tensor.dim() == 2 else 0

    def _stored(self, key: str) -> Tensor:
        tensor = self.tensors.get(key)
        if tensor is None:
            raise OutriderError(f"the checkpoint lacks {self.name}.{key}")
        return tensor

    def group(self, groups: int, stated: object) -> int:
        """Return the inputs per group for ``groups`` groups; ``stated``: the config's group size, if it has one.

        Raises ``OutriderError`` if the inputs cannot be divided into this number of groups.
        """
        if isinstance(stated, int) and stated > 0 and -(-self.inputs // stated) == groups:
            return stated
        if groups == 0 or self.inputs % groups:
            raise OutriderError(
                f"{self.name} has scales for {groups} groups of its {self.inputs} inputs: expected equal groups"
            )
        return self.inputs // groups

    def grouped(self, key: str, group: int) -> Tensor | None:
        """Return the order of inputs by group, from a tensor with the group of each input; None if they are in order.

        Raises ``OutriderError`` unless every group but the last gets ``group`` inputs.
        """
        if key not in self.tensors:
            return None
        index = self.get(key, (torch.int32, torch.int64), [self.inputs])
        if index.is_meta or bool((index == -1).all()):  # compressed-tensors' sign for inputs in order
            return None
        ascending = torch.arange(self.inputs) // group
        if torch.equal(index.long(), ascending):
            return None
        order = torch.argsort(index, stable=True)
        if not torch.equal(index[order].long(), ascending):
            raise OutriderError(f"{self.name}.{key} does not give {group} inputs to each group")
        return order


class Format:
    """How a quantised checkpoint stores its linear layers."""

    marks: tuple[str, ...]  # last parts of names: a layer that has such a tensor is quantised
    keys: tuple[str, ...]  # last parts of the names of the tensors that ``read`` looks at
    has_codes = True  # whether weights are codes that keep their 4 or 8 bits; False for floating-point numbers of 8 bits
    growth = 1.0  # upper bound of the bytes in memory per byte of the files

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config``: the checkpoint's quantisation. Raises ``OutriderError`` for unsupported variants."""

    def num_bytes(self, stored: Iterable[Tensor], requested: torch.dtype | None = None) -> int:
        """Return an upper bound of the bytes in memory of a checkpoint's tensors, which may be on the meta device.

        ``requested``: dtype of the tensors that are not quantised; None: as in the files.
        """
        per_float8 = 2 if self.growth == 2 else 4  # numbers and scales in float8 are decoded, others stay as they are
        per_half = max(2, requested.itemsize) if requested is not None else 2
        sizes = {torch.float8_e4m3fn: per_float8, torch.float16: per_half, torch.bfloat16: per_half}
        return sum(each.numel() * sizes.get(each.dtype, each.itemsize) for each in stored)

    def read(self, layer: LayerTensors) -> QuantizedWeight | Tensor:
        """Return the weight: codes, or values [outputs, inputs] where these are exact in 16 or 32 bits.

        On the meta device only dtypes and shapes are checked. Raises ``OutriderError``, in one line that names the tensor.
        """
        raise NotImplementedError


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the codes uint8 [rows, n * 32 / bits] of int32 words [rows, n]: 4 or 8 bits each, the lowest bits first."""
    if words.is_meta:
        return words.new_empty(words.shape[0], words.shape[1] * 32 // bits, dtype=torch.uint8)
    parts = words.contiguous().view(torch.uint8)  # least significant byte first, as on every CPU that torch supports
    return parts if bits == 8 else unpack_pairs(parts)


def unpack_pairs(raw: Tensor) -> Tensor:
    """Return the codes [..., 2 n] of bytes uint8 [..., n]: the first of two codes is in the low bits."""
    codes = raw.new_empty(*raw.shape, 2)
    torch.bitwise_and(raw, 15, out=codes[..., 0])
    torch.bitwise_right_shift(raw, 4, out=codes[..., 1])
    return codes.flatten(-2)


def exact_values(values: Tensor) -> Tensor:
    """Return float32 values as bfloat16 if every one has the same value there, else as they are."""
    rounded = values.bfloat16()
    return rounded if values.is_meta or torch.equal(rounded.float(), values) else values
