"""The engine loop: the output equals plain decoding for any drafts."""

from __future__ import annotations

import pytest
import torch

from outrider.engine import features
from outrider.engine.policy import FixedLength
from outrider.engine.scheduler import State
from outrider.proposers.base import Proposer, ScriptedProposer, chain_proposal
from outrider.types import OutriderError, Proposal
from outrider.verifiers.rejection import RejectionVerifier

from .toy import EOS, VOCAB, TableRunner, greedy_continuation, make_engine, make_request, oracle, outputs, run

PROMPTS = [[3, 4, 5], [7], [1, 2, 3, 4, 5, 6, 8, 9]]


def requests(batch=3, **params):
    params = {"max_tokens": 23} | params
    return [make_request(f"r{b}", PROMPTS[b], **params) for b in range(batch)]


def plain(batch=3, **params):
    return outputs(run(make_engine(), requests(batch, **params)))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("right", [0, 1, 3, None])
def test_greedy_output_equals_plain_decoding_at_any_acceptance(batch, k, right):
    runner = TableRunner()
    engine = make_engine(oracle(runner, right), k, runner=runner)
    assert outputs(run(engine, requests(batch))) == plain(batch)
    assert runner.cached == {}
    if k:
        assert engine.stats.num_accepted > 0 if right != 0 else engine.stats.num_accepted == 0


def test_full_acceptance_takes_one_pass_for_k_plus_one_tokens():
    runner = TableRunner()
    run(make_engine(oracle(runner), 4, runner=runner), requests(1, max_tokens=20))
    assert runner.num_scores == 4


def test_origins_distinguish_accepted_corrected_bonus_and_plain_tokens():
    runner = TableRunner()

    def origins(right, k):
        emissions = run(make_engine(oracle(runner, right), k, runner=runner), requests(1, max_tokens=12))["r0"]
        return emissions[0].origins

    assert origins(None, 3) == ["accepted"] * 3 + ["bonus"]
    assert origins(2, 3) == ["accepted"] * 2 + ["corrected"]
    assert origins(0, 3) == ["corrected"]
    assert origins(None, 0) == ["plain"]


@pytest.mark.parametrize("k", [1, 4, 8])
def test_eos_inside_a_draft_ends_the_request_where_plain_decoding_would(k):
    runner = TableRunner(eos_bias=1.0)
    wanted = outputs(run(make_engine(runner=TableRunner(eos_bias=1.0)), requests(max_tokens=60)))
    assert {reason for _, _, reason in wanted.values()} == {"stop"}
    assert outputs(run(make_engine(oracle(runner), k, runner=runner), requests(max_tokens=60))) == wanted
    ignoring = outputs(run(make_engine(oracle(runner), k, runner=runner), requests(max_tokens=60, ignore_eos=True)))
    assert all(len(tokens) == 60 and EOS in tokens for tokens, _, _ in ignoring.values())


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_min_tokens_delays_the_end_of_each_request_to_where_plain_decoding_would_end(k):
    def masked(request):
        text, least = list(request.token_ids), request.params.min_tokens
        while len(text) < request.num_prompt_tokens + request.params.max_tokens:
            logits = runner.logits_after(text).clone()
            logits[[EOS, 9]] -= 1000 * (len(text) < request.num_prompt_tokens + least)
            text.append(int(logits.argmax()))
            if text[-1] in (EOS, 9):
                return text[request.num_prompt_tokens :], "", "stop"
        return text[request.num_prompt_tokens :], "", "length"

    runner = TableRunner(eos_bias=4.0)
    many = [
        make_request(f"r{b}", PROMPTS[b % 3], max_tokens=30, min_tokens=least, stop_token_ids=(9,))
        for b, least in enumerate([0, 5, 12, 30])
    ]
    wanted = {request.request_id: masked(request) for request in many}
    lengths = [len(tokens) for tokens, _, _ in wanted.values()]
    assert lengths[0] < 5 < lengths[1] < 12 < lengths[2] < lengths[3] == 30
    engine = make_engine(oracle(runner), k, runner=runner)
    assert outputs(run(engine, many)) == wanted
    assert (engine.stats.num_accepted > 0) == (k > 0)


