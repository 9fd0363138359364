"""Round a packed model's linear layers to 8 or 4 bits, in blocks (blocks.py): half or a quarter of the bytes that a pass reads.

``quantized_copy`` makes a second form of a target, with which it drafts for itself; ``round_weights`` converts a draft model,
and ``place_head`` a head.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.runner import blocks
from outrider.runner.linear import (
    PackedLinear,
    arithmetic,
    fuse_siblings,
    is_in_blocks,
    packed_layers,
    structural_copy,
)
from outrider.runner.packing import pack_model
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

# Bytes of weights: larger drafts and heads are read from memory in each pass, which is shorter with fewer bits.
MAX_16_BIT_BYTES = 64_000_000


def quantized_bytes(model: PreTrainedModel, bits: int) -> int:
    """Return the bytes that ``quantized_copy`` will allocate."""
    return sum(blocks.num_bytes(*blocks.shape_of(layer.packed), width) for layer, width in _layers(model, bits))


def quantized_copy(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Return the packed model with its linear layers in ``bits`` (8 or 4) bits; everything else is shared.

    The output head keeps 8 bits, because it distinguishes many similar tokens.
    """
    own = structural_copy(model)
    for layer, width in _layers(own, bits):
        layer.packed = blocks.repack(layer.packed, width)
    return own


def round_weights(model: nn.Module, bits: int) -> None:
    """Round the linear layers of a packed model, its head included, to ``bits`` (8 or 4) bits, in place.

    For draft models and heads, which need not be exact. Layers with as many or fewer bits keep theirs.
    """
    for layer in packed_layers(model):
        if blocks.bits_of(layer.packed) > bits:
            layer.packed = blocks.repack(layer.packed, bits)
    fuse_siblings(model)  # those that had different forms: the packed model has the same structure when it is read from a file


def round_large(model: nn.Module, bits: int | None, default: int, what: str) -> bool:
    """Round the linear layers of a draft model or head, if it is packed, and return whether they take less memory then.

    ``bits``: 8 or 4; 16 keeps them; None for ``default`` if they exceed ``MAX_16_BIT_BYTES``, else 16. ``what``: "draft" or
    "head", for messages. Raises ``OutriderError`` for 8 or 4 bits without the CPU kernels.
    """
    before = packed_bytes(model)
    bits = bits or (default if before > MAX_16_BIT_BYTES else 16)
    if bits == 16:
        return False
    if not before:
        raise OutriderError(f"bits={bits} needs a {what} that runs on Outrider's CPU kernels: leave it out")
    round_weights(model, bits)
    after = packed_bytes(model)
    if after == before:  # the file has as few bits
        return False
    logger.info("%s weights rounded to %d bits: %.0f MB -> %.0f MB; bits=16 keeps them", what, bits, before / 1e6, after / 1e6)
    return True


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of the linear layers of a packed model; 0 for other models."""
    return sum(layer.packed.nbytes for layer in packed_layers(model))


def gets_fewer_bits(model: PreTrainedModel, bits: int) -> bool:
    """Return whether most of the bytes of the packed model are in layers that have more than ``bits`` bits."""
    larger = sum(layer.packed.nbytes for layer, _ in _layers(model, bits))
    return 2 * larger > packed_bytes(model)


def _layers(model: PreTrainedModel, bits: int) -> list[tuple[PackedLinear, int]]:
    """Return the layers that get fewer bits, and how many."""
    head = model.get_output_embeddings()
    wanted = [(layer, max(bits, 8) if layer is head else bits) for layer in packed_layers(model)]
    return [(layer, width) for layer, width in wanted if width < blocks.bits_of(layer.packed)]


def place_head(head: nn.Module, model: PreTrainedModel, bits: int | None) -> torch.dtype:
    """Move a head to its target's device; pack it if the target is packed. Return its compute dtype.

    ``bits``: 8; 16 for the target's weight type; None: see ``round_large``, which also says when this raises ``OutriderError``.
    """
    layers, dtype = packed_layers(model), arithmetic(model)
    own = torch.bfloat16 if is_in_blocks(model) else layers[0].packed.dtype if layers else dtype
    head.to(model.device, own).eval().requires_grad_(False)
    if layers:
        pack_model(head)  # type: ignore[arg-type]  # only uses the modules
    round_large(head, bits, 8, "head")
    return torch.float32 if layers else dtype
