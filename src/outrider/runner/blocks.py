"""Weights in blocks of 32 inputs x 32 outputs with codes of 8 or 4 bits: the operators, and their references in torch.

Each output of a block has a bfloat16 scale. 8-bit codes are integers; 4-bit codes index a table of 16 values that is denser
around 0, where most weights are (the values of llama.cpp's IQ4_NL). Rounding needs no data: for 4 bits the scale with the least
squared error is searched for each block. ``native/blocks.cpp`` describes the layout of a block.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from outrider import native
from outrider.runner import huge_pages
from outrider.runner.kernels import PANEL

BLOCK = 32  # inputs of an output that share a scale
SCALES = 2 * PANEL  # bytes of a block's scales
SIZES = {bits: SCALES + PANEL * BLOCK * bits // 8 for bits in (4, 8)}  # bytes of a block, by the bits of its codes

_library = torch.library.Library("outrider", "FRAGMENT")
_library.define("linear_blocks(Tensor x, Tensor packed, Tensor? bias, int outputs, int activation_bits) -> Tensor")
_library.define("embed_blocks(Tensor token_ids, Tensor packed, int inputs) -> Tensor")


@cache
def activation_bits() -> int:
    """Return the bits of activations that this CPU multiplies fastest with blocks: 8 (AVX-512 VNNI), 16 (BF16) or 32."""
    return int(torch.ops.outrider.block_activation_bits()) if native.load() else 32


def num_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of a weight [outputs, inputs] in blocks."""
    return -(-outputs // PANEL) * -(-inputs // BLOCK) * SIZES[bits]


def pack(weight: Tensor, bits: int) -> Tensor:
    """Round [outputs, inputs] to blocks with codes of ``bits`` bits: uint8 [panels, blocks, bytes]. Needs the C++ operators."""
    outputs, inputs = weight.shape
    packed = huge_pages.empty((-(-outputs // PANEL), -(-inputs // BLOCK), SIZES[bits]), torch.uint8)
    torch.ops.outrider.pack_blocks(weight, bits, packed)
    return packed


def is_blocks(packed: Tensor) -> bool:
    """Return whether a packed weight consists of blocks."""
    return packed.dtype == torch.uint8 and packed.dim() == 3 and packed.shape[2] in SIZES.values()


def bits_of(packed: Tensor) -> int:
    """Return the bits of each weight: 4 or 8 in blocks, else those of its dtype."""
    if not is_blocks(packed):
        return packed.dtype.itemsize * 8
    return next(bits for bits, size in SIZES.items() if size == packed.shape[2])


def unpack(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """Decode a weight in blocks to [outputs, inputs] float32."""
    panels, blocks = packed.shape[:2]
    scales = packed[..., :SCALES].contiguous().view(torch.bfloat16).float()  # [panels, blocks, 32]
    codes = packed[..., SCALES:].reshape(panels, blocks, -1, PANEL, 4)
    if bits_of(packed) == 8:
        values = codes.view(torch.int8).float()
    else:
        table = torch.tensor(native.CODES4, dtype=torch.float32, device=packed.device)
        values = table[torch.cat([codes & 15, codes >> 4], -1).long()]
    values = values * scales[:, :, None, :, None]  # [panels, blocks, words, 32, inputs of a word]
    return values.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, blocks * BLOCK)[:outputs, :inputs]


def round_activations(x: Tensor, bits: int) -> Tensor:
    """Return x [..., inputs] as float32, rounded as layers in blocks do: to bfloat16, or to 8 bits with a scale per block."""
    if bits != 8:
        return (x.bfloat16() if bits == 16 else x).float()
    inputs = x.shape[-1]
    parts = functional.pad(x.float(), (0, -inputs % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest: Tensor = parts.abs().amax(-1, keepdim=True)
    rounded: Tensor = (parts * torch.where(largest > 1e-30, 127 / largest, 0)).round() * (largest / 127)
    return rounded.flatten(-2)[..., :inputs]


def reference_linear_blocks(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, activation_bits: int) -> Tensor:
    """Compute x [..., inputs] times a weight in blocks -> [..., outputs] in x's dtype; sums are float32."""
    weight = unpack(packed, outputs, x.shape[-1])
    return functional.linear(round_activations(x, activation_bits), weight, None if bias is None else bias.float()).to(x.dtype)


def reference_embed_blocks(token_ids: Tensor, packed: Tensor, inputs: int) -> Tensor:
    """Return rows [..., inputs] float32 of a weight in blocks for token_ids [...]."""
    rows = unpack(packed[(token_ids // PANEL).flatten()], token_ids.numel() * PANEL, inputs).view(-1, PANEL, inputs)
    picked = rows[torch.arange(token_ids.numel(), device=token_ids.device), (token_ids % PANEL).flatten()]
    return picked.view(*token_ids.shape, inputs)


_library.impl("linear_blocks", reference_linear_blocks, "CompositeExplicitAutograd")
_library.impl("embed_blocks", reference_embed_blocks, "CompositeExplicitAutograd")


def _fake_linear_blocks(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, activation_bits: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _fake_embed_blocks(token_ids: Tensor, packed: Tensor, inputs: int) -> Tensor:
    return packed.new_empty(*token_ids.shape, inputs, dtype=torch.float32)


torch.library.register_fake("outrider::linear_blocks", _fake_linear_blocks)
torch.library.register_fake("outrider::embed_blocks", _fake_embed_blocks)
