"""Block verification: verifies a chain as a whole and accepts at least as many drafts as rejection, in expectation.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh 2024 (arXiv 2403.10444), Algorithm 2, for chains; its generalisation in
traversal.py for trees. With draft probabilities q, target probabilities p and drafts x_1 ... x_N:

    w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i))         weight of the prefix of i drafts
    e_i = sum over x of max(0, w_i p(x) - q(x))             mass that the prefix still needs, at the position after it
    prefix i is accepted with probability e_i / (e_i + 1 - w_i), the whole chain with probability w_N

The longest accepted prefix is kept; the next token follows max(0, w_i p - q), after the whole chain p. Point masses are
verified by rejection, which already accepts them with the target's probability, the maximum of any lossless rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.types import Proposal, Randomness, Verdict
from outrider.verifiers.base import TINY, chain_verdict, gather_rows, residual
from outrider.verifiers.rejection import RejectionVerifier
from outrider.verifiers.traversal import verify_tree


class BlockVerifier(RejectionVerifier):
    """Accepts the longest prefix of a chain (in a tree: the first path, leaves first) whose Bernoulli trial succeeds."""

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        """``target`` [B, N + 1, V] are target probabilities. See ``Verifier.verify``."""
        draft_probs, width = proposal.probs, proposal.num_nodes
        if draft_probs is None or width == 0:
            return super().verify(proposal, target, random)
        if proposal.parents is not None:
            return verify_tree(proposal, proposal.parents, target, random)
        device = target.device
        lens = proposal.lens.to(device).unsqueeze(-1)  # [B, 1]
        token_ids = proposal.token_ids.to(device)
        weights = _prefix_weights(token_ids, target, draft_probs)  # [B, N + 1]
        index = torch.arange(1, width + 1, device=device)
        excess = _excess(weights, target, draft_probs, lens)
        total = excess + (1 - weights[:, 1:-1])  # in this order: the ratio is exactly 1 where the weight is
        # 0 / 0: target and draft agree after this prefix, so a longer one is accepted
        inner = torch.where(total > 0, excess / total, 1.0)
        chances = torch.where(index == lens, weights[:, 1:], torch.nn.functional.pad(inner, (0, 1)))
        is_accepted = random.bernoulli(torch.where(index <= lens, chances, 0.0))
        num_accepted = (is_accepted * index).amax(dim=-1)  # [B]
        has_rejection = (num_accepted < lens.squeeze(-1)).unsqueeze(-1)
        weight = torch.where(has_rejection, weights.gather(-1, num_accepted.unsqueeze(-1)), 1.0)
        rejected = torch.where(has_rejection, gather_rows(draft_probs, num_accepted.clamp_max(width - 1)), 0.0)
        next_token = random.categorical(residual(weight * gather_rows(target, num_accepted), rejected))
        return chain_verdict(num_accepted, next_token)


def _excess(weights: Tensor, target_probs: Tensor, draft_probs: Tensor, lens: Tensor) -> Tensor:
    """Return the sum over tokens of max(0, w_i target - draft) after i = 1 ... N - 1 drafts: [B, N - 1]."""
    batch, width = draft_probs.shape[:2]
    if target_probs.device.type != "cpu":
        return (weights[:, 1:-1, None] * target_probs[:, 1:-1] - draft_probs[:, 1:]).clamp_min(0.0).sum(dim=-1)
    # row by row in one buffer: whole temporaries of a large vocabulary leave the processor's caches
    found = weights.new_zeros(batch, width - 1)
    buffer = torch.empty_like(target_probs[0, 0])
    for b, (values, length) in enumerate(zip(weights.tolist(), lens.flatten().tolist(), strict=True)):
        for i in range(1, length):
            if values[i]:
                torch.mul(target_probs[b, i], values[i], out=buffer)
                found[b, i - 1] = buffer.sub_(draft_probs[b, i]).clamp_min_(0.0).sum()
    return found


def _prefix_weights(token_ids: Tensor, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return the weights w_i = min(1, w_(i - 1) target(x_i) / draft(x_i)), w_0 = 1 (p_i in the paper): [B, N + 1]."""
    drafts = token_ids.unsqueeze(-1)
    ratios = target_probs[:, :-1].gather(-1, drafts) / draft_probs.gather(-1, drafts).clamp_min(TINY)
    ratios = ratios.squeeze(-1)  # [B, N]
    weights = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        weights.append((weights[-1] * ratio).clamp_max(1.0))
    return torch.stack(weights, dim=1)
