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


def tree_visibility(parents: Tensor, text_lens: Sequence[int], width: int) -> Tensor:
    """Which of the pass's tokens each one sees: bool [B, W, W].

    Row b holds ``text_lens[b]`` committed tokens (a causal chain that ends in the root), then the nodes, then padding.
    """
    batch, nodes = parents.shape
    visible = torch.ones(width, width, dtype=torch.bool).tril().repeat(batch, 1, 1)
    sees = ancestor_matrix(parents)
    for b, text in enumerate(text_lens):
        visible[b, text : text + nodes, text : text + nodes] = sees[b]
    return visible


def tree_positions(parents: Tensor, text_lens: Sequence[int], width: int) -> Tensor:
    """Position of each token relative to the pass's first: int64 [B, W]. Siblings share one; padding counts on."""
    nodes = parents.shape[1]
    depths = ancestor_matrix(parents).sum(-1)  # [B, N]: 1 for a child of the root
    positions = torch.arange(width).repeat(len(text_lens), 1)
    for b, text in enumerate(text_lens):
        positions[b, text : text + nodes] = text - 1 + depths[b]
    return positions
