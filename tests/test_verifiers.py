"""Verifiers: formulas, edge cases and independence of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy import make_request

from outrider.registry import VERIFIERS
from outrider.sampling import Sampler
from outrider.types import Context, Proposal, SamplingParams, Verdict
from outrider.verifiers.base import Verifier, accept_prob, residual
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.exact import ExactMatchVerifier
from outrider.verifiers.rejection import RejectionVerifier
from outrider.verifiers.typical import TypicalVerifier

VOCAB = 12
PROBABILISTIC = [RejectionVerifier(), BlockVerifier()]


def random_probs(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(*shape, VOCAB, generator=generator), dim=-1)


def sampler_of(batch: int, first: int = 0) -> Sampler:
    params = SamplingParams(temperature=1.0)
    return Sampler([make_request([1, 2], params, seed=seed) for seed in range(first, first + batch)], VOCAB)


class Script:
    """A Randomness in which coins fall as given (if possible) and the most likely token is drawn."""

    def __init__(self, falls: bool) -> None:
        self._falls = falls

    def bernoulli(self, probs: Tensor) -> Tensor:
        return probs > 0 if self._falls else probs >= 1

    def categorical(self, probs: Tensor) -> Tensor:
        assert probs.isfinite().all()
        return probs.argmax(dim=-1)


def test_every_registered_verifier_declares_its_properties() -> None:
    for name in VERIFIERS:
        verifier = VERIFIERS.get(name)()
        assert isinstance(verifier, Verifier)
        assert verifier.target_input in ("probs", "tokens")
        assert verifier.lossless in (True, False) and verifier.supports_trees in (True, False)


def test_rows_are_taken_in_the_given_order() -> None:
    sampler, proposal = sampler_of(2), Proposal(torch.tensor([[1], [2]]), torch.tensor([1, 0]))
    context = Context(sampler.requests, (3, 4), sampler)
    turned = context.take([1, 0])
    assert turned.limits == (4, 3) and turned.requests == turned.sampler.requests == sampler.requests[::-1]
    assert proposal.take([1, 0]).token_ids.tolist() == [[2], [1]] and proposal.take([1, 0]).lens.tolist() == [0, 1]
    assert proposal.scatter([1, 0], 2).token_ids.tolist() == [[2], [1]]
    assert context.take([0, 1]) is context and proposal.take([0, 1]) is proposal


def test_accept_prob_is_the_clipped_ratio_and_never_nan() -> None:
    target, draft = torch.tensor([0.2, 0.5, 0.3, 0.0, 0.1]), torch.tensor([0.4, 0.25, 0.3, 0.0, 0.0])
    assert accept_prob(target, draft).tolist() == pytest.approx([0.5, 1.0, 1.0, 0.0, 1.0])


def test_residual_is_normalised_and_equals_the_target_if_it_is_empty() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    draft = torch.tensor([[0.2, 0.6, 0.2], [0.5, 0.3, 0.2]])
    assert torch.equal(residual(target, draft), torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.3, 0.2]]))


@pytest.mark.parametrize("verifier", PROBABILISTIC)
@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("falls", [False, True])
def test_no_drafts_and_all_drafts_accepted(verifier: Verifier, point_mass: bool, falls: bool) -> None:
    target, draft = random_probs(2, 4), random_probs(2, 3, seed=1)
    token_ids = draft.argmax(dim=-1)
    target[:, :3] = target[:, :3].scatter(-1, token_ids.unsqueeze(-1), 1e-3)  # below the draft's: no certain acceptance
    target /= target.sum(dim=-1, keepdim=True)
    proposal = Proposal(token_ids, torch.tensor([3, 2]), None if point_mass else draft)
    verdict = verifier.verify(proposal, target, Script(falls))
    assert verdict.paths == ([[0, 1, 2], [0, 1]] if falls else [[], []])
    if falls:
        assert verdict.next_tokens == [int(target[0, 3].argmax()), int(target[1, 2].argmax())]
    else:
        assert (torch.tensor(verdict.next_tokens) != token_ids[:, 0]).all()


@pytest.mark.parametrize("name", list(VERIFIERS))
def test_an_empty_proposal_is_plain_decoding(name: str) -> None:
    verifier: Verifier = VERIFIERS.get(name)()
    one_hots = torch.zeros(2, 1, VOCAB)
    one_hots[0, 0, 3] = one_hots[1, 0, 7] = 1.0
    target = one_hots if verifier.target_input == "probs" else one_hots.argmax(dim=-1)
    verdict = verifier.verify(Proposal.empty(2), target, sampler_of(2))
    assert verdict == Verdict([[], []], [3, 7])


@pytest.mark.parametrize(("verifier", "tree"), [(PROBABILISTIC[0], False), (PROBABILISTIC[0], True), (PROBABILISTIC[1], False)])
@pytest.mark.parametrize("point_mass", [False, True])
def test_a_verdict_does_not_depend_on_the_batch(verifier: Verifier, point_mass: bool, tree: bool) -> None:
    """Rows of different lengths in one batch get the same verdicts as alone and unpadded."""
    batch, width = 40, 6
    draft = random_probs(batch, width, seed=1)
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(batch, width)
    target = (random_probs(batch, width + 1) + torch.nn.functional.pad(draft, (0, 0, 0, 1), value=1 / VOCAB)) / 2
    lens = torch.arange(batch) % (width + 1)
    parents = torch.tensor([[-1, -1, 0, 0, 1, 2]]).expand(batch, -1) if tree else None
    probs = None if point_mass else draft
    together = verifier.verify(Proposal(token_ids, lens, probs, parents), target, sampler_of(batch))
    accepted = 0
    for b in range(batch):
        n = int(lens[b])
        alone = Proposal(
            token_ids[b : b + 1, :n],
            lens[b : b + 1],
            None if probs is None else probs[b : b + 1, :n],
            None if parents is None else parents[b : b + 1, :n],
        )
        verdict = verifier.verify(alone, target[b : b + 1, : n + 1], sampler_of(1, first=b))
        accepted += len(verdict.paths[0])
        assert verdict == together.take([b])
    assert accepted >= 5


@pytest.mark.parametrize("verifier", PROBABILISTIC)
def test_a_draft_of_probability_zero_gives_no_nan(verifier: Verifier) -> None:
    """A proposer with wrong or rounded probabilities is judged by them; the emitted token still is possible for the target."""
    target, draft = random_probs(1, 3), random_probs(1, 2, seed=1)
    draft[..., 4] = 0.0
    target[:, 1, 4] = 0.0
    proposal = Proposal(torch.tensor([[4, 4]]), torch.tensor([2]), draft)
    for falls in (False, True):
        verdict = verifier.verify(proposal, target, Script(falls))
        assert verdict.paths == [[0]]  # probability 0 under the draft alone, then under both
        assert verdict.next_tokens != [4]


def test_exact_match_follows_the_targets_tokens_down_a_chain() -> None:
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [0, 0, 0]])
    target = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 8], [0, 1, 1, 1]])
    verdict = ExactMatchVerifier().verify(Proposal(drafts, torch.tensor([3, 3, 1, 0])), target, Script(True))
    assert verdict == Verdict([[0, 1, 2], [0], [0], []], [8, 9, 6, 0])


def test_exact_match_follows_the_targets_tokens_down_a_tree() -> None:
    """The second child of the root is correct, its duplicate is not tried, and its own second child is correct."""
    drafts, parents = torch.tensor([[4, 5, 5, 6, 7]]), torch.tensor([[-1, -1, -1, 1, 1]])
    target = torch.tensor([[5, 0, 7, 0, 0, 9]])
    verdict = ExactMatchVerifier().verify(Proposal(drafts, torch.tensor([5]), None, parents), target, Script(True))
    assert verdict == Verdict([[1, 4]], [9])


def test_exact_match_with_coupled_noise_emits_plain_decodings_tokens_for_any_drafts() -> None:
    """Rounds of random drafts, some correct by chance or because of the shared noise, against plain decoding."""
    params = SamplingParams(temperature=1.0, top_k=3)
    generator = torch.Generator().manual_seed(0)
    table = 2 * torch.randn(VOCAB, VOCAB, generator=generator)  # logits after a token
    plain, drafted = make_request([1], params, seed=7), make_request([1], params, seed=7)
    alone = Sampler([plain], VOCAB, coupled=True)
    while len(plain.token_ids) < 60:
        plain.token_ids.append(int(alone.tokens(table[plain.token_ids[-1]].view(1, 1, -1))))
    sampler, accepted = Sampler([drafted], VOCAB, coupled=True), 0
    while len(drafted.token_ids) < 60:
        drafts = torch.zeros(1, 0, dtype=torch.long)
        for start in range(3):
            last = int(drafts[0, -1]) if start else drafted.token_ids[-1]
            guess = table[last].view(1, 1, -1) + 0.7 * torch.randn(1, 1, VOCAB, generator=generator)
            drafts = torch.cat((drafts, sampler.tokens(guess, drafts, start=start)), dim=1)
        logits = table[torch.tensor([[drafted.token_ids[-1], *drafts[0].tolist()]])]
        target = sampler.tokens(logits, drafts)
        verdict = ExactMatchVerifier().verify(Proposal(drafts, torch.tensor([3])), target, sampler)
        (path,) = verdict.paths
        accepted += len(path)
        drafted.token_ids += [*drafts[0, path].tolist(), *verdict.next_tokens]
    assert drafted.token_ids[:60] == plain.token_ids[:60]
    assert accepted > 10


@pytest.mark.parametrize("shape", ["tree", "chain", "nothing"])
def test_block_judges_point_masses_like_rejection(shape: str) -> None:
    width = 0 if shape == "nothing" else 3
    drafts, lens = torch.arange(width).repeat(40, 1), torch.full((40,), width)
    parents = torch.tensor([[-1, -1, 0]]).repeat(40, 1) if shape == "tree" else None
    proposal, target = Proposal(drafts, lens, None, parents), random_probs(40, width + 1)
    block, rejection = (rule.verify(proposal, target, sampler_of(40)) for rule in (BlockVerifier(), RejectionVerifier()))
    assert block == rejection


@pytest.mark.parametrize(
    ("others", "draft_prob", "is_accepted"),
    [
        (0, 0.10, True),  # the other 0.9 on one token: entropy 0.33, exp(-entropy) 0.72, so epsilon 0.09 is the threshold
        (0, 0.08, False),
        (10, 0.06, True),  # the others share it: entropy 2.3 to 2.4, so 0.3 exp(-entropy) = 0.03 is the threshold
        (10, 0.02, False),
    ],
)
def test_typical_acceptance_has_two_thresholds(others: int, draft_prob: float, is_accepted: bool) -> None:
    target = torch.zeros(1, 2, VOCAB)
    target[:, :, 1 : 1 + max(others, 1)] = (1 - draft_prob) / max(others, 1)
    target[:, :, 0] = draft_prob
    proposal = Proposal(torch.tensor([[0]]), torch.tensor([1]))
    verdict = TypicalVerifier().verify(proposal, target, Script(True))
    assert verdict.paths == [[0] * is_accepted]


def test_typical_acceptance_keeps_the_longest_path_and_on_ties_the_likeliest() -> None:
    target = torch.zeros(1, 6, VOCAB)
    target[0, 0, [1, 2, 3]] = torch.tensor([0.5, 0.3, 0.2])
    target[0, 1:, 4], target[0, 2, 4], target[0, 2, 5] = 1.0, 0.4, 0.6
    # Three paths: token 1 alone, 2 -> 4 and 2 -> 5, both of two tokens.
    parents = torch.tensor([[-1, -1, 1, 1]])
    proposal = Proposal(torch.tensor([[1, 2, 4, 5]]), torch.tensor([4]), None, parents)
    verdict = TypicalVerifier().verify(proposal, target[:, :5], Script(True))
    assert verdict.paths == [[1, 3]]
