"""Observers of rounds: they receive proposal, scores and verdict, and their time is not counted."""

from __future__ import annotations

from time import sleep

import pytest
import torch

from outrider.engine.ledger import NUM_COLD
from outrider.engine.policy import FixedLength
from outrider.engine.round import RoundResult
from outrider.proposers.base import ScriptedProposer
from outrider.types import Context, Proposal, Round

from .toy import TableRunner, greedy_continuation, make_engine, make_request


def drafts(context: Context, k: int) -> list[list[int]]:
    return [[3] * min(k, limit) for limit in context.limits]


def test_an_observer_sees_every_round_as_it_was_settled() -> None:
    runner = TableRunner()
    engine = make_engine(ScriptedProposer.of_chains(drafts), k=2, runner=runner)
    seen: list[tuple[RoundResult, Round]] = []
    engine.observer = lambda result, round_: seen.append((result, round_))
    request = make_request("r", [1, 2], max_tokens=9)
    engine.add(request)
    emitted: list[int] = []
    while engine.has_work:
        (emission,) = engine.step()
        emitted += emission.token_ids
        last, round_ = seen[-1]
        (path,), (next_token,) = last.verdict.paths, last.verdict.next_tokens
        said = [*last.proposal.token_ids[0, path].tolist(), next_token]
        assert said[: len(emission.token_ids)] == emission.token_ids
        assert torch.equal(last.scores.logits[0, 0], runner.logits_after(request.token_ids[: -len(emission.token_ids)]))
        assert round_.num_accepted == [len(path)]
        assert last.token_ids == [emission.token_ids] and last.texts == [emission.text]
    assert [round_.is_prefill for _, round_ in seen] == [True] + [False] * (len(seen) - 1)
    assert [last.k for last, _ in seen] == [2] * (len(seen) - 1) + [0]  # the last token leaves no room for drafts
    assert len(emitted) == 9


def test_a_path_that_ends_at_a_leaf_counts_only_its_depths_as_judged() -> None:
    runner = TableRunner()

    def tree(context: Context, k: int) -> Proposal:
        """Draft the correct token without a child and a wrong one with a child: the longest path has two drafts."""
        (right,) = greedy_continuation(runner, context.requests[0].token_ids, 1)
        wrong = 1 + right % 16
        return Proposal(torch.tensor([[right, wrong, wrong]]), torch.tensor([3]), None, torch.tensor([[-1, -1, 1]]))

    proposer = ScriptedProposer(tree)
    engine = make_engine(proposer, k=2, runner=runner)
    seen: list[Round] = []
    engine.observer = lambda _, round_: seen.append(round_)
    engine.add(make_request("r", [1, 2], max_tokens=9))
    engine.step()
    assert seen[0].depths == [2] and seen[0].num_accepted == [1] and seen[0].num_reached == [1]
    assert engine.stats.acceptance_rate == 1.0


def test_time_in_an_observer_is_not_counted() -> None:
    runner = TableRunner()
    engine = make_engine(ScriptedProposer.of_chains(drafts), k=2, runner=runner)
    engine.observer = lambda *_: sleep(0.2)
    engine.add(make_request("r", [1, 2], max_tokens=6))
    num_rounds = 0
    while engine.has_work:
        engine.step()
        num_rounds += 1
    assert num_rounds > 1 and engine.stats.times.total < 0.2 * num_rounds


@pytest.mark.parametrize("runs_model", [True, False])
def test_plain_rounds_are_cold_after_model_drafts_but_not_after_lookup(runs_model: bool) -> None:
    policy = FixedLength(2)
    lengths = iter([2] * 4 + [0] * 40)
    policy.next_lengths = lambda context: [next(lengths)] * len(context.requests)  # type: ignore[method-assign]
    proposer = ScriptedProposer.of_chains(drafts)
    proposer.is_model_free = not runs_model
    engine = make_engine(proposer, policy=policy)
    seen: list[Round] = []
    engine.observer = lambda _, round_: seen.append(round_)
    engine.add(make_request("r", [1, 2], max_tokens=24))
    while engine.has_work:
        engine.step()
    plain = [each.is_cold for each in seen if not any(each.lens)]
    assert len(plain) > NUM_COLD + 1 and not any(each.is_cold for each in seen if any(each.lens))
    assert plain == [runs_model] * NUM_COLD + [False] * (len(plain) - NUM_COLD)


def test_the_time_of_a_round_that_prefills_is_not_the_cost_of_a_pass() -> None:
    engine = make_engine()
    engine.add(make_request("r", [1, 2], max_tokens=3))
    for is_known in (False, True):
        engine.step()
        assert (engine.runner.costs.plain_round(1, 2) is not None) == is_known
