"""Degraded drafts do not change the output distribution: by enumeration, for chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from toy import make_request

from outrider.proposers.base import ScriptedProposer
from outrider.proposers.degraded import Degraded
from outrider.sampling import Sampler
from outrider.types import Context, SamplingParams
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.rejection import RejectionVerifier

from .enumeration import PROMPT, VOCAB, Drafts, Text, draw_drafts, loss

EXACT = 1e-12
WARM = SamplingParams(temperature=1.0)
TREE = (-1, -1, 0, 0)


def worn(accuracy: float, seed: int, parents: tuple[int, ...], honest: bool = True) -> Callable[[Text, SamplingParams], Drafts]:
    """Enumerate all proposals, degraded with the random numbers of one seed."""

    def draft(output: Text, params: SamplingParams) -> Drafts:
        drafts = draw_drafts(output, params, parents, replacement=parents != TREE)
        batch = len(drafts.weights)
        requests = tuple(make_request(PROMPT + output, params, seed=seed, name=f"r{b}") for b in range(batch))
        context = Context(requests, (9,) * batch, Sampler(requests, VOCAB))
        proposal = Degraded(ScriptedProposer(lambda context, k: drafts.proposal), accuracy).propose(context, 9)
        if not honest:
            proposal = replace(proposal, probs=drafts.proposal.probs)
        return Drafts(proposal, drafts.weights)

    return draft


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("accuracy", [0.5, 0.0])
@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()], ids=["rejection", "block"])
def test_a_degraded_chain_is_lossless(verifier: Verifier, accuracy: float, seed: int) -> None:
    assert loss(verifier, WARM, (2, 0), worn(accuracy, seed, (-1, 0, 1))) < EXACT


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("accuracy", [0.5, 0.0])
def test_a_degraded_tree_is_lossless(accuracy: float, seed: int) -> None:
    assert loss(RejectionVerifier(), WARM, (2, 0), worn(accuracy, seed, TREE)) < EXACT


def test_harness_detects_degraded_drafts_with_unchanged_probs() -> None:
    """Control: the same replacements with the unchanged probabilities of the draft."""
    losses = [loss(RejectionVerifier(), WARM, (2, 0), worn(0.5, seed, (-1, 0, 1), honest=False)) for seed in range(3)]
    assert max(losses) > 1e-3
