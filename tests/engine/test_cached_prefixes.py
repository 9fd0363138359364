"""Requests that start from a cached prefix, with proposers that read hidden states of the target."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.policy import FixedLength
from outrider.proposers.base import Proposer, chain_proposal
from outrider.types import scatter_rows

from .toy import TableRunner, greedy_continuation, make_engine, make_request, outputs, run, shared_length

FIRST = [3, 4, 5, 6, 8, 9, 10, 11]


class Reader(Proposer):
    """Drafts the greedy continuation, and keeps what it has read of finished requests, as a head keeps its cache."""

    needs_hidden = (2,)

    def __init__(self, runner):
        self.runner, self.read, self.kept = runner, {}, []
        self.texts = {}
        self.num_received = 0  # hidden states

    def start(self, request):
        known = max(self.kept, key=lambda kept: shared_length(kept[0], request.token_ids), default=([], torch.empty(0, 3)))
        count = shared_length(known[0], request.token_ids[:-1])
        self.read[request.request_id] = known[1][:count]
        return count

    def propose(self, context, k):
        chains = []
        for b, request in enumerate(context.requests):
            new, read = context.hidden[2][b], self.read.setdefault(request.request_id, torch.empty(0, 3))
            chains.append([])
            if not len(new):  # its prompt is not read yet
                continue
            self.num_received += len(new)
            missing = len(request.token_ids) - 1 - len(read)
            assert len(new) >= missing
            self.read[request.request_id] = torch.cat((read, new[len(new) - missing :]))
            wanted = [self.runner.logits_after(request.token_ids[: i + 1])[:3] + 2 for i in range(len(request.token_ids) - 1)]
            torch.testing.assert_close(self.read[request.request_id], torch.stack(wanted))
            chains[-1] = greedy_continuation(self.runner, request.token_ids, min(k, context.limits[b]))
        self.texts = {request.request_id: request.token_ids for request in context.requests}
        return chain_proposal(chains)

    def retire(self, request_ids):
        for request_id in request_ids:
            if request_id in self.read and request_id in self.texts:
                read = self.read[request_id]
                self.kept.append((self.texts[request_id][: len(read)], read))
        self.release(request_ids)

    def release(self, request_ids):
        for request_id in request_ids:
            self.read.pop(request_id, None)


def conversation(engine, turns=3):
    """Run turns that each continue the text so far. Return their requests, and compare their outputs with plain decoding."""
    text, asked = list(FIRST), []
    for turn in range(turns):
        request = make_request(f"turn {turn}", text, max_tokens=12)
        found = outputs(run(engine, [request]))[request.request_id]
        assert found == outputs(run(make_engine(), [make_request("plain", text, max_tokens=12)]))["plain"]
        asked.append(request)
        text = [*request.token_ids, 3, 5 + turn, 4]
    return asked


def prepared(k=3, policy=None):
    runner = TableRunner()
    runner.kept = []
    proposer = Reader(runner)
    return make_engine(proposer, k, policy, runner), proposer, runner


def test_only_what_neither_has_cached_is_read_again():
    engine, proposer, _ = prepared()
    _, *later = conversation(engine)
    assert engine.stats.faults == 0 and engine.stats.num_accepted > 15
    # Of each turn the proposer misses what was committed in its last round, and the request's last token.
    assert proposer.num_received < len(later[-1].token_ids) + 3 * 6
    assert engine.stats.num_cached > sum(request.num_prompt_tokens - 3 - 6 for request in later)


@pytest.mark.parametrize("forgetful", ["target", "proposer"])
def test_all_is_read_again_where_one_of_both_has_forgotten_the_prefix(forgetful):
    engine, proposer, runner = prepared()
    end = proposer.retire if forgetful == "proposer" else runner.retire

    def forget(request_ids):
        end(request_ids)
        (proposer if forgetful == "proposer" else runner).kept.clear()

    (proposer if forgetful == "proposer" else runner).retire = forget
    asked = conversation(engine)
    assert engine.stats.faults == 0
    assert proposer.num_received > sum([len(request.token_ids) - 6 for request in asked])


def test_a_sample_of_a_prompt_that_began_with_a_cached_prefix():
    """Only the hidden states after the prefix are known; the proposer has those of the prefix."""
    engine, _, _ = prepared()
    (first,) = conversation(engine, turns=1)
    prompt = [*first.token_ids, 3, 7, 4]
    source, sample = (make_request(name, prompt, max_tokens=12) for name in ("source", "sample"))
    engine.add(source)
    engine.add(sample, fork_of="source")
    found = {"source": [], "sample": []}
    while engine.has_work:
        for emission in engine.step():
            found[emission.request_id] += emission.token_ids
    (expected, *_) = outputs(run(make_engine(), [make_request("plain", prompt, max_tokens=12)]))["plain"]
    assert found == {"source": expected, "sample": expected}
    assert engine.stats.faults == 0


class Declining(FixedLength):
    """Takes no request that could start from more of a cached prefix."""

    def start(self, request, batch, num_draft_cached, num_recomputed):
        self.told = batch, num_draft_cached, num_recomputed
        return num_recomputed == 0


def test_a_request_that_does_not_take_part_in_drafting_takes_the_whole_prefix():
    engine, proposer, runner = prepared(policy=Declining(0))
    read = []
    score = runner.score

    def watched(context, proposal, hidden=()):
        read.append([len(request.token_ids) - len(runner.cached[request.request_id]) for request in context.requests])
        return score(context, proposal, hidden)

    runner.score = watched
    asked = conversation(engine)
    assert [request.may_draft for request in asked] == [True, False, False]
    assert max(read[12:]) == [4]  # the last token of the turn before, and those of this one
    assert proposer.num_received == 0


def test_the_policy_is_told_what_the_proposer_has_read_and_what_the_target_could_take():
    policy = Declining(3)
    policy.start = lambda *told: asked.append(told[1:]) or True
    engine, proposer, runner = prepared(policy=policy)
    asked = []
    (first,) = conversation(engine, turns=1)
    num_draft_cached = len(proposer.kept[0][1])
    run(engine, [make_request("second", [*first.token_ids, 3, 5], max_tokens=12)])
    assert asked == [(1, 0, 0), (1, num_draft_cached, len(first.token_ids) - 1 - num_draft_cached)]
    runner.kept.clear()
    run(engine, [make_request("third", [*first.token_ids, 3, 5], max_tokens=12)])
    assert asked[2][1] > 0 == asked[2][2]


def test_a_request_with_its_own_k_is_drafted_for_where_others_would_not_be():
    engine, proposer, _ = prepared(policy=Declining(0))
    (first,) = conversation(engine, turns=1)
    second = make_request("second", [*first.token_ids, 3, 5], max_tokens=12)
    second.num_draft_tokens = 3
    run(engine, [second])
    assert second.may_draft and engine.stats.num_accepted > 5 and engine.stats.faults == 0
    assert proposer.num_received > len(first.token_ids)  # it had read nothing of the first turn


def test_no_drafts_are_requested_before_there_are_hidden_states():
    """Otherwise the policy would learn that the proposer makes none."""
    engine, _, _ = prepared()
    rounds = []
    engine.observer = lambda result, _: rounds.append((result.context.request_ids[0], result.k))
    conversation(engine, turns=2)
    assert [k for name, k in rounds if name == "turn 1"][:2] == [0, 3]


def test_a_proposer_that_fails_at_the_start_reads_nothing_more():
    engine, proposer, _ = prepared()
    conversation(engine, turns=1)

    def fail(request):
        raise RuntimeError("no memory")

    proposer.start, num_received = fail, proposer.num_received
    conversation(engine, turns=2)
    assert engine.stats.faults == 2 and proposer.num_received == num_received


def test_rows_of_requests_without_drafts_have_no_parents():
    parents = torch.tensor([[-1, 0, 0]])
    assert scatter_rows(parents, [1], 3, fill=-1).tolist() == [[-1] * 3, [-1, 0, 0], [-1] * 3]
