"""Losslessness by enumeration: the output has the target's distribution, to 1e-12, for all sampler settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy import reference_probs

import outrider.verifiers.block
import outrider.verifiers.rejection
from outrider.proposers.base import merged
from outrider.types import Proposal, SamplingParams
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.exact import ExactMatchVerifier
from outrider.verifiers.rejection import RejectionVerifier
from outrider.verifiers.typical import TypicalVerifier

from .enumeration import (
    DRAFT,
    PROMPT,
    TARGET,
    VOCAB,
    Drafts,
    Text,
    continued,
    distance,
    draw_drafts,
    draw_in_parallel,
    expected_accepted,
    fixed_drafts,
    generation_law,
    loss,
    node_texts,
    round_law,
    score,
    target_law,
)

EXACT = 1e-12
SETTINGS = {
    "greedy": SamplingParams(),
    "cool": SamplingParams(temperature=0.7),
    "warm": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.3),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.75),
    "min_p": SamplingParams(temperature=1.3, min_p=0.3),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.1),
    "frequency": SamplingParams(temperature=0.7, frequency_penalty=0.8),
    "negative penalties": SamplingParams(
        temperature=1.0, repetition_penalty=0.6, presence_penalty=-0.5, frequency_penalty=-0.4
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 1.5, 2: -0.7}),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(0, 2)),
    "banned": SamplingParams(temperature=1.3, banned_token_ids=(1,)),
    "min_tokens": SamplingParams(temperature=1.0, stop_token_ids=(0,), min_tokens=4),
    "greedy, min_tokens": SamplingParams(stop_token_ids=(0,), min_tokens=4),
    "greedy, penalised": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.9, logit_bias={1: 0.3}),
    "all": SamplingParams(
        temperature=0.9,
        top_k=2,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={2: 0.8},
    ),
}
CHAIN = (-1, 0, 1)
TREE = (-1, -1, 0, 0, 1)
TRIPLE = (-1, -1, -1, 1)
OUTPUTS: list[Text] = [(), (2, 0, 2)]


def likeliest(output: Text, params: SamplingParams) -> Drafts:
    """Return a greedy draft: one chain of point masses."""
    text = list(output)
    for _ in range(3):
        text.append(int(DRAFT.logits(PROMPT + tuple(text)).argmax()))
    return fixed_drafts([text[len(output) :]])


def top_tree(output: Text, params: SamplingParams) -> Drafts:
    """Return a top-k tree of point masses: the two likeliest tokens after the root, and after the first of them."""
    first = DRAFT.logits(PROMPT + output).topk(2).indices.tolist()
    second = DRAFT.logits((*PROMPT, *output, first[0])).topk(2).indices.tolist()
    return fixed_drafts([[*first, *second]], (-1, -1, 0, 0))


def doubled(output: Text, params: SamplingParams) -> Drafts:
    """Return a tree in which two siblings are the same token."""
    return fixed_drafts([[1, 1, 0, 0, 2]], (-1, -1, 0, 1, 1))


def chain(output: Text, params: SamplingParams) -> Drafts:
    return draw_drafts(output, params, CHAIN)


def with_replacement(output: Text, params: SamplingParams) -> Drafts:
    return draw_drafts(output, params, TREE)


def without_replacement(output: Text, params: SamplingParams) -> Drafts:
    return draw_drafts(output, params, TREE, replacement=False)


def three_siblings(output: Text, params: SamplingParams) -> Drafts:
    return draw_drafts(output, params, TRIPLE, replacement=False)


def other_temperature(output: Text, params: SamplingParams) -> Drafts:
    """Sample a draft with other settings than the target's, with its true probabilities."""
    return draw_drafts(output, SamplingParams(temperature=0.5, top_k=2), CHAIN)


def shared_tokens(output: Text, params: SamplingParams) -> Drafts:
    """Sample a draft whose vocabulary lacks one of the target's tokens; its distribution is renormalised."""
    return draw_drafts(output, replace(params, allowed_token_ids=(0, 2)), CHAIN)