def test_min_tokens_that_leave_no_token_are_refused_when_the_request_enters():
    engine = make_engine()
    with pytest.raises(OutriderError, match="min_tokens and the token masks leave no token"):
        engine.add(make_request("bad", PROMPTS[0], allowed_token_ids=(EOS, 9), stop_token_ids=(9,), min_tokens=1))
    assert outputs(run(engine, requests())) == plain()


def test_stop_token_ids_end_a_request_inside_a_draft():
    runner = TableRunner()
    stop = greedy_continuation(runner, PROMPTS[0], 6)[-1]
    wanted = plain(1, stop_token_ids=(stop,))
    assert wanted["r0"][2] == "stop"
    assert outputs(run(make_engine(oracle(runner), 8, runner=runner), requests(1, stop_token_ids=(stop,)))) == wanted


def test_statistics_leave_out_what_a_stop_cut_off():
    """The verifier accepts the whole draft, but a stop token inside it ends the text."""
    runner = TableRunner()
    text = greedy_continuation(runner, [1, 2], 8)
    at = next(i for i in range(2, 8) if text[i] not in text[:i])
    engine = make_engine(oracle(runner), 8, runner=runner)
    found = run(engine, [make_request("r0", [1, 2], max_tokens=20, stop_token_ids=(text[at],))])["r0"]
    stats = found[-1].stats
    assert [token for emission in found for token in emission.token_ids] == text[: at + 1]
    assert (stats.num_rounds, stats.num_accepted, stats.num_reached) == (1, at + 1, at + 1)
    assert stats.mean_acceptance_length == stats.tokens_per_round == at + 1


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_max_tokens_ends_a_request_inside_a_draft(max_tokens):
    runner = TableRunner()
    # This proposer ignores the limits.
    eager = ScriptedProposer.of_chains(lambda c, k: [greedy_continuation(runner, r.token_ids, 5) for r in c.requests])
    found = outputs(run(make_engine(eager, 5, runner=runner), requests(max_tokens=max_tokens)))
    assert found == plain(max_tokens=max_tokens)
    assert all(len(tokens) == max_tokens and reason == "length" for tokens, _, reason in found.values())


def test_max_tokens_is_limited_by_the_context():
    runner = TableRunner(max_len=12)
    found = outputs(run(make_engine(oracle(runner), 4, runner=runner), requests(max_tokens=500)))
    assert [len(tokens) for tokens, _, _ in found.values()] == [12 - len(prompt) for prompt in PROMPTS]
    assert {reason for _, _, reason in found.values()} == {"length"}


@pytest.mark.parametrize("length", [0, 12, 13])
def test_a_prompt_as_long_as_the_context_is_rejected(length):
    runner = TableRunner(max_len=12)
    with pytest.raises(OutriderError, match=r"prompt"):
        make_engine(runner=runner).add(make_request("r", [1] * length))
    assert runner.num_scores == 0


def test_a_round_reaches_a_border_and_does_not_cross_it():
    runner, nums = TableRunner(), []
    engine = make_engine(oracle(runner), 4, runner=runner)
    engine.scheduler.borders = (8,)
    engine.observer = lambda result, _: nums.append(result.proposal.num_nodes)
    assert outputs(run(engine, requests(1, max_tokens=20))) == plain(1, max_tokens=20)
    assert nums == [4, 0, 4, 4, 3]  # the prompt has 3 tokens


def test_requests_above_max_batch_wait():
    runner = TableRunner(max_batch=2)
    many = [make_request(f"r{i}", PROMPTS[i % 3], max_tokens=5 + i) for i in range(7)]
    wanted = {
        request.request_id: (greedy_continuation(runner, request.token_ids, 5 + i), "", "length")
        for i, request in enumerate(many)
    }
    assert outputs(run(make_engine(oracle(runner, 1), 3, runner=runner), many)) == wanted


