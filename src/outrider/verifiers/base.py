"""The interface of every verifier and the formulas they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.sampling.native import rows_for
from outrider.types import Proposal, Randomness, Verdict

_TINY = 1e-30


class Verifier(ABC):
    """Decides which drafts survive. Sees probabilities or tokens and randomness, nothing else."""

    lossless: ClassVar[bool]  # the output distribution is exactly the target's
    handles_trees: ClassVar[bool]
    judges: ClassVar[
        Literal["probs", "tokens"]
    ]  # what `target` is: Sampler.probs() [B, N + 1, V] or Sampler.tokens() [B, N + 1]

    @abstractmethod
    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        """Judges a well-formed proposal; whatever stands beyond ``lens`` in any tensor, NaN too, is never read."""


def accept_prob(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """min(1, target / draft), elementwise. A draft of draft probability 0 (rounding) is taken iff the target can say it."""
    return (target_probs / draft_probs.clamp_min(_TINY)).clamp_max(1.0)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, target - draft)): [..., V]. Zero mass, where rejection has probability 0: the target."""
    excess = (target_probs - draft_probs).clamp_min_(0.0)
    mass = excess.sum(dim=-1, keepdim=True)
    is_empty = (mass <= 0).to(mass.dtype)
    return torch.addcmul(excess, target_probs, is_empty).div_(mass + is_empty)


def left_over(proposal: Proposal, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    """What a chain's last token is drawn from: [B, V], the target's row after the accepted drafts, less the rejected one's."""
    width, device = proposal.num_nodes, target_probs.device
    tokens, lens, draft_probs = proposal.token_ids.to(device), proposal.lens.to(device), proposal.probs
    native = rows_for(device)
    if native is not None:
        return native.left_over(target_probs, draft_probs, tokens, num_accepted, lens)
    rejected = num_accepted < lens
    left = _rows(target_probs, num_accepted)  # without a rejection nothing is subtracted from it
    first = num_accepted.clamp_max(width - 1)
    if draft_probs is None:
        mass = rejected.to(left.dtype).unsqueeze(-1)
        subtracted = torch.zeros_like(left).scatter_(-1, tokens.gather(-1, first.unsqueeze(-1)), mass)
    else:
        subtracted = torch.where(rejected.unsqueeze(-1), _rows(draft_probs, first), 0.0)
    return residual(left, subtracted)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """values[b, index[b]]: [B, N, V], [B] -> [B, V]."""
    offsets = torch.arange(0, values.shape[0] * values.shape[1], values.shape[1], device=values.device)
    return values.flatten(0, 1).index_select(0, index + offsets)


def within(values: Tensor, lens: Tensor) -> Tensor:
    """Values [B, N] of drafts, 0 beyond ``lens`` [B]."""
    width = values.shape[1]
    if min(lens.tolist()) == width:
        return values
    steps = torch.arange(width, device=values.device)
    return torch.where(steps < lens.to(values.device).unsqueeze(-1), values, 0.0)


def chain_verdict(num_accepted: Tensor, next_token: Tensor, width: int) -> Verdict:
    """The verdict on chains: [B], [B] on any device, brought to the CPU in one transfer."""
    if num_accepted.device.type != "cpu":
        num_accepted, next_token = torch.stack((num_accepted, next_token)).cpu()
    path = [[*range(count), *[-1] * (width - count)] for count in num_accepted.tolist()]
    return Verdict(torch.tensor(path, dtype=torch.long).view(len(path), width), num_accepted, next_token)
