"""What stands around the audited parts: a verifier that writes down, a proposer that is made worse, a judge that leads.

``Watched`` sees where rounds begin and what was drafted there; ``Stressed`` replaces drafts by random ones, truthfully, so that
rejection has something to do however good the draft is; ``Led`` leads plain decoding along given texts to learn the laws there.
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
from outrider.proposers.around import Around
from outrider.proposers.base import Proposer
from outrider.sampling import Sampler
from outrider.types import Context, Proposal, Randomness, Request, Verdict
from outrider.verifiers.base import Verifier, accept_prob, residual

STRESS = 0.5  # of the drafts that ``Stressed`` replaces
_CAP = 30.0  # of a log-ratio: a token that the target never says


class Stressed(Around):
    """A proposer half of whose drafts are replaced by tokens drawn evenly from the vocabulary, and which says so.

    ``Proposal.probs`` are the mixtures that the drafts were really drawn from, so a right verifier stays lossless; a wrong one
    meets drafts that the target would hardly ever say.
    """

    def __init__(self, inner: Proposer, seed: int, share: float = STRESS) -> None:
        super().__init__(inner)
        self.share = share
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, context: Context, k: int) -> Proposal:
        proposal = self.inner.propose(context, k)
        if not proposal.num_nodes:
            return proposal
        size, shape, device = context.sampler.vocab_size, proposal.token_ids.shape, proposal.token_ids.device
        replaced = (torch.rand(shape, generator=self._generator) < self.share).to(device)
        anything = torch.randint(size, shape, generator=self._generator).to(device)
        probs = proposal.probs
        if probs is None:
            probs = functional.one_hot(proposal.token_ids.clamp(0, size - 1), size).float()
        mixed = (1 - self.share) * probs + self.share / size
        return replace(proposal, token_ids=torch.where(replaced, anything, proposal.token_ids), probs=mixed)


class Watched(Verifier):
    """The verifier it is given, and a note of what was drafted where each round began."""

    lossless: ClassVar[bool] = True
    handles_trees: ClassVar[bool] = True
    judges: ClassVar[Literal["probs", "tokens"]] = "probs"

    def __init__(self, inner: Verifier, gauge: Gauge | None = None) -> None:
        self.inner, self.gauge = inner, gauge
        self.judges, self.handles_trees, self.lossless = inner.judges, inner.handles_trees, inner.lossless  # type: ignore[misc]
        self.notes: dict[str, dict[int, float]] = {}  # request -> {place: the draft's probability of the token said there}

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        verdict = self.inner.verify(proposal, target, random)
        drafted = proposal.lens.nonzero().flatten().tolist()
        if not drafted:
            return verdict
        paths, counts, next_token = verdict.path.tolist(), verdict.num_accepted.tolist(), verdict.next_token.tolist()
        tokens = proposal.token_ids.tolist()
        said = [tokens[b][paths[b][0]] if counts[b] else next_token[b] for b in range(len(counts))]
        if proposal.probs is None:
            of_draft = [float(tokens[b][0] == said[b]) for b in range(len(said))]
        else:
            index = torch.tensor(said, device=proposal.probs.device).unsqueeze(-1)
            of_draft = proposal.probs[:, 0].gather(-1, index).squeeze(-1).tolist()
        requests = requests_of(random)
        for b in drafted:
            self.notes.setdefault(requests[b].request_id, {})[requests[b].num_output_tokens] = of_draft[b]
        if self.gauge is not None:
            self.gauge.add(proposal, target, drafted, sum(counts[b] == 0 for b in drafted))
        return verdict


class Led(Verifier):
    """Says what each request was told to say, and shows the target's laws to whoever wants to know."""

    lossless: ClassVar[bool] = False
    handles_trees: ClassVar[bool] = False
    judges: ClassVar[Literal["probs", "tokens"]] = "probs"

    def __init__(self, texts: Mapping[str, Sequence[int]], show: Callable[[Sequence[Request], Tensor], None]) -> None:
        """``texts``: request -> its tokens; others say what is likeliest. ``show`` gets requests and probabilities [B, V]."""
        self._texts, self._show = texts, show

    def verify(self, proposal: Proposal, target: Tensor, random: Randomness) -> Verdict:
        requests = requests_of(random)
        self._show(requests, target[:, 0])
        likeliest = target[:, 0].argmax(-1).tolist()
        said = [
            self._texts[request.request_id][request.num_output_tokens] if request.request_id in self._texts else best
            for request, best in zip(requests, likeliest, strict=True)
        ]
        none = torch.zeros(len(said), 0, dtype=torch.long)
        return Verdict(none, torch.zeros(len(said), dtype=torch.long), torch.tensor(said))


def requests_of(random: Randomness) -> tuple[Request, ...]:
    """The requests of a round: the engine's randomness is its sampler."""
    assert isinstance(random, Sampler)
    return random.requests


LAWS = ("target", "draft", "no residual", "untempered draft")