def test_later_requests_do_not_change_the_output_of_running_ones():
    runner = TableRunner()
    engine = make_engine(oracle(runner, 2), 3, runner=runner)
    first, second = requests(2)
    engine.add(first)
    engine.step()
    engine.add(second)
    while engine.has_work:
        engine.step()
    wanted = plain(2)
    assert first.token_ids[3:] == wanted["r0"][0] and second.token_ids[1:] == wanted["r1"][0]


# --- trees ------------------------------------------------------------------------------------------------------------------


def forked_tree(runner):
    """Draft two children of the root; the second is correct and has a correct child."""

    def script(context, k):
        right = [greedy_continuation(runner, request.token_ids, 2) for request in context.requests]
        rows = [[1 + a % (VOCAB - 1), a, b] for a, b in right]
        batch = len(rows)
        return Proposal(torch.tensor(rows), torch.full((batch,), 3), None, torch.tensor([[-1, -1, 1]] * batch))

    return ScriptedProposer(script)


@pytest.mark.parametrize("batch", [1, 3])
def test_trees_do_not_change_greedy_output(batch):
    runner = TableRunner()
    engine = make_engine(forked_tree(runner), 2, runner=runner)
    found = run(engine, requests(batch))
    assert outputs(found) == plain(batch)
    assert found["r0"][0].origins == ["accepted", "accepted", "bonus"]


class ChainVerifier(RejectionVerifier):
    supports_trees = False

    def verify(self, proposal, target, random):
        assert proposal.parents is None
        return super().verify(proposal, target, random)


def test_a_verifier_of_chains_gets_the_first_path_of_each_tree():
    runner = TableRunner()
    engine = make_engine(forked_tree(runner), 2, runner=runner, verifier=ChainVerifier())
    found = run(engine, requests(temperature=1.0))
    assert {reason for _, _, reason in outputs(found).values()} == {"length"}
    assert engine.stats.most_drafts == 1 and engine.stats.faults == 0


# --- sampling, logprobs, features -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 3])
def test_a_seed_reproduces_a_sample(k):
    def sample(seed):
        runner = TableRunner()
        return outputs(run(make_engine(oracle(runner, 1), k, runner=runner), requests(2, temperature=1.0, seed=seed)))

    assert sample(5) == sample(5)
    assert sample(5) != sample(6)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_coupled_noise_gives_the_same_sample_with_and_without_drafts(k):
    runner = TableRunner()
    params = {"temperature": 1.0, "seed": 3}
    wanted = outputs(run(make_engine(coupled=True), requests(3, **params)))
    assert wanted != plain(3)
    assert outputs(run(make_engine(oracle(runner, 2), k, runner=runner, coupled=True), requests(3, **params))) == wanted


@pytest.mark.parametrize("right", [0, 2, None])
def test_logprobs_come_from_the_row_each_token_was_sampled_from(right):
    runner = TableRunner()
    emissions = run(make_engine(oracle(runner, right), 4, runner=runner), requests(1, logprobs=2))["r0"]
    assert_logprobs_are_the_targets(runner, emissions)


def assert_logprobs_are_the_targets(runner, emissions):
    text = list(PROMPTS[0])
    for emission in emissions:
        assert len(emission.logprobs) == len(emission.token_ids)
        for token, found in zip(emission.token_ids, emission.logprobs, strict=True):
            row = torch.log_softmax(runner.logits_after(text), -1)
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert [i for i, _ in found.top] == row.topk(2).indices.tolist()
            text.append(token)


def test_logprobs_of_a_tree_come_from_the_row_each_token_was_sampled_from():
    runner = TableRunner()

    def tree(context, k):
        """Draft a wrong token, the right one and, after it, a wrong and the right one."""
        first, second = greedy_continuation(runner, context.requests[0].token_ids, 2)
        wrong = [1 + token % (VOCAB - 1) for token in (first, second)]
        drafts, parents = [[wrong[0], first, wrong[1], second]], [[-1, -1, 1, 1]]
        return Proposal(torch.tensor(drafts), torch.tensor([4]), None, torch.tensor(parents))

    proposer = ScriptedProposer(tree)
    emissions = run(make_engine(proposer, 2, runner=runner), requests(1, logprobs=2, max_tokens=12))["r0"]
    assert max(len(emission.token_ids) for emission in emissions) == 3
    assert_logprobs_are_the_targets(runner, emissions)


