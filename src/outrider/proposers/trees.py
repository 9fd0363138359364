"""Shapes of draft trees by expected acceptance, and sampling of a tree. Independent of heads and models."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.types import BatchSampler, Proposal


@dataclass(frozen=True)
class TreeShape:
    """N nodes in proposal order: by depth, siblings by rank, inner nodes before leaves at each depth."""

    parents: tuple[int, ...]  # -1: the root
    ranks: tuple[int, ...]  # 0: the first sibling
    depths: tuple[int, ...]  # 1: a child of the root

    def cut(self, depth: int) -> int:
        """Return the number of nodes up to a depth, which are the first ones."""
        return sum(each <= depth for each in self.depths)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]


def best_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the tree with the most expected accepted drafts (Cai et al. 2024, 2.3.3): nodes, best first, and their gains.

    ``acceptance[d][r]``: probability that the draft of rank r at depth d + 1 is accepted, given that its parent was. A node is
    written as the ranks along its path. Its gain, the expected accepted drafts that it adds, is the product of their
    probabilities; the node with the highest gain is added until the tree is full. Every prefix of the list is a tree.
    """
    gains: dict[tuple[int, ...], float] = {(): 1.0}  # in the order in which nodes are added
    heap: list[tuple[float, tuple[int, ...]]] = []

    def offer(path: tuple[int, ...]) -> None:
        depth, rank = len(path), path[-1]
        if depth <= len(acceptance) and rank < len(acceptance[depth - 1]):
            heapq.heappush(heap, (-gains[path[:-1]] * acceptance[depth - 1][rank], path))

    offer((0,))
    while heap and len(gains) <= num_nodes:
        negative, path = heapq.heappop(heap)
        gains[path] = -negative
        offer((*path[:-1], path[-1] + 1))
        offer((*path, 0))
    del gains[()]
    return list(gains), list(gains.values())


def shape_of(paths: Sequence[tuple[int, ...]]) -> TreeShape:
    """Return the tree of nodes given as ranks along their paths; it must include each node's parent."""
    inner = {path[:-1] for path in paths}
    nodes = sorted(paths, key=lambda path: (len(path), path not in inner, path))
    place = {path: index for index, path in enumerate(nodes)} | {(): -1}
    return TreeShape(
        tuple(place[path[:-1]] for path in nodes), tuple(path[-1] for path in nodes), tuple(len(path) for path in nodes)
    )


def draw_tree(
    shape: TreeShape, sampler: BatchSampler, batch: int, logits_after: Callable[[list[int], Tensor], Tensor]
) -> Proposal:
    """Sample a tree of N nodes for B requests, siblings one after the other without replacement.

    ``Proposal.probs`` are the distributions that nodes were sampled from, without earlier siblings, for multi-round rejection.
    ``logits_after``: maps the inner nodes of a level (I indices; -1 is the root) and the tokens [B, N] sampled so far to logits
    [B, I, V] after each of these nodes.
    """
    inner, token_ids = [-1], torch.zeros(batch, len(shape.parents), dtype=torch.long)
    logits = logits_after(inner, token_ids)
    token_ids = token_ids.to(logits.device)
    parents = torch.tensor(shape.parents, device=logits.device).expand(batch, -1)
    probs = logits.new_empty(0)
    for depth in range(1, max(shape.depths) + 1):
        upto = inner[-1] + 1
        base = sampler.probs(logits, token_ids[:, :upto], parents[:, :upto], start=inner[0] + 1)
        if depth == 1:
            probs = base.new_empty(batch, len(shape.parents), base.shape[-1])
        for i, node in enumerate(inner):
            drawn: list[Tensor] = []
            for child in shape.children(node):
                probs[:, child] = next_sibling_probs(base[:, i], torch.cat(drawn, 1) if drawn else None, logits[:, i])
                token_ids[:, child] = sampler.draw(probs[:, child], child)
                drawn.append(token_ids[:, child : child + 1])
        inner = [node for node, each in enumerate(shape.depths) if each == depth and shape.children(node)]
        if inner:
            logits = logits_after(inner, token_ids)
    return Proposal(token_ids, torch.full((batch,), len(shape.parents)), probs, parents.clone())


def next_sibling_probs(probs: Tensor, drawn: Tensor | None, logits: Tensor) -> Tensor:
    """Return the distribution of the next sibling: probs [B, V] without the tokens of earlier siblings [B, R], renormalised.

    If no probability is left (greedy rows after the first child, or truncation to fewer tokens than siblings), return a point
    mass at the token with the highest logit [B, V] that no sibling has.
    """
    if drawn is None:
        return probs
    left = probs.scatter(-1, drawn, 0.0)
    mass = left.sum(-1, keepdim=True)
    is_over = mass <= 0
    if bool(is_over.any()):
        token = logits.scatter(-1, drawn, float("-inf")).argmax(-1, keepdim=True)
        point = torch.zeros_like(left).scatter_(-1, token, 1.0)
        left = torch.where(is_over, point, left)
        mass = torch.where(is_over, 1.0, mass)
    return left / mass