@dataclass
class Gauge:
    """How fast two of the tests tell the wrong verifiers from the target, from both distributions where rounds begin."""

    has_rounding: bool = False  # see ``evidence.at_borders``
    num_rounds: int = 0
    distance: float = 0.0  # total variation of target and draft, summed
    num_refused: int = 0  # rounds in which no draft was accepted
    means: Tensor = field(default_factory=lambda: torch.zeros(len(LAWS), len(LEAKS), dtype=torch.float64))  # of log-ratios
    squares: Tensor = field(default_factory=lambda: torch.zeros(len(LAWS), len(LEAKS), dtype=torch.float64))
    masses: Tensor = field(default_factory=lambda: torch.zeros(len(LAWS), NUM_CELLS, dtype=torch.float64))
    variance: Tensor = field(default_factory=lambda: torch.zeros(NUM_CELLS, NUM_CELLS, dtype=torch.float64))  # of calibration

    def add(self, proposal: Proposal, target: Tensor, rows: Sequence[int], num_refused: int) -> None:
        """Takes in what the first draft of each round was drawn from, and the target's law there [B, N + 1, V]."""
        of_target = target[rows, 0].double()
        first = Proposal(
            proposal.token_ids[rows, :1],
            torch.ones(len(rows), dtype=torch.long),
            None if proposal.probs is None else proposal.probs[rows, :1],
        )
        told = flattened(first, target[rows]).double()[:, 0]
        if first.probs is None:
            of_draft = functional.one_hot(first.token_ids[:, 0], of_target.shape[-1]).double().to(of_target.device)
        else:
            of_draft = first.probs[:, 0].double()
        refused = (of_draft - of_target).clamp_min(0).sum(-1, keepdim=True)
        accepted = of_draft * accept_prob(of_target, told)
        laws = (
            of_target,
            of_draft,
            torch.minimum(of_target, of_draft) + refused * of_target,
            accepted + (1 - accepted.sum(-1, keepdim=True)) * residual(of_target, told),
        )
        likely = at_borders(of_target) if self.has_rounding else of_target
        for column, leak in enumerate(LEAKS):
            ratios = (1 - leak + leak * of_draft / likely.clamp_min(1e-300)).clamp_min(1e-300).log()
            ratios = ratios.clamp(-_CAP, _CAP)
            for row, law in enumerate(laws):
                self.means[row, column] += (law * ratios).sum().cpu()
                self.squares[row, column] += (law * ratios**2).sum().cpu()
        cells = cells_of(of_target)
        for row, law in enumerate(laws):
            mass = torch.zeros(len(rows), NUM_CELLS, dtype=law.dtype, device=law.device).scatter_add_(1, cells, law).cpu()
            self.masses[row] += mass.sum(0)
            if row == 0:
                self.variance += torch.diag(mass.sum(0)) - mass.T @ mass
        self.num_rounds += len(rows)
        self.distance += float(refused.sum())
        self.num_refused += num_refused

    @property
    def mean_distance(self) -> float:
        """Total variation between target and draft: the chance that the first draft is rejected."""
        return self.distance / max(self.num_rounds, 1)

    def samples_for(self, law: str, level: float, power: float, rounds_per_sample: float) -> float:
        """Samples after which a wrong verifier of that name is caught at ``level`` with probability ``power``.

        By the likelihood ratio, which all rounds feed, or by calibration of one place, whichever is sooner.
        """
        threshold = math.log(len(LEAKS) / level)
        if law == "leaky":
            return self.rounds_for_leak(LEAK, threshold, power) / rounds_per_sample
        row = LAWS.index(law)
        by_ratio = self._rounds(self.means[row], self.squares[row], threshold, power) / rounds_per_sample
        values, vectors = torch.linalg.eigh(self.variance / max(self.num_rounds, 1))
        is_free = values > 1e-4
        excess = (self.masses[row] - self.masses[0]) / max(self.num_rounds, 1) @ vectors
        shift = float((excess[is_free] ** 2 / values[is_free]).sum())
        by_calibration = needed_shift(int(is_free.sum()), level, power) / shift if shift > 0 else math.inf
        return min(by_ratio, by_calibration)

    def rounds_for_leak(self, leak: float, threshold: float, power: float) -> float:
        """Rounds after which it shows that a share ``leak`` of the rejected drafts is let through; inf where never.

        The law moves by that share towards the draft's. In a tree a draft's sibling may still be accepted after it: there
        fewer are rejected for good.
        """
        share = leak * min(1.0, self.num_refused / self.distance) if self.distance else 0.0
        means = (1 - share) * self.means[0] + share * self.means[1]
        squares = (1 - share) * self.squares[0] + share * self.squares[1]
        return self._rounds(means, squares, threshold, power)

    def smallest_leak(self, num_rounds: float, threshold: float, power: float) -> float | None:
        """The least share of rejected drafts whose passing so many rounds would have shown; None where not even all of them."""
        shares = [10 ** (exponent / 10) for exponent in range(-40, 1)]
        return next((share for share in shares if self.rounds_for_leak(share, threshold, power) <= num_rounds), None)

    def _rounds(self, means: Tensor, squares: Tensor, threshold: float, power: float) -> float:
        count = max(self.num_rounds, 1)
        pairs = zip((means / count).tolist(), (squares / count).tolist(), strict=True)
        return min(needed_rounds(mean, square - mean**2, threshold, power) for mean, square in pairs)