class Features(Proposer):
    """Drafts the greedy continuation and collects the hidden states it receives, by request."""

    needs_hidden = (2,)

    def __init__(self, runner):
        self.runner, self.seen = runner, {}

    def propose(self, context, k):
        chains = []
        for b, request in enumerate(context.requests):
            self.seen.setdefault(request.request_id, []).append(context.hidden[2][b])
            seen = torch.cat([rows for rows in self.seen[request.request_id] if rows.numel()] or [torch.empty(0, 3)])
            wanted = [self.runner.logits_after(request.token_ids[: i + 1])[:3] + 2 for i in range(len(request.token_ids) - 1)]
            if len(seen):  # from the second round on: all tokens except the last
                torch.testing.assert_close(seen, torch.stack(wanted) if wanted else seen[:0])
            chains.append(greedy_continuation(self.runner, request.token_ids, min(k, context.limits[b])))
        return chain_proposal(chains)

    def release(self, request_ids):
        for request_id in request_ids:
            self.seen.pop(request_id, None)


def test_features_of_every_committed_token_reach_the_proposer_once():
    runner = TableRunner()
    engine = make_engine(Features(runner), 3, runner=runner)
    assert outputs(run(engine, requests())) == plain()
    assert engine.stats.faults == 0 and engine.stats.num_accepted > 20


class TreeFeatures(Features):
    """Drafts a wrong token before each correct one, so that accepted nodes are not the first ones of the tree."""

    def propose(self, context, k):
        chain = super().propose(context, k)
        wrong = (chain.token_ids + 1) % VOCAB
        parents = 2 * torch.arange(chain.num_nodes).repeat_interleave(2) - 1
        tokens = torch.stack((wrong, chain.token_ids), 2).flatten(1)
        return Proposal(tokens, 2 * chain.lens, None, parents.repeat(len(tokens), 1))


def test_features_of_a_trees_accepted_path_reach_the_proposer():
    runner = TableRunner()
    engine = make_engine(TreeFeatures(runner), 3, runner=runner)
    assert outputs(run(engine, requests())) == plain()
    assert engine.stats.faults == 0 and engine.stats.num_accepted > 20


class RightFirst(Features):
    """Drafts a wrong token after each correct one, and records the accepted nodes."""

    def propose(self, context, k):
        chain = super().propose(context, k)
        tokens = torch.stack((chain.token_ids, (chain.token_ids + 1) % VOCAB), 2).flatten(1)
        parents = (2 * torch.arange(chain.num_nodes).repeat_interleave(2) - 2).clamp(min=-1)
        return Proposal(tokens, 2 * chain.lens, None, parents.repeat(len(tokens), 1))

    def commit(self, context, verdict):
        super().commit(context, verdict)
        self.accepted = verdict.paths


@pytest.mark.parametrize("supports_trees", [True, False])
def test_a_target_without_trees_scores_the_first_path_of_each(supports_trees):
    runner = TableRunner()
    runner.supports_trees = supports_trees
    proposer = RightFirst(runner)
    engine = make_engine(proposer, 3, runner=runner)
    widths = []
    engine.observer = lambda result, _: widths.append(result.proposal.num_nodes)
    assert outputs(run(engine, requests())) == plain()
    assert engine.stats.faults == 0 and engine.stats.num_accepted > 20
    assert max(widths) == (6 if supports_trees else 3)
    assert [0, 2, 4][: len(proposer.accepted[0])] == proposer.accepted[0]


