"""Token trees as data: who sees whom, and at which position each node stands (Miao et al. 2024, topology-aware causal mask)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def ancestor_matrix(parents: Tensor) -> Tensor:
    """[B, N] parents (-1: the root) -> bool [B, N, N]: entry [b, i, j] says that j is i or an ancestor of i."""
    # numpy: a row of a small matrix is copied ten times as fast as by torch
    batch, nodes = parents.shape
    sees = np.zeros((batch, nodes, nodes), dtype=bool)
    for tree, above in zip(sees, parents.tolist(), strict=True):
        for node, parent in enumerate(above):  # a node's parent stands before it, so its ancestors are known
            if parent >= 0:
                tree[node] = tree[parent]
            tree[node, node] = True
    return torch.from_numpy(sees)


def tree_inputs(parents: Tensor, text_lens: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Which of the pass's tokens each one sees, bool [B, W, W], and positions relative to the first, int64 [B, W].

    Row b holds ``text_lens[b]`` committed tokens (a causal chain that ends in the root), then as many nodes as there is room
    for. Siblings share a position; places behind the nodes, padding if anything, count on.
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
