"""Packed weights in 8 or 4 bits: half or a quarter of the bytes that a pass reads.

A second form of a model beside the first, by groups (128 inputs of an output share a scale) and to nearest: no text is needed
to calibrate on. Everything but the linear layers is shared with the model, its embeddings included.

Or a head's only form, in 8 bits. Making numbers of codes takes longer than reading them where several rows are drafted at a
time, so where the CPU has such products codes are multiplied by codes, with a scale for each output and one for each row.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.runner import huge_pages, kernels
from outrider.runner.linear import FusedLinears, PackedLinear, arithmetic, pack_model, packed_layers, structural_copy
from outrider.types import OutriderError

CHUNK = 1 << 19  # weights quantised at a time: their float32 copies stay in the CPU's cache


def quantized_bytes(model: PreTrainedModel, bits: int) -> int:
    """Memory that ``quantized_copy`` will take."""
    total = 0
    for layer, width in _layers(model, bits):
        panels, inputs, lanes = kernels.packed_shape(layer.packed)
        total += panels * inputs * lanes * width // 8 + panels * lanes * -(-inputs // kernels.SCALED) * 4
    return total


def quantized_copy(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """The packed model with its linear layers in ``bits`` (8 or 4) bits; all else is shared.

    The head keeps 8: it chooses among many tokens that are nearly alike.
    """
    own = structural_copy(model)
    for layer, width in _layers(own, bits):
        layer.packed, layer.scales = quantize(layer.packed, width)
    return own


def _layers(model: PreTrainedModel, bits: int) -> list[tuple[PackedLinear | FusedLinears, int]]:
    head = model.get_output_embeddings()
    return [(layer, max(bits, 8) if layer is head else bits) for layer in packed_layers(model)]


def quantize(packed: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A packed weight -> int8 [panels, inputs, 32] or uint8 [panels, inputs, 16], and scales [groups, panels * 32].

    One input after the other, also where the weight is in pairs: for the one row of a draft, making bfloat16 of codes takes
    longer than computing with them in float32.
    """
    panels, inputs, lanes = kernels.packed_shape(packed)
    groups = -(-inputs // kernels.SCALED)
    codes = huge_pages.empty((panels, inputs, lanes * bits // 8), torch.int8 if bits == 8 else torch.uint8)
    scales = torch.empty(groups, panels, lanes)
    table = _nearest_codes()
    step = max(1, CHUNK // (inputs * lanes))
    for at in range(0, panels, step):
        part = kernels.one_by_one(packed[at : at + step]).float()
        part = torch.nn.functional.pad(part, (0, 0, 0, groups * kernels.SCALED - inputs)).view(
            -1, groups, kernels.SCALED, lanes
        )
        largest = part.abs().amax(2).clamp_(min=1e-30)  # [panels, groups, 32]
        part = part.div_(largest[:, :, None]).view(-1, groups * kernels.SCALED, lanes)[:, :inputs]
        if bits == 8:
            codes[at : at + step] = (part * 127).round_()
            largest = largest / 127
        else:
            nearest = table[((part + 1) * ((len(table) - 1) / 2)).round_().int()]
            codes[at : at + step] = nearest[..., : lanes // 2] | nearest[..., lanes // 2 :] << 4
        scales[:, at : at + step] = largest.transpose(0, 1)
    return codes, scales.view(groups, panels * lanes)


def check_head_bits(bits: int | None) -> None:
    """Raises ``OutriderError`` for bits that no head's weights come in."""
    if bits not in (None, 8):
        raise OutriderError(f"a head's weights are as they are or in 8 bits, not {bits}")


def place_head(head: nn.Module, model: PreTrainedModel, bits: int | None = None) -> torch.dtype:
    """Puts a head where its target is, packed where the target's layers are, in 8 bits or in weights of the target's kind.

    Returns the dtype of what it computes with. Raises ``OutriderError`` where there are no 8 bits.
    """
    layers, dtype = packed_layers(model), arithmetic(model)
    head.to(model.device, layers[0].packed.dtype if layers else dtype).eval().requires_grad_(False)
    if layers:
        pack_model(head)  # type: ignore[arg-type]  # it looks at the modules alone
    if bits == 8:
        make_8_bits(head)
    return torch.float32 if layers else dtype


def make_8_bits(head: nn.Module) -> None:
    """Puts the packed layers of a head that drafts into 8 bits, in place. Raises ``OutriderError`` where there are none."""
    layers = packed_layers(head)
    if not layers:
        raise OutriderError("heads run in 8 bits on a CPU with Outrider's kernels only: leave out bits=8")
    for layer in layers:
        in_fours = kernels.suits_bytes(layer.packed)
        layer.packed, layer.scales = quantize_in_fours(layer.packed) if in_fours else quantize(layer.packed, 8)


def quantize_in_fours(packed: Tensor) -> tuple[Tensor, Tensor]:
    """A packed weight -> int8 [panels, inputs / 4, 32, 4] and scales [1, panels * 32], to multiply by rows of codes."""
    panels, inputs, lanes = kernels.packed_shape(packed)
    codes, scales = huge_pages.empty((panels, inputs // 4, lanes, 4), torch.int8), torch.empty(1, panels, lanes)
    step = max(1, CHUNK // (inputs * lanes))
    for at in range(0, panels, step):
        part = kernels.one_by_one(packed[at : at + step]).float()  # [n, inputs, 32]
        scales[0, at : at + step] = largest = part.abs().amax(1).clamp_(min=1e-30) / 127
        codes[at : at + step] = part.div_(largest[:, None]).round_().view(-1, inputs // 4, 4, lanes).transpose(2, 3)
    return codes, scales.view(1, panels * lanes)


@cache
def _nearest_codes() -> Tensor:
    """uint8 [2^16]: the nearest 4-bit code of numbers from -1 to 1, evenly spaced."""
    numbers = torch.tensor(kernels.CODES)
    return torch.bucketize(torch.linspace(-1, 1, 1 << 16), (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)