class InTurn(RightFirst):
    """Drafts trees and chains in turn, and records the accepted nodes of the first request."""

    def __init__(self, runner):
        super().__init__(runner)
        self.is_chain, self.told = True, []

    def propose(self, context, k):
        self.is_chain = not self.is_chain
        return Features.propose(self, context, k) if self.is_chain else super().propose(context, k)

    def commit(self, context, verdict):
        self.told.append((self.is_chain, verdict.paths[0]))


def test_the_verdict_on_a_chain_after_a_tree_has_the_indices_of_the_chain():
    runner = TableRunner()
    runner.supports_trees = False
    engine = make_engine(proposer := InTurn(runner), 3, runner=runner)
    assert outputs(run(engine, requests(1))) == plain(1)
    assert proposer.told[:4] == [(False, [0, 2, 4]), (True, [0, 1, 2])] * 2 and engine.stats.faults == 0


def test_drafts_are_limited_by_what_the_target_can_roll_back():
    runner = TableRunner()
    runner.max_drafts = 2
    engine = make_engine(Features(runner), 5, runner=runner)
    widths = []
    engine.observer = lambda result, _: widths.append(result.proposal.num_nodes)
    assert outputs(run(engine, requests())) == plain()
    assert max(widths) == 2


@pytest.mark.parametrize("most", [1, 2, features.MAX_ROUNDS])
def test_features_of_rounds_without_drafts_reach_the_proposer(monkeypatch, most):
    monkeypatch.setattr(features, "MAX_ROUNDS", most)  # what is kept of more rounds is copied
    runner, lengths = TableRunner(), iter([3, 0, 0, 2, 0, 0, 0, 0, 0, 3] + [1] * 40)
    policy = FixedLength(3)  # one of 0 takes no request to drafting, and nothing is kept
    policy.next_lengths = lambda context: [next(lengths)] * len(context.requests)
    proposer, longest = Features(runner), 0
    engine = make_engine(proposer, policy=policy, runner=runner)
    for request in requests():
        engine.add(request)
    found = {request.request_id: [] for request in requests()}
    while engine.has_work:
        for emission in engine.step():
            found[emission.request_id].append(emission)
        longest = max([longest, *map(len, engine._guard._features._unseen.values())])
    assert outputs(found) == plain()
    assert engine.stats.faults == 0 and longest == min(most, 6)


def test_features_of_a_prompt_reach_each_of_its_samples():
    """The second sample is forked; the third starts after the first has ended and prefills the prompt again."""
    runner = TableRunner(max_batch=2)
    proposer = Features(runner)
    engine = make_engine(proposer, 2, runner=runner)
    wanted = outputs(run(make_engine(), [make_request("r0", PROMPTS[2], max_tokens=15)]))["r0"]
    engine.add(make_request("r0", PROMPTS[2], max_tokens=15))
    for name in ("r1", "r2"):
        engine.add(make_request(name, PROMPTS[2], max_tokens=15), fork_of="r0")
    found, scored_for_fork = {name: [] for name in ("r0", "r1", "r2")}, None
    while engine.has_work:
        for emission in engine.step():
            found[emission.request_id].append(emission)
        if scored_for_fork is None and "r1" in proposer.seen:
            scored_for_fork = proposer.seen["r1"][0].shape[0]
    assert scored_for_fork == len(PROMPTS[2]) - 1
    assert all(each == wanted for each in outputs(found).values())
    assert engine.stats.faults == 0


def test_features_of_a_prompt_are_kept_until_its_last_sample_started():
    runner = TableRunner(max_batch=2)
    engine = make_engine(Features(runner), 2, runner=runner)
    engine.add(make_request("r0", PROMPTS[2], max_tokens=23))
    for name in ("r1", "r2"):
        engine.add(make_request(name, PROMPTS[2], max_tokens=3), fork_of="r0")
    waiting = []
    while engine.has_work:
        engine.step()
        waiting.append(len(engine.scheduler.waiting))
        if engine.scheduler.find("r0"):
            assert bool(engine._guard._features._prompts) == (waiting[-1] > 0)
    assert 1 in waiting and 0 in waiting and engine.stats.faults == 0


