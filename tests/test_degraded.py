"""Deliberately degraded drafts: the share that is kept, and the verdicts that the inner proposer gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import make_request

from outrider.proposers.base import ScriptedProposer
from outrider.proposers.degraded import Degraded
from outrider.sampling import Sampler
from outrider.types import Context, Proposal, Verdict

VOCAB = 50


def context(num_texts: int = 1) -> Context:
    requests = tuple(make_request([1] * (3 + b), seed=b, name=f"r{b}") for b in range(num_texts))
    return Context(requests, (9,) * num_texts, Sampler(requests, VOCAB))


def proposing(proposal: Proposal) -> ScriptedProposer:
    return ScriptedProposer(lambda context, k: proposal)


def chain(batch: int = 1, width: int = 4, drawn: bool = True) -> Proposal:
    token_ids = torch.arange(5, 5 + batch * width).view(batch, width)
    probs = torch.full((batch, width, VOCAB), 1 / VOCAB) if drawn else None
    return Proposal(token_ids, torch.full((batch,), width), probs)


def test_at_accuracy_1_the_proposal_is_unchanged() -> None:
    inner = chain()
    assert Degraded(proposing(inner)).propose(context(), 4) is inner


@pytest.mark.parametrize("drawn", [True, False])
def test_at_accuracy_0_every_draft_is_another_token_with_its_true_probs(drawn: bool) -> None:
    inner = chain(batch=200, drawn=drawn)
    before = inner.token_ids.clone()
    proposal = Degraded(proposing(inner), 0.0).propose(context(200), 4)
    assert (proposal.token_ids != inner.token_ids).all() and proposal.token_ids.max() < VOCAB
    assert torch.equal(inner.token_ids, before)
    if drawn:
        assert torch.equal(proposal.probs.argmax(-1), proposal.token_ids)
        assert torch.equal(proposal.probs.amax(-1), torch.ones(200, 4))
        assert torch.allclose(inner.probs, torch.tensor(1 / VOCAB))
    else:
        assert proposal.probs is None


def test_accuracy_is_the_share_of_kept_drafts_which_keep_their_probs() -> None:
    inner = chain(batch=500)
    proposal = Degraded(proposing(inner), 0.7).propose(context(500), 4)
    kept = proposal.token_ids == inner.token_ids
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.04)
    assert torch.equal(proposal.probs[kept], inner.probs[kept])
    again = Degraded(proposing(inner), 0.7).propose(context(500), 4)
    assert torch.equal(again.token_ids, proposal.token_ids)


def test_a_tree_keeps_its_shape() -> None:
    parents = torch.tensor([[-1, -1, 0, 2]])
    inner = Proposal(torch.tensor([[5, 6, 7, 8]]), torch.tensor([4]), None, parents)
    proposal = Degraded(proposing(inner), 0.0).propose(context(), 3)
    assert torch.equal(proposal.parents, parents) and torch.equal(proposal.lens, inner.lens)
    assert not (proposal.token_ids == inner.token_ids).any()


def test_the_inner_proposer_gets_the_verdict_on_its_own_drafts_only() -> None:
    """If a replaced token is accepted, the inner proposer sees it as the next token of a shorter path."""
    heard: list[Any] = []
    inner = proposing(chain())
    inner.commit = lambda context, verdict: heard.append(verdict)  # type: ignore[method-assign]
    worn = Degraded(inner, 0.5)
    for seed in range(40):
        round_ = Context((make_request([1], seed=seed),), (9,), Sampler([make_request([1])], VOCAB))
        proposal = worn.propose(round_, 4)
        wrong = (proposal.token_ids != chain().token_ids)[0].tolist()
        verdict = Verdict([[0, 1, 2]], [9])
        worn.commit(round_, verdict)
        first = next((node for node in range(3) if wrong[node]), None)
        if first is None:
            assert heard[-1] == verdict
        else:
            assert heard[-1] == Verdict([[*range(first)]], [int(proposal.token_ids[0, first])])
        assert verdict.paths == [[0, 1, 2]], "the engine's own verdict must stay"


def test_attributes_are_those_of_the_inner_proposer() -> None:
    class Tree(ScriptedProposer):
        name, max_drafts, needs_hidden = "tree", 7, (2,)

        def num_nodes(self, k: int) -> int:
            return 3 * k

    worn = Degraded(Tree(lambda context, k: chain()))
    assert (worn.name, worn.max_drafts, worn.needs_hidden, worn.num_nodes(2)) == ("tree", 7, (2,), 6)
