"""Looking inside rounds: an observer sees what was proposed, scored and decided, and costs nothing where there is none."""

from __future__ import annotations

from time import sleep

import torch

from outrider.engine import Observation
from outrider.proposers.base import ScriptedProposer
from outrider.types import Context

from .toy import TableRunner, make_engine, make_request


def drafts(context: Context, k: int) -> list[list[int]]:
    return [[3] * min(k, limit) for limit in context.limits]


def test_an_observer_sees_every_round_as_it_was_settled() -> None:
    runner = TableRunner()
    engine = make_engine(ScriptedProposer.of_chains(drafts), k=2, runner=runner)
    seen: list[Observation] = []
    engine.observer = seen.append
    request = make_request("r", [1, 2], max_tokens=9)
    engine.add(request)
    emitted: list[int] = []
    while engine.has_work:
        (emission,) = engine.step()
        emitted += emission.token_ids
        last = seen[-1]
        path = last.verdict.path[0, : int(last.verdict.num_accepted[0])].tolist()
        said = [*last.proposal.token_ids[0, path].tolist(), int(last.verdict.next_token[0])]
        assert said[: len(emission.token_ids)] == emission.token_ids
        assert torch.equal(last.scores.logits[0, 0], runner.logits_after(request.token_ids[: -len(emission.token_ids)]))
        assert last.round.num_accepted == [len(path)]
    assert [each.is_prefill for each in seen] == [True] + [False] * (len(seen) - 1)
    assert len(emitted) == 9


def test_an_observer_s_time_belongs_to_no_round() -> None:
    runner = TableRunner()
    engine = make_engine(ScriptedProposer.of_chains(drafts), k=2, runner=runner)
    engine.observer = lambda seen: sleep(0.2)
    engine.add(make_request("r", [1, 2], max_tokens=6))
    num_rounds = 0
    while engine.has_work:
        engine.step()
        num_rounds += 1
    assert num_rounds > 1 and engine.stats.times.total < 0.2 * num_rounds
