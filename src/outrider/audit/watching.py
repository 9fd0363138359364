"""Wrappers of proposers and verifiers for audits.

``Watched`` records where rounds begin and the draft probabilities there; ``Stressed`` replaces some drafts by random ones, with
correct probabilities, so that rejections occur however good the draft is; ``Replay`` replays plain decoding along sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from outrider.audit.evidence import LEAKS, NUM_CELLS, at_borders, cells_of
from outrider.audit.statistics import needed_rounds, needed_shift
from outrider.audit.wrong import LEAK, flattened
from outrider.proposers.base import Proposer
from outrider.proposers.wrapper import ProposerWrapper
from outrider.sampling import Sampler
from outrider.types import Context, Proposal, Randomness, Request, Verdict
from outrider.verifiers.base import Verifier, accept_prob, residual

STRESS = 0.5  # share of drafts that ``Stressed`` replaces
_CAP = 30.0  # bound of a log-ratio, for tokens with target probability zero


class Stressed(ProposerWrapper):
    """Wrap a proposer and replace half of its drafts by uniformly sampled tokens.

    ``Proposal.probs`` are the resulting mixtures, so a correct verifier stays lossless; a wrong one sees drafts that are very
    unlikely under the target.
    """

    def __init__(self, inner: Proposer, seed: int) -> None:
        super().__init__(inner)
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, context: Context, k: int) -> Proposal:
        proposal = self.inner.propose(context, k)
        if not proposal.num_nodes:
            return proposal
        size, shape, device = context.sampler.vocab_size, proposal.token_ids.shape, proposal.token_ids.device
        replaced = (torch.rand(shape, generator=self._generator) < STRESS).to(device)
        anything = torch.randint(size, shape, generator=self._generator).to(device)
        probs = proposal.probs
        if probs is None:
            probs = functional.one_hot(proposal.token_ids.clamp(0, size - 1), size).float()
        mixed = (1 - STRESS) * probs + STRESS / size
        return replace(proposal, token_ids=torch.where(replaced, anything, proposal.token_ids), probs=mixed)


class Watched(Verifier):
    """Wrap a verifier and record the draft probabilities at the start of each round."""

    def __init__(self, inner: Verifier, estimate: PowerEstimate | None = None) -> None:
        self.inner, self.estimate = inner, estimate
        self.target_input, self.supports_trees, self.lossless = inner.target_input, inner.supports_trees, inner.lossless  # type: ignore[misc]
        self.notes: dict[str, dict[int, float]] = {}  # request -> {position: draft probability of the emitted token}

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        verdict = self.inner.verify(proposal, target, random)
        drafted = proposal.lens.nonzero().flatten().tolist()
        if not drafted:
            return verdict
        tokens, decided = proposal.token_ids.tolist(), zip(verdict.paths, verdict.next_tokens, strict=True)
        emitted = [tokens[b][path[0]] if path else token for b, (path, token) in enumerate(decided)]
        if proposal.probs is None:
            of_draft = [float(tokens[b][0] == emitted[b]) for b in range(len(emitted))]
        else:
            index = torch.tensor(emitted, device=proposal.probs.device).unsqueeze(-1)
            of_draft = proposal.probs[:, 0].gather(-1, index).squeeze(-1).tolist()
        requests = requests_of(random)
        for b in drafted:
            self.notes.setdefault(requests[b].request_id, {})[requests[b].num_output_tokens] = of_draft[b]
        if self.estimate is not None:
            self.estimate.add(proposal, target, drafted, sum(not verdict.paths[b] for b in drafted))
        return verdict


class Replay(Verifier):
    """Verifier that emits given tokens and reports the target's distributions."""

    lossless: ClassVar[bool] = False
    supports_trees: ClassVar[bool] = False
    target_input: ClassVar[Literal["probs", "tokens"]] = "probs"

    def __init__(self, texts: Mapping[str, Sequence[int]], show: Callable[[Sequence[Request], Tensor], None]) -> None:
        """``texts``: request id -> tokens to emit; other requests emit the argmax. ``show`` gets the probabilities [B, V]."""
        self._texts, self._show = texts, show

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        requests = requests_of(random)
        self._show(requests, target[:, 0])
        likeliest = target[:, 0].argmax(-1).tolist()
        emitted = [
            self._texts[request.request_id][request.num_output_tokens] if request.request_id in self._texts else best
            for request, best in zip(requests, likeliest, strict=True)
        ]
        return Verdict([[] for _ in emitted], emitted)


def requests_of(random: Randomness) -> tuple[Request, ...]:
    """Return the requests of a round, from the sampler that the engine passes as randomness."""
    assert isinstance(random, Sampler)
    return random.requests


CONTROL_DISTRIBUTIONS = ("target", "draft", "no residual", "untempered draft")