def test_features_of_a_prompt_are_dropped_with_its_request_if_no_sample_started():
    runner = TableRunner(max_batch=1)
    engine = make_engine(Features(runner), 2, runner=runner)
    engine.add(make_request("r0", PROMPTS[2], max_tokens=9))
    engine.add(make_request("r1", PROMPTS[2], max_tokens=9), fork_of="r0")
    engine.step()
    states = engine._guard._features._prompts["r0"]
    engine.add(make_request("r2", PROMPTS[2], max_tokens=9), fork_of="r0")
    assert engine._guard._features._prompts["r0"] is states is not None
    for name in ("r1", "r2"):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    assert not engine._guard._features._prompts


def test_features_of_tokens_that_are_read_again_reach_the_proposer_once():
    """A model with longrope loses its cache in the round that crosses the original window."""
    runner = TableRunner()
    engine = make_engine(Features(runner), 2, runner=runner)
    engine.add(make_request("r0", PROMPTS[2], max_tokens=15))
    emissions = []
    while engine.has_work:
        emissions += engine.step()
        if len(emissions) == 2:
            runner.cached["r0"] = []
    assert engine.stats.faults == 0 and engine.stats.num_accepted > 5
    assert outputs({"r0": emissions}) == outputs(run(make_engine(), [make_request("r0", PROMPTS[2], max_tokens=15)]))


def test_a_sample_whose_prompt_cannot_be_copied_is_prefilled():
    runner = TableRunner(max_batch=2)
    runner.fork = lambda *_: False
    engine = make_engine(Features(runner), 2, runner=runner)
    engine.add(make_request("r0", PROMPTS[2], max_tokens=15))
    engine.step()
    engine.add(make_request("r1", PROMPTS[2], max_tokens=15), fork_of="r0")
    engine.step()
    assert engine.scheduler.find("r1").state is not State.PREFILL and "r1" in runner.cached
    while engine.has_work:
        engine.step()
    assert engine.stats.faults == 0


def test_a_sample_whose_prompt_has_ended_is_prefilled():
    engine = make_engine(runner=TableRunner(max_batch=1))
    engine.add(make_request("r0", PROMPTS[2], max_tokens=3))
    engine.add(make_request("r1", PROMPTS[2], max_tokens=3), fork_of="r0")
    found = {"r0": [], "r1": []}
    while engine.has_work:
        for emission in engine.step():
            found[emission.request_id].append(emission)
    assert outputs(found)["r0"] == outputs(found)["r1"] and found["r1"][-1].finish_reason == "length"


def test_features_of_requests_that_never_draft_are_not_kept():
    runner = TableRunner()
    engine = make_engine(Features(runner), 3, runner=runner)
    first, second = make_request("r0", PROMPTS[2], max_tokens=9), make_request("r1", PROMPTS[2], max_tokens=9)
    first.num_draft_tokens = second.num_draft_tokens = 0
    engine.add(first)
    engine.step()
    engine.add(second, fork_of="r0")
    engine.step()
    assert engine.scheduler.find("r1").state is State.DECODE  # copied
    assert not engine._guard._features._unseen


class Choosing(FixedLength):
    """Leaves some requests out of drafting in their first round, as the adaptive policy does."""

    def __init__(self, k, left_out):
        super().__init__(k)
        self.left_out = left_out

    def next_lengths(self, context):
        for request in context.requests:
            request.may_draft &= request.request_id not in self.left_out
        return [self.k if request.may_draft else 0 for request in context.requests]


@pytest.mark.parametrize("left_out", [{"r0"}, {"r1", "r2"}, {"r0", "r1", "r2"}])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_requests_that_take_no_part_in_drafting_change_no_output_and_keep_no_features(batch, left_out):
    runner = TableRunner(max_batch=batch)
    proposer = Features(runner)
    engine = make_engine(proposer, runner=runner, policy=Choosing(3, left_out))
    emissions = {request.request_id: [] for request in requests()}
    for request in requests():
        engine.add(request)
    seen = set()
    while engine.has_work:
        for emission in engine.step():
            emissions[emission.request_id].append(emission)
        seen |= proposer.seen.keys()
        assert not left_out & engine._guard._features._unseen.keys()
    assert outputs(emissions) == plain()
    assert engine.stats.faults == 0 and seen == emissions.keys() - left_out


