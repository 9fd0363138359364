"""Shared by tree-drafting methods: trees of fixed shape chosen by expected acceptance, and sampling of siblings.

Independent of heads and models, except for a function that returns logits.
"""

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
        """Return the number of nodes up to a depth; they come first."""
        return sum(each <= depth for each in self.depths)

    def nodes_at(self, depth: int) -> list[int]:
        return [node for node, each in enumerate(self.depths) if each == depth]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]


def grown(acceptance: Sequence[Sequence[float]], num_nodes: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the nodes of the tree with the most expected accepted drafts, best first, with values (Cai et al. 2024, 2.3.3).

    ``acceptance[d][r]``: probability that the draft of rank r at depth d + 1 is accepted, given that its parent was. The value
    of a node, written as the ranks along its path, is the product; the node with the highest value is added until the tree is
    full. Every prefix of the list is a tree.
    """
    best: list[tuple[int, ...]] = []
    worths: list[float] = []
    heap: list[tuple[float, tuple[int, ...]]] = []

    def offer(path: tuple[int, ...], value: float) -> None:
        depth, rank = len(path), path[-1]
        if depth <= len(acceptance) and rank < len(acceptance[depth - 1]):
            heapq.heappush(heap, (-value * acceptance[depth - 1][rank], path))

    worth: dict[tuple[int, ...], float] = {(): 1.0}
    offer((0,), 1.0)
    while heap and len(best) < num_nodes:
        negative, path = heapq.heappop(heap)
        worth[path] = -negative
        best.append(path)
        worths.append(-negative)
        offer((*path[:-1], path[-1] + 1), worth[path[:-1]])
        offer((*path, 0), worth[path])
    return best, worths


def shape_of(paths: Sequence[tuple[int, ...]]) -> TreeShape:
    """Return the tree of these nodes, which must include each node's parent."""
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

    ``probs`` are the distributions each node was sampled from, without its earlier siblings, for multi-round rejection.
    ``logits_after``: maps the inner nodes of a level (I indices; -1 is the root) and tokens [B, N], sampled up to them, to
    logits [B, I, V] of the token after each.
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
                probs[:, child] = without(base[:, i], torch.cat(drawn, 1) if drawn else None, logits[:, i])
                token_ids[:, child] = sampler.draw(probs[:, child], child)
                drawn.append(token_ids[:, child : child + 1])
        inner = [node for node in shape.nodes_at(depth) if shape.children(node)]
        if inner:
            logits = logits_after(inner, token_ids)
    return Proposal(token_ids, torch.full((batch,), len(shape.parents)), probs, parents.clone())


def without(probs: Tensor, drawn: Tensor | None, logits: Tensor) -> Tensor:
    """Return the distribution of the next sibling: [B, V] without the tokens of earlier ones [B, R], renormalised.

    If no probability is left (greedy rows after their first child, truncation to fewer tokens than siblings), it is a
    point mass at the likeliest token by ``logits`` [B, V] that no sibling has.
    """
    if drawn is None or drawn.shape[1] == 0:
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