def in_parallel(output: Text, params: SamplingParams) -> Drafts:
    """Sample a draft of one pass over mask tokens: each position is independent of earlier drafts."""
    return draw_in_parallel(output, params, len(CHAIN))


DRAFTINGS = [
    likeliest,
    top_tree,
    doubled,
    chain,
    with_replacement,
    without_replacement,
    three_siblings,
    other_temperature,
    shared_tokens,
    in_parallel,
]
CHAINS = [likeliest, chain, other_temperature, shared_tokens, in_parallel]


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", DRAFTINGS)
def test_a_round_is_lossless(verifier: Verifier, draft: Callable[[Text, SamplingParams], Drafts], setting: str) -> None:
    for output in OUTPUTS if draft in CHAINS else OUTPUTS[1:]:
        assert loss(verifier, SETTINGS[setting], output, draft) < EXACT


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("draft", CHAINS)
def test_whole_generations_are_lossless(verifier: Verifier, draft: Callable[[Text, SamplingParams], Drafts]) -> None:
    for params in (SETTINGS["all"], replace(SETTINGS["min_tokens"], min_tokens=2)):
        law = generation_law(verifier, params, 4, draft)
        assert distance(law, target_law((), params, 4)) < EXACT


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
def test_whole_generations_with_trees_are_lossless(verifier: Verifier) -> None:
    params = SETTINGS["presence"]
    law = generation_law(verifier, params, 4, lambda output, params: draw_drafts(output, params, (-1, -1, 1), False))
    assert distance(law, target_law((), params, 4)) < EXACT


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("point_mass", [False, True])
def test_ragged_rows_are_lossless_and_padding_is_never_read(verifier: Verifier, point_mass: bool) -> None:
    """A batch has rows of 0, 1, 2 and 3 drafts, with NaN in the padding."""
    params = SETTINGS["frequency"]
    full = draw_drafts((), params, CHAIN)
    assert full.proposal.probs is not None
    count = len(full.weights)
    lens = torch.arange(4).repeat_interleave(count)  # [4 * 27]
    token_ids = full.proposal.token_ids.repeat(4, 1)
    beyond = (torch.arange(3) >= lens[:, None]).unsqueeze(-1)
    probs = full.proposal.probs.repeat(4, 1, 1).masked_fill(beyond, torch.nan)
    target = score(full.proposal, (), params).repeat(4, 1, 1)
    target[:, 1:] = target[:, 1:].masked_fill(beyond, torch.nan)
    for length in range(4):
        chosen = probs.nan_to_num(1 / VOCAB).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        weights = chosen.prod(dim=-1) * (lens == length)
        if point_mass:  # one chain of drafts for every length
            weights = ((token_ids == torch.tensor([1, 0, 2])).all(dim=-1) & (lens == length)).double()
        drafts = Drafts(Proposal(token_ids, lens, None if point_mass else probs), weights)
        law = round_law(verifier, drafts, target)
        assert max(map(len, law)) == length + 1
        assert distance(continued(law, (), params, 4), target_law((), params, 4)) < EXACT


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
def test_ragged_trees_are_lossless(verifier: Verifier) -> None:
    """A tree cut to 3 of its 5 nodes by ``lens``."""
    params = SETTINGS["presence"]
    full = draw_drafts((), params, TREE)
    assert full.proposal.probs is not None
    probs = full.proposal.probs.clone()
    probs[:, 3:] = torch.nan
    chosen = full.proposal.probs.clone()
    chosen[:, 3:] = 1 / VOCAB
    weights = chosen.gather(-1, full.proposal.token_ids.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
    cut = Proposal(full.proposal.token_ids, torch.full((len(weights),), 3), probs, full.proposal.parents)
    target = score(full.proposal, (), params)
    target[:, 4:] = torch.nan
    law = round_law(verifier, Drafts(cut, weights), target)
    assert distance(continued(law, (), params, 4), target_law((), params, 4)) < EXACT


@pytest.mark.parametrize("setting", [name for name, params in SETTINGS.items() if not params.is_greedy])
@pytest.mark.parametrize("draft", [chain, with_replacement, without_replacement, three_siblings])
def test_block_accepts_at_least_as_much_as_rejection(draft: Callable[[Text, SamplingParams], Drafts], setting: str) -> None:
    params = SETTINGS[setting]
    drafts = draft((), params)
    target = score(drafts.proposal, (), params)
    block = expected_accepted(round_law(BlockVerifier(), drafts, target))
    rejection = expected_accepted(round_law(RejectionVerifier(), drafts, target))
    assert block >= rejection - EXACT


@pytest.mark.parametrize("draft", [chain, without_replacement])
def test_block_accepts_more_than_rejection_somewhere(draft: Callable[[Text, SamplingParams], Drafts]) -> None:
    params = SETTINGS["warm"]
    drafts = draft((), params)
    target = score(drafts.proposal, (), params)
    block = expected_accepted(round_law(BlockVerifier(), drafts, target))
    assert block > expected_accepted(round_law(RejectionVerifier(), drafts, target)) + 1e-3


def test_rejection_accepts_the_overlap_of_target_and_draft() -> None:
    """One draft survives with probability sum_x min(target, draft): Leviathan et al. 2023, Definition 3.2."""
    params = SETTINGS["warm"]
    drafts = draw_drafts((), params, (-1,))
    target = score(drafts.proposal, (), params)
    assert drafts.proposal.probs is not None
    overlap = torch.minimum(target[0, 0], drafts.proposal.probs[0, 0]).sum().item()
    assert abs(expected_accepted(round_law(RejectionVerifier(), drafts, target)) - overlap) < EXACT


@pytest.mark.parametrize("setting", ["greedy", "greedy, min_tokens", "greedy, penalised"])
@pytest.mark.parametrize("draft", DRAFTINGS)
def test_exact_match_equals_rejection_on_one_hots(draft: Callable[[Text, SamplingParams], Drafts], setting: str) -> None:
    params = SETTINGS[setting]
    drafts = draft((), params)
    if draft is not other_temperature:  # point masses, whatever the draft claims: the exact rule reads no probabilities
        drafts = Drafts(
            Proposal(drafts.proposal.token_ids, drafts.proposal.lens, None, drafts.proposal.parents), drafts.weights
        )
    target = score(drafts.proposal, (), params)
    by_rejection = round_law(RejectionVerifier(), drafts, target)
    by_exact: dict[Text, float] = {}
    verdict = ExactMatchVerifier().verify(drafts.proposal, target.argmax(dim=-1), _NoRandomness())
    for b, text in enumerate(drafts.proposal.token_ids.tolist()):
        emitted = (*(text[i] for i in verdict.paths[b]), verdict.next_tokens[b])
        by_exact[emitted] = by_exact.get(emitted, 0.0) + float(drafts.weights[b])
    assert distance(by_rejection, {text: weight for text, weight in by_exact.items() if weight}) < EXACT


@pytest.mark.parametrize("setting", ["greedy", "warm", "presence", "all"])
@pytest.mark.parametrize(
    ("verifier", "first", "second"),
    [
        (RejectionVerifier(), likeliest, chain),
        (BlockVerifier(), likeliest, chain),
        (RejectionVerifier(), likeliest, without_replacement),
        (RejectionVerifier(), top_tree, chain),
        (BlockVerifier(), likeliest, without_replacement),
        (BlockVerifier(), top_tree, chain),
    ],
)
def test_requests_with_different_kinds_of_drafts_in_a_batch_are_lossless(
    verifier: Verifier,
    first: Callable[[Text, SamplingParams], Drafts],
    second: Callable[[Text, SamplingParams], Drafts],
    setting: str,
) -> None:
    """Point masses, sampled drafts, chains and trees in one batch: each request has its own distribution."""
    params = SETTINGS[setting]
    parts = [first((), params), second((), params)]
    sizes = [len(part.weights) for part in parts]
    rows = list(range(sizes[0])), list(range(sizes[0], sum(sizes)))
    proposal = merged([(rows[i], part.proposal) for i, part in enumerate(parts)], sum(sizes), VOCAB)
    target = score(proposal, (), params)
    longest = proposal.num_nodes + 1
    for part in (0, 1):
        weights = torch.zeros(sum(sizes), dtype=torch.float64)
        weights[rows[part]] = parts[part].weights
        law = round_law(verifier, Drafts(proposal, weights), target)
        assert distance(continued(law, (), params, longest), target_law((), params, longest)) < EXACT


class _NoRandomness:
    def bernoulli(self, probs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("exact match needs no coins")

    def categorical(self, probs: torch.Tensor) -> torch.Tensor:
        raise AssertionError("exact match needs no draws")


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_sampler_scores_every_node_as_if_its_path_were_committed(setting: str) -> None:
    """Rows of trees and chains have the penalties of all earlier tokens, as in a reference without drafts."""
    params = SETTINGS[setting]
    for drafts in (chain((1,), params), with_replacement((1,), params)):
        probs = score(drafts.proposal, (1,), params)
        for b, texts in enumerate(node_texts(drafts.proposal, (1,))):
            for i, text in enumerate(texts):
                expected = reference_probs(TARGET.logits(PROMPT + text), PROMPT, text, params)
                assert probs[b, i].tolist() == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", [likeliest, chain])
def test_rounds_are_lossless_without_the_native_library(
    draft: Callable[[Text, SamplingParams], Drafts], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.native.load", lambda: False)
    assert loss(RejectionVerifier(), SETTINGS[setting], OUTPUTS[1], draft) < EXACT


@pytest.mark.parametrize("draft", [likeliest, top_tree])
def test_typical_acceptance_is_lossy_and_declares_it(draft: Callable[[Text, SamplingParams], Drafts]) -> None:
    def off(params: SamplingParams) -> float:
        drafts = draft((), params)
        law = round_law(TypicalVerifier(), drafts, score(drafts.proposal, (), params))
        outcomes = 2**drafts.proposal.num_nodes  # outcomes of draws that this verifier does not make
        longest = drafts.proposal.num_nodes + 1
        law = continued({text: weight / outcomes for text, weight in law.items()}, (), params, longest)
        assert sum(law.values()) == pytest.approx(1)
        return distance(law, target_law((), params, longest))

    assert TypicalVerifier.lossless is False
    assert off(SETTINGS["warm"]) > 1e-2
    assert off(SETTINGS["greedy"]) < EXACT


# controls: the harness must notice a broken verifier and a dishonest proposer


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
def test_harness_detects_a_missing_residual(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_taken_away(proposal: Proposal, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
        return target_probs[torch.arange(len(target_probs)), num_accepted]

    monkeypatch.setattr(outrider.verifiers.rejection, "next_token_probs", nothing_taken_away)
    monkeypatch.setattr(outrider.verifiers.block, "residual", lambda target, draft: target / target.sum(-1, keepdim=True))
    assert loss(verifier, SETTINGS["warm"], (), chain) > 1e-3
    assert loss(verifier, SETTINGS["warm"], (), likeliest) > 1e-3


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
def test_harness_detects_draft_probs_without_temperature(verifier: Verifier) -> None:
    def dishonest(output: Text, params: SamplingParams) -> Drafts:
        return draw_drafts(output, params, CHAIN, shown=SamplingParams(temperature=1.0))

    assert loss(verifier, SETTINGS["cool"], (), dishonest) > 1e-3


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
def test_harness_detects_siblings_with_wrong_probs(verifier: Verifier) -> None:
    """Siblings sampled without replacement, with the probabilities of sampling with replacement."""

    def dishonest(output: Text, params: SamplingParams) -> Drafts:
        honest, other = without_replacement(output, params), with_replacement(output, params)
        assert other.proposal.probs is not None
        rows = (honest.proposal.token_ids * VOCAB ** torch.arange(4, -1, -1)).sum(dim=-1)
        return Drafts(replace(honest.proposal, probs=other.proposal.probs[rows]), honest.weights)

    assert loss(verifier, SETTINGS["warm"], OUTPUTS[1], dishonest) > 1e-3