@dataclass
class PowerEstimate:
    """Estimate the samples that two of the tests need to detect the controls, from the distributions at round starts."""

    has_rounding: bool = False  # see ``evidence.at_borders``
    num_rounds: int = 0
    distance: float = 0.0  # total variation of target and draft, summed
    num_refused: int = 0  # rounds without an accepted draft
    means: Tensor = field(default_factory=lambda: _zeros(len(LEAKS)))  # of log-ratios
    squares: Tensor = field(default_factory=lambda: _zeros(len(LEAKS)))
    masses: Tensor = field(default_factory=lambda: _zeros(NUM_CELLS))
    variance: Tensor = field(default_factory=lambda: torch.zeros(NUM_CELLS, NUM_CELLS, dtype=torch.float64))  # of calibration

    def add(self, proposal: Proposal, target: Tensor, rows: Sequence[int], num_refused: int) -> None:
        """Add the distribution of each round's first draft and the target's [B, N + 1, V]."""
        of_target = target[rows, 0].double()
        first = Proposal(
            proposal.token_ids[rows, :1],
            torch.ones(len(rows), dtype=torch.long),
            None if proposal.probs is None else proposal.probs[rows, :1],
        )
        assumed = flattened(first, target[rows]).double()[:, 0]
        if first.probs is None:
            of_draft = functional.one_hot(first.token_ids[:, 0], of_target.shape[-1]).double().to(of_target.device)
        else:
            of_draft = first.probs[:, 0].double()
        refused = (of_draft - of_target).clamp_min(0).sum(-1, keepdim=True)
        accepted = of_draft * accept_prob(of_target, assumed)
        distributions = (
            of_target,
            of_draft,
            torch.minimum(of_target, of_draft) + refused * of_target,
            accepted + (1 - accepted.sum(-1, keepdim=True)) * residual(of_target, assumed),
        )
        likely = at_borders(of_target) if self.has_rounding else of_target
        for column, leak in enumerate(LEAKS):
            ratios = (1 - leak + leak * of_draft / likely.clamp_min(1e-300)).clamp_min(1e-300).log()
            ratios = ratios.clamp(-_CAP, _CAP)
            for row, probs in enumerate(distributions):
                self.means[row, column] += (probs * ratios).sum().cpu()
                self.squares[row, column] += (probs * ratios**2).sum().cpu()
        cells = cells_of(of_target)
        for row, probs in enumerate(distributions):
            mass = torch.zeros(len(rows), NUM_CELLS, dtype=probs.dtype, device=probs.device).scatter_add_(1, cells, probs).cpu()
            self.masses[row] += mass.sum(0)
            if row == 0:
                self.variance += torch.diag(mass.sum(0)) - mass.T @ mass
        self.num_rounds += len(rows)
        self.distance += float(refused.sum())
        self.num_refused += num_refused

    @property
    def mean_distance(self) -> float:
        """Return the mean total variation of target and draft, which is the rejection probability of the first draft."""
        return self.distance / max(self.num_rounds, 1)

    def samples_for(self, control: str, level: float, power: float, rounds_per_sample: float) -> float:
        """Return the samples after which the named control is detected at ``level`` with probability ``power``.

        The smaller number of the likelihood ratio over all rounds and of calibration at one position.
        """
        threshold = math.log(len(LEAKS) / level)
        if control == "leaky":
            return self.rounds_for_leak(LEAK, threshold, power) / rounds_per_sample
        row = CONTROL_DISTRIBUTIONS.index(control)
        by_ratio = self._rounds(self.means[row], self.squares[row], threshold, power) / rounds_per_sample
        values, vectors = torch.linalg.eigh(self.variance / max(self.num_rounds, 1))
        is_free = values > 1e-4
        excess = (self.masses[row] - self.masses[0]) / max(self.num_rounds, 1) @ vectors
        shift = float((excess[is_free] ** 2 / values[is_free]).sum())
        by_calibration = needed_shift(int(is_free.sum()), level, power) / shift if shift > 0 else math.inf
        return min(by_ratio, by_calibration)

    def rounds_for_leak(self, leak: float, threshold: float, power: float) -> float:
        """Return the rounds after which accepting a share ``leak`` of the rejected drafts is detected, or inf.

        This moves the distribution towards the draft's by that share. In a tree a sibling may be accepted after a rejected
        draft, so fewer rounds end in a rejection.
        """
        share = leak * min(1.0, self.num_refused / self.distance) if self.distance else 0.0
        means = (1 - share) * self.means[0] + share * self.means[1]
        squares = (1 - share) * self.squares[0] + share * self.squares[1]
        return self._rounds(means, squares, threshold, power)

    def smallest_leak(self, num_rounds: float, threshold: float, power: float) -> float | None:
        """Return the smallest share of wrongly accepted drafts detectable in ``num_rounds``; None if not even 100%."""
        shares = [10 ** (exponent / 10) for exponent in range(-40, 1)]
        return next((share for share in shares if self.rounds_for_leak(share, threshold, power) <= num_rounds), None)

    def _rounds(self, means: Tensor, squares: Tensor, threshold: float, power: float) -> float:
        count = max(self.num_rounds, 1)
        pairs = zip((means / count).tolist(), (squares / count).tolist(), strict=True)
        return min(needed_rounds(mean, square - mean**2, threshold, power) for mean, square in pairs)


def _zeros(width: int) -> Tensor:
    return torch.zeros(len(CONTROL_DISTRIBUTIONS), width, dtype=torch.float64)
