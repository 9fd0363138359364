"""Interface of verifiers, and functions that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider import native
from outrider.types import Proposal, Randomness, Verdict

TINY = 1e-30  # avoids division by a probability of 0


class Verifier(ABC):
    """Decides which drafts are accepted, from probabilities or tokens and random numbers only."""

    lossless: ClassVar[bool]  # whether the output distribution is exactly the target's
    supports_trees: ClassVar[bool]
    # The argument ``target`` of ``verify``: Sampler.probs() [B, N + 1, V] or Sampler.tokens() [B, N + 1].
    target_input: ClassVar[Literal["probs", "tokens"]]

    @abstractmethod
    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        """Verify a valid proposal. Values after ``lens[b]`` drafts are never read and may be NaN."""


def accept_prob(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return min(1, target / draft), elementwise. A draft probability of 0 (rounding) counts as ``TINY``."""
    return (target_probs / draft_probs.clamp_min(TINY)).clamp_max(1.0)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return norm(max(0, target - draft)), [..., V]; the target where the residual is zero and rejection impossible."""
    excess = (target_probs - draft_probs).clamp_min_(0.0)
    mass = excess.sum(dim=-1, keepdim=True)
    is_empty = (mass <= 0).to(mass.dtype)
    return torch.addcmul(excess, target_probs, is_empty).div_(mass + is_empty)


def next_token_probs(proposal: Proposal, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    """Return the distribution of a chain's last token, [B, V]: the target after the accepted drafts, or the residual."""
    width, device = proposal.num_nodes, target_probs.device
    tokens, lens, draft_probs = proposal.token_ids.to(device), proposal.lens.to(device), proposal.probs
    if native.serves(device):
        return torch.ops.outrider.next_token_probs(target_probs, draft_probs, tokens, num_accepted, lens)
    rejected = num_accepted < lens
    left = gather_rows(target_probs, num_accepted)  # nothing is subtracted without a rejection
    first = num_accepted.clamp_max(width - 1)
    if draft_probs is None:
        mass = rejected.to(left.dtype).unsqueeze(-1)
        subtracted = torch.zeros_like(left).scatter_(-1, tokens.gather(-1, first.unsqueeze(-1)), mass)
    else:
        subtracted = torch.where(rejected.unsqueeze(-1), gather_rows(draft_probs, first), 0.0)
    return residual(left, subtracted)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return values[b, index[b]]: [B, N, V], [B] -> [B, V]. (torch's own indexing wakes its threads.)"""
    offsets = torch.arange(0, values.shape[0] * values.shape[1], values.shape[1], device=values.device)
    return values.flatten(0, 1).index_select(0, index + offsets)


def fill_padding(values: Tensor, lens: Tensor, fill: int = 0) -> Tensor:
    """Return values [B, N] with ``fill`` after the first ``lens`` [B] of each row."""
    width = values.shape[1]
    if min(lens.tolist()) == width:
        return values
    steps = torch.arange(width, device=values.device)
    return values.where(steps < lens.to(values.device).unsqueeze(-1), fill)


def chain_verdict(num_accepted: Tensor, next_token: Tensor) -> Verdict:
    """Return the verdict on chains from [B], [B] on any device, with one transfer to the CPU."""
    if num_accepted.device.type != "cpu":
        num_accepted, next_token = torch.stack((num_accepted, next_token)).cpu()
    return Verdict([list(range(count)) for count in num_accepted.tolist()], next_token.tolist())