def test_a_request_left_out_later_keeps_no_more_features():
    runner, policy = TableRunner(max_batch=3), Choosing(3, set())
    engine = make_engine(Features(runner), runner=runner, policy=policy)
    for request in requests():
        engine.add(request)
    engine.step()
    policy.k = 0
    engine.step()
    assert engine._guard._features._unseen.keys() == {"r0", "r1", "r2"}
    policy.left_out = {"r1"}
    engine.step()
    assert engine._guard._features._unseen.keys() == {"r0", "r2"}
    policy.left_out = {"r0", "r1", "r2"}
    engine.step()
    assert not engine._guard._features._unseen


@pytest.mark.parametrize("left_out", [{"r0"}, {"r1"}, {"r0", "r1"}])
def test_a_sample_whose_prompt_takes_no_part_in_drafting_is_copied(left_out):
    runner = TableRunner()
    proposer = Features(runner)
    engine = make_engine(proposer, runner=runner, policy=Choosing(2, left_out))
    wanted = outputs(run(make_engine(), [make_request("r0", PROMPTS[2], max_tokens=15)]))["r0"]
    engine.add(make_request("r0", PROMPTS[2], max_tokens=15))
    emissions = {"r0": engine.step(), "r1": []}
    engine.add(make_request("r1", PROMPTS[2], max_tokens=15), fork_of="r0")
    while engine.has_work:
        for emission in engine.step():
            emissions[emission.request_id].append(emission)
        if len(emissions["r1"]) == 1 and (entry := engine.scheduler.find("r1")):
            assert entry.state is State.DECODE and entry.request.may_draft == (not left_out)
    assert outputs(emissions) == {"r0": wanted, "r1": wanted} and engine.stats.faults == 0


def test_features_restart_at_the_first_token_after_an_interrupt():
    runner = TableRunner()
    engine = make_engine(Features(runner), 2, runner=runner)
    engine.add(make_request("r0", PROMPTS[2], max_tokens=12))
    first = engine.step()
    runner.commit, commit = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt), runner.commit
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    runner.commit = commit
    emissions = list(first)
    while engine.has_work:
        emissions += engine.step()
    assert outputs({"r0": emissions}) == outputs(run(make_engine(), [make_request("r0", PROMPTS[2], max_tokens=12)]))
    assert engine.stats.faults == 0


def test_no_features_are_kept_after_the_proposer_failed():
    runner = TableRunner()

    class Failing(Features):
        def propose(self, context, k):
            raise ValueError("no")

    engine = make_engine(Failing(runner), 2, runner=runner)
    engine.add(make_request("r0", PROMPTS[0], max_tokens=8))
    for _ in range(3):
        engine.step()
    assert not engine._guard._features._unseen


def test_trees_count_draft_steps_by_depth_and_cost_by_nodes():
    runner = TableRunner()

    def wide(context, k):
        """Draft two children of the root; the correct one has a child."""
        right = greedy_continuation(runner, context.requests[0].token_ids, 2)
        wrong = 1 + right[0] % (VOCAB - 1)
        return Proposal(torch.tensor([[wrong, *right]]), torch.tensor([3]), None, torch.tensor([[-1, -1, 1]]))

    rounds = []
    policy = FixedLength(2)
    policy.observe = lambda context, round_: rounds.append(round_)
    engine = make_engine(ScriptedProposer(wide), policy=policy, runner=runner)
    emissions = run(engine, requests(1, max_tokens=9))["r0"]
    assert {(tuple(r.lens), tuple(r.depths)) for r in rounds} == {((3,), (2,))}
    assert emissions[0].stats.acceptance_rate == 1.0 and emissions[0].stats.draft_acceptance_rate == pytest.approx(2 / 3)
