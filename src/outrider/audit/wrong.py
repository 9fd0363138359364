"""Controls: deliberately wrong verifiers, which an audit must catch to be conclusive. They have no public names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.types import Proposal, Randomness, Verdict
from outrider.verifiers.base import Verifier
from outrider.verifiers.rejection import RejectionVerifier

LEAK = 0.01  # share of rejected drafts that ``Leaky`` accepts


class WithoutResidual(RejectionVerifier):
    """Sample from the target after a rejection, instead of the residual."""

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        verdict = super().verify(proposal, target, random)
        places = torch.tensor([path[-1] + 1 if path else 0 for path in verdict.paths], device=target.device)
        rows = target[torch.arange(len(places), device=target.device), places]
        return replace(verdict, next_tokens=random.categorical(rows).tolist())


class Untempered(RejectionVerifier):
    """Assume that drafts were sampled from a flatter distribution: at twice the temperature or, for point masses, with
    probability 1/2 from the target's."""

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        if proposal.num_nodes:
            proposal = replace(proposal, probs=flattened(proposal, target))
        return super().verify(proposal, target, random)


class Leaky(RejectionVerifier):
    """Accept 1% of the rejected drafts: the first one after the accepted path."""

    def __init__(self, seed: int = 0, leak: float = LEAK) -> None:
        self._generator, self.leak = torch.Generator().manual_seed(seed), leak

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        verdict = super().verify(proposal, target, random)
        lucky = torch.rand(len(proposal.lens), generator=self._generator) < self.leak
        paths, next_tokens = verdict.paths, verdict.next_tokens
        for b in lucky.nonzero().flatten().tolist():
            child = _first_child(proposal, b, paths[b][-1] if paths[b] else -1)
            if child is not None:
                paths[b].append(child)
                next_tokens[b] = int(torch.multinomial(target[b, child + 1].cpu(), 1, generator=self._generator))
        return verdict


@dataclass(frozen=True)
class Control:
    """One control with its description for reports."""

    name: str
    text: str
    verifier: Callable[[int], Verifier]  # for a seed


CONTROLS = (
    Control("no residual", "samples from the target instead of the residual after a rejection", lambda seed: WithoutResidual()),
    Control("untempered draft", "assumes a flatter draft distribution", lambda seed: Untempered()),
    Control("leaky", "accepts 1% of the rejected drafts", Leaky),
)


def flattened(proposal: Proposal, target: Tensor) -> Tensor:
    """Return the draft distributions that ``Untempered`` assumes: [B, N, V]."""
    if proposal.probs is not None:
        roots = proposal.probs.sqrt()
        return roots / roots.sum(-1, keepdim=True)
    drafts = proposal.token_ids.to(target.device)
    parents = torch.arange(-1, drafts.shape[1] - 1).expand_as(drafts) if proposal.parents is None else proposal.parents
    before = (parents.to(target.device) + 1).unsqueeze(-1).expand(-1, -1, target.shape[2])
    half = target.gather(1, before) / 2
    return half.scatter_add(-1, drafts.unsqueeze(-1), torch.full_like(half[..., :1], 0.5))


def _first_child(proposal: Proposal, b: int, node: int) -> int | None:
    length = int(proposal.lens[b])
    parents = range(-1, length - 1) if proposal.parents is None else proposal.parents[b, :length].tolist()
    return next((child for child, parent in enumerate(parents) if parent == node), None)
