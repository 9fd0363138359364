"""The operators of packed layers in torch: what the C++ computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from outrider.runner.blocks import BLOCK, is_blocks, unpack
from outrider.runner.kernels import PANEL, is_interleaved, unpack_weight

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def linear_gated(x: Tensor, packed: Tensor, activation: str, activation_bits: int) -> Tensor:
    """Compute activation(first N outputs) * remaining N outputs from x [..., inputs] and a packed weight of 2 N outputs."""
    return gate_halves(linear(x, packed, None, packed.shape[0] * PANEL, activation_bits), activation)


def gate_halves(both: Tensor, activation: str) -> Tensor:
    """Compute activation(first half) * second half of both [..., 2 N] -> [..., N]."""
    gate, up = both.float().chunk(2, -1)
    return (GATES[activation](gate) * up).to(both.dtype)


def round_activations(x: Tensor, bits: int) -> Tensor:
    """Return x [..., inputs] as float32, rounded as layers in blocks do: to 8 bits with a scale per block."""
    if bits != 8:
        return x.float()
    inputs = x.shape[-1]
    parts = functional.pad(x.float(), (0, -inputs % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest: Tensor = parts.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # not 127 / largest, which torch computes as 127 times the reciprocal
    rounded: Tensor = (parts * torch.where(largest > 1e-30, inverse, 0)).round() * (largest / 127)
    return rounded.flatten(-2)[..., :inputs]


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, activation_bits: int) -> Tensor:
    """Compute x [..., inputs] times a packed weight -> [..., outputs] in x's dtype; sums are float32.

    For a paired weight x is rounded to bfloat16 first, for one in blocks to ``activation_bits`` bits.
    """
    if is_blocks(packed):
        rows, weight = round_activations(x, activation_bits), unpack(packed, outputs, x.shape[-1])
    else:
        rows, weight = (x.bfloat16() if is_interleaved(packed) else x).float(), unpack_weight(packed, outputs).float()
    return functional.linear(rows, weight, None if bias is None else bias.float()).to(x.dtype)


def embed(token_ids: Tensor, packed: Tensor, inputs: int) -> Tensor:
    """Return rows [..., inputs] float32 of a packed weight for token_ids [...]."""
    if not is_blocks(packed):
        return packed[token_ids // PANEL, :, token_ids % PANEL].flatten(token_ids.dim()).float()
    rows = unpack(packed[(token_ids // PANEL).flatten()], token_ids.numel() * PANEL, inputs).view(-1, PANEL, inputs)
    picked = rows[torch.arange(token_ids.numel(), device=token_ids.device), (token_ids % PANEL).flatten()]
    return picked.view(*token_ids.shape, inputs)
