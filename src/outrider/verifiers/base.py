"""The interface of every verifier, the two formulas they share, and the check that a proposal is well formed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from outrider.types import OutriderError, Proposal, Randomness, Verdict

_TINY = 1e-30
_SUM_TOLERANCE = 1e-2  # far above rounding, far below a mistake


class ProposalError(OutriderError):
    """A proposal that breaks the contract: speculation ends for its requests, plain decoding goes on."""


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


def check_proposal(proposal: Proposal, batch: int, vocab_size: int) -> None:
    """Raises ``ProposalError`` unless the proposal keeps the contract of ``types.Proposal`` for B = batch."""
    token_ids, lens, probs, parents = proposal.token_ids, proposal.lens, proposal.probs, proposal.parents
    if token_ids.dim() != 2 or token_ids.shape[0] != batch or token_ids.dtype != torch.long:
        raise ProposalError(f"token_ids must be int64 [{batch}, N], not {token_ids.dtype} {list(token_ids.shape)}")
    width = token_ids.shape[1]
    if lens.shape != (batch,) or lens.device.type != "cpu" or lens.is_floating_point():
        raise ProposalError(f"lens must be int64 [{batch}] on the CPU, not {lens.dtype} {list(lens.shape)} on {lens.device}")
    if not all(0 <= length <= width for length in lens.tolist()):
        raise ProposalError(f"lens must be between 0 and {width}, not {lens.tolist()}")
    if width == 0:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(token_ids))
    if lowest < 0 or highest >= vocab_size:
        raise ProposalError(f"draft ids, padding too, must be within the vocabulary of {vocab_size}, not {lowest}..{highest}")
    if probs is not None:
        _check_probs(probs, lens, (batch, width, vocab_size))
    if parents is not None:
        _check_parents(parents, (batch, width))


def _check_probs(probs: Tensor, lens: Tensor, shape: tuple[int, int, int]) -> None:
    if probs.shape != shape or not probs.is_floating_point():
        raise ProposalError(f"probs must be float {list(shape)}, not {probs.dtype} {list(probs.shape)}")
    off = (probs.sum(dim=-1) - 1).abs()  # [B, N]
    if float(off.max()) <= _SUM_TOLERANCE and float(probs.amin()) >= 0:
        return
    valid = torch.arange(shape[1]) < lens.unsqueeze(-1)
    if not bool((off.cpu()[valid] <= _SUM_TOLERANCE).all()) or not bool((probs.amin(dim=-1).cpu()[valid] >= 0).all()):
        raise ProposalError("draft probabilities must be >= 0, without NaN, and sum to 1")


def _check_parents(parents: Tensor, shape: tuple[int, int]) -> None:
    if parents.shape != shape or parents.dtype != torch.long:
        raise ProposalError(f"parents must be int64 {list(shape)}, not {parents.dtype} {list(parents.shape)}")
    if not bool(((parents >= -1) & (parents < torch.arange(shape[1], device=parents.device))).all()):
        raise ProposalError("the parent of node i must be -1 (the root) or an earlier node")
