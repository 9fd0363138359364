"""Traversal verification: block verification for trees. Accepts at least as many drafts as rejection, in expectation.

Weng et al. 2025 (arXiv 2505.12398), Algorithm 2. Siblings may be sampled with or without replacement: the rule uses only the
distribution that each was sampled from.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.types import Proposal, Randomness, Verdict
from outrider.verifiers.base import accept_prob

End = tuple[list[int], Tensor]  # the accepted path, and the distribution [V] of the token after it
# Yields the probability that the accepted path ends at a node and receives whether it does.
Traversal = Generator[float, bool, End | None]


def verify_tree(proposal: Proposal, parents: Tensor, target_probs: Tensor, random: Randomness) -> Verdict:
    """Verify trees whose drafts have probabilities. ``target_probs``: [B, N + 1, V]."""
    batch, num_nodes = proposal.token_ids.shape
    traversals = [_Tree.of(proposal, parents, target_probs, b).traverse(-1, 1.0) for b in range(batch)]
    chances, ends = [0.0] * batch, dict[int, End]()

    def resume(b: int, ends_here: bool | None) -> None:
        try:
            chances[b] = next(traversals[b]) if ends_here is None else traversals[b].send(ends_here)
        except StopIteration as stop:
            chances[b], ends[b] = 0.0, stop.value

    for b in range(batch):
        resume(b, None)
    # One trial per node, used or not, so that a request's random numbers do not depend on other requests.
    for _ in range(num_nodes):
        is_end = random.bernoulli(target_probs.new_tensor(chances).unsqueeze(-1)).flatten().tolist()
        for b in range(batch):
            if b not in ends:
                resume(b, is_end[b])
    next_token = random.categorical(torch.stack([ends[b][1] for b in range(batch)]))
    return Verdict([ends[b][0] for b in range(batch)], next_token.tolist())


@dataclass(frozen=True)
class _Tree:
    """One request's tree."""

    tokens: Sequence[int]
    children: Sequence[Sequence[int]]  # of the root, then of each node; siblings in the order in which they were sampled
    draft_probs: Tensor  # [N, V]: the distribution that each node was sampled from
    target: Tensor  # [N + 1, V]: target distribution after the root, then after each node

    @classmethod
    def of(cls, proposal: Proposal, parents: Tensor, target_probs: Tensor, b: int) -> _Tree:
        assert proposal.probs is not None
        above = parents[b, : proposal.lens[b]].tolist()
        children: list[list[int]] = [[] for _ in range(len(above) + 1)]
        for node, parent in enumerate(above):
            children[parent + 1].append(node)
        return cls(proposal.token_ids[b].tolist(), children, proposal.probs[b], target_probs[b])

    def traverse(self, node: int, weight: float) -> Traversal:
        """Find the end of the accepted path in the subtree of this node (-1: the root), leaves first.

        ``weight``: the probability with which the path ends in this subtree. Each child is visited with the weight
        ``accept_prob(weight * left, draft)`` of its token; then its draft distribution is subtracted from ``weight * left``,
        which is renormalised for the next sibling and at last for the token after this node.
        """
        left = self.target[node + 1]
        for child in self.children[node + 1]:
            draft_probs, token = self.draft_probs[child], self.tokens[child]
            end = yield from self.traverse(child, float(accept_prob(weight * left[token], draft_probs[token])))
            if end is not None:
                return [child, *end[0]], end[1]
            if weight > 0:
                excess = (weight * left - draft_probs).clamp_min_(0.0)
                mass = float(excess.sum())
                if mass > 0:
                    left, weight = excess / mass, mass / (mass + (1 - weight))
                elif weight < 1:
                    weight = 0.0  # with weight 1 target and draft are equal, and only rounding led here
        if node < 0 or (yield weight):
            return [], left
        return None
