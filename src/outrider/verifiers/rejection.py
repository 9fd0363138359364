"""Speculative (rejection) sampling: lossless for chains and trees of sampled drafts or point masses.

Leviathan, Kalman, Matias 2023 (arXiv 2211.17192), Algorithm 1; Chen et al. 2023 (arXiv 2302.01318), Algorithm 2. Trees:
multi-step speculative sampling of SpecInfer (Miao et al. 2024, arXiv 2305.09781, Algorithm 2), with siblings sampled with
replacement or, as in recursive speculative decoding (Jeon et al. 2024, arXiv 2402.14160), without: the proposal's probabilities
say which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.types import Proposal, Randomness, Verdict
from outrider.verifiers.base import Verifier, accept_prob, chain_verdict, fill_padding, next_token_probs, residual


class RejectionVerifier(Verifier):
    """Accepts draft x with probability min(1, target(x) / draft(x)); after a rejection samples from the residual."""

    lossless = True
    supports_trees = True
    target_input = "probs"

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        """``target`` [B, N + 1, V] are target probabilities. See ``Verifier.verify``."""
        if proposal.parents is None:
            return _verify_chain(proposal, target, random)
        return _verify_tree(proposal, proposal.parents, target, random)


def _verify_chain(proposal: Proposal, target_probs: Tensor, random: Randomness) -> Verdict:
    if proposal.num_nodes == 0:
        return chain_verdict(torch.zeros_like(proposal.lens), random.categorical(target_probs[:, 0]))
    drafts = proposal.token_ids.to(target_probs.device).unsqueeze(-1)  # [B, N, 1]
    chances = target_probs.gather(-1, drafts)  # acceptance probability of a point mass
    if proposal.probs is not None:
        chances = accept_prob(chances, proposal.probs.gather(-1, drafts))
    is_accepted = random.bernoulli(fill_padding(chances.squeeze(-1), proposal.lens))
    num_accepted = is_accepted.cumprod(dim=-1).sum(dim=-1)  # [B]
    return chain_verdict(num_accepted, random.categorical(next_token_probs(proposal, target_probs, num_accepted)))


def _verify_tree(proposal: Proposal, parents: Tensor, target_probs: Tensor, random: Randomness) -> Verdict:
    """Verify trees. Nodes are tried in index order, in which parents precede children."""
    batch, num_nodes = proposal.token_ids.shape
    drafts, above, lens = proposal.token_ids.tolist(), parents.tolist(), proposal.lens.tolist()
    node = [-1] * batch  # the last accepted draft
    left = target_probs[:, 0].clone()  # [B, V] residual of the target after node and its rejected children
    paths: list[list[int]] = [[] for _ in range(batch)]
    for i in range(num_nodes):
        tried = [b for b in range(batch) if i < lens[b] and above[b][i] == node[b]]
        chances = left.new_zeros(batch, 1)
        for b in tried:
            draft = drafts[b][i]
            chance = left[b, draft]
            chances[b] = chance if proposal.probs is None else accept_prob(chance, proposal.probs[b, i, draft])
        # One trial per node, used or not, so that a request's random numbers do not depend on other requests.
        is_accepted = random.bernoulli(chances)
        for b in tried:
            if is_accepted[b]:
                paths[b].append(i)
                node[b], left[b] = i, target_probs[b, i + 1]
            else:
                left[b] = residual(left[b], draft_distribution(proposal, b, i, left[b]))
    return Verdict(paths, random.categorical(left).tolist())


def draft_distribution(proposal: Proposal, b: int, i: int, like: Tensor) -> Tensor:
    """Return the distribution [V] that draft i of request b was sampled from."""
    if proposal.probs is not None:
        return proposal.probs[b, i]
    return torch.zeros_like(like).index_fill_(0, proposal.token_ids[b, i].to(like.device), 1.0)
