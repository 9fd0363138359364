"""Attention masks and positions of token trees (Miao et al. 2024, topology-aware causal mask)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.types import ancestor_matrix


def tree_inputs(parents: Tensor, text_lens: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Return the mask over the pass's tokens, bool [B, W, W], and positions relative to the first, int64 [B, W].

    Row b has ``text_lens[b]`` committed tokens (a causal chain that ends in the root), then the nodes. Siblings share a
    position; padding after the nodes continues counting.
    """
    batch, nodes = parents.shape
    visible = torch.ones(width, width, dtype=torch.bool).tril().repeat(batch, 1, 1)
    positions = torch.arange(width).repeat(batch, 1)
    sees = ancestor_matrix(parents)
    depths = sees.sum(-1)  # [B, N]: 1 for a child of the root
    for b, text in enumerate(text_lens):
        here, room = slice(text, text + nodes), width - text
        visible[b, here, here] = sees[b, :room, :room]
        positions[b, here] = text - 1 + depths[b, :room]
    return visible, positions
