"""Failing proposers and targets: which requests are affected, and that no output is lost."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.policy import FixedLength
from outrider.engine.round import Parts, TargetError, finish_round
from outrider.engine.scheduler import Batch
from outrider.engine.validation import check
from outrider.proposers.base import Proposer, ScriptedProposer, chain_proposal
from outrider.sampling import InvalidLogits
from outrider.types import Context, Proposal, Scores, ancestor_matrix
from outrider.verifiers.exact import ExactMatchVerifier
from outrider.verifiers.rejection import RejectionVerifier

from .test_engine import Features, plain, requests
from .toy import VOCAB, TableRunner, greedy_continuation, make_engine, make_request, oracle, outputs, run

# --- failing proposers ------------------------------------------------------------------------------------------------------


def good(context):
    return chain_proposal([[1, 2, 3]] * len(context.requests))


def with_row_0(proposal, **changes):
    """Return a proposal in which only row 0 is invalid."""
    token_ids, lens = proposal.token_ids.clone(), proposal.lens.clone()
    probs = torch.full((*token_ids.shape, VOCAB), 1 / VOCAB)
    if "token" in changes:
        token_ids[0, 1] = changes["token"]
    if "len" in changes:
        lens[0] = changes["len"]
    if "prob" in changes:
        probs[0, 1, 3] = changes["prob"]
    return Proposal(token_ids, lens, probs)


WHOLE = {
    "raises": lambda c, k: 1 / 0,
    "not a proposal": lambda c, k: None,
    "no batch": lambda c, k: Proposal(torch.zeros(3, dtype=torch.long), torch.zeros(1, dtype=torch.long)),
    "wrong batch": lambda c, k: Proposal.empty(len(c.requests) + 1),
    "float ids": lambda c, k: Proposal(torch.zeros(len(c.requests), 2), torch.ones(len(c.requests), dtype=torch.long)),
    "lens shape": lambda c, k: Proposal(good(c).token_ids, torch.ones(9, dtype=torch.long)),
    "probs shape": lambda c, k: Proposal(good(c).token_ids, good(c).lens, torch.ones(len(c.requests), 3, VOCAB + 1)),
    "parents shape": lambda c, k: Proposal(good(c).token_ids, good(c).lens, None, torch.zeros(9, 9, dtype=torch.long)),
}
ONE_ROW = {
    "id too high": lambda c, k: with_row_0(good(c), token=VOCAB),
    "id negative": lambda c, k: with_row_0(good(c), token=-1),
    "len too high": lambda c, k: with_row_0(good(c), len=4),
    "len negative": lambda c, k: with_row_0(good(c), len=-1),
    "nan": lambda c, k: with_row_0(good(c), prob=float("nan")),
    "inf": lambda c, k: with_row_0(good(c), prob=float("inf")),
    "negative prob": lambda c, k: with_row_0(good(c), prob=-1 / VOCAB),
    "not normalised": lambda c, k: with_row_0(good(c), prob=0.5),
    "parents": lambda c, k: Proposal(
        good(c).token_ids, good(c).lens, None, torch.tensor([[-1, 1, 0]] + [[-1, 0, 1]] * (len(c.requests) - 1))
    ),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fault", WHOLE)
def test_a_failing_proposer_does_not_change_the_output(fault, batch, caplog):
    engine = make_engine(ScriptedProposer(WHOLE[fault]), 3)
    found = run(engine, requests(batch))
    assert outputs(found) == plain(batch)
    assert engine.stats.faults == batch
    assert all(emissions[-1].stats.faults == 1 for emissions in found.values())
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fault", ONE_ROW)
def test_only_the_request_with_invalid_drafts_is_paused(fault, batch, caplog):
    faulty = {"left": 1}

    def script(context, k):
        if context.request_ids[0] == "r0" and len(context.requests[0].token_ids) > 6 and faulty["left"]:
            faulty["left"] = 0
            return ONE_ROW[fault](context, k)
        return good(context)

    engine = make_engine(ScriptedProposer(script), 3)
    found = run(engine, requests(batch))
    assert outputs(found) == plain(batch)
    assert [found[f"r{b}"][-1].stats.faults for b in range(batch)] == [1, 0, 0][:batch]
    assert found["r0"][-1].origins == ["plain"]
    assert all("plain" not in emission.origins for b in range(1, batch) for emission in found[f"r{b}"][:-1])
    assert len(caplog.records) == 1


def test_a_grammar_that_fails_pauses_only_its_request():
    """The sampler of the draft model asks it before the target does, if it forces no tokens itself."""
    runner = TableRunner()

    class Failing:
        def allowed(self, output, path):
            if len(output) == 4:
                raise RuntimeError("too complex")
            return torch.arange(VOCAB) > 0

    def script(context, k):
        logits = torch.stack([runner.logits_after(request.token_ids) for request in context.requests])
        tokens = context.sampler.tokens(logits[:, None])
        return chain_proposal([row[: min(k, limit)] for row, limit in zip(tokens.tolist(), context.limits, strict=True)])

    engine = make_engine(ScriptedProposer(script), 1, runner=runner, grammar_drafts=False)
    first, *others = requests()
    first.matcher = Failing()
    found = run(engine, [first, *others])
    assert outputs(found)["r0"][2] == "error" and "too complex" in found["r0"][-1].error
    assert [found[f"r{b}"][-1].stats.faults for b in (1, 2)] == [0, 0]
    assert [outputs(found)[f"r{b}"] for b in (1, 2)] == [plain()[f"r{b}"] for b in (1, 2)]


def test_invalid_draft_logits_pause_other_requests_for_one_round():
    runner = TableRunner()
    good, lens = oracle(runner), []

    def script(context, k):
        lens.append(len(context.requests))
        if len(lens) == 2:
            raise InvalidLogits(["r1"])  # as a draft model's sampler does
        return good.propose(context, k)

    found = run(make_engine(ScriptedProposer(script), 3, runner=runner), requests())
    assert outputs(found) == plain()
    assert lens[:4] == [3, 3, 2, 2]
    assert [found[f"r{b}"][-1].stats.faults for b in range(3)] == [0, 1, 0]
    assert [len(emission.token_ids) for emission in found["r0"][:4]] == [4, 1, 4, 4]


def test_a_failed_prefill_pauses_new_requests_only():
    class Late(Proposer):
        def prefill(self, requests):
            if any(request.request_id == "r1" for request in requests):
                raise RuntimeError("out of memory")
            return [True] * len(requests)

        def propose(self, context, k):
            return good(context)

    engine = make_engine(Late(), 3)
    first, second = requests(2)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()  # the target's prefill of the second one
    num_drafts = engine.stats.num_drafts
    engine.step()
    assert engine.stats.num_drafts == num_drafts + 3
    assert [engine._ledger.stats_of(name).faults for name in ("r0", "r1")] == [0, 1]


def test_a_proposer_that_fails_in_a_later_round_loses_no_output(caplog):
    class Late(Proposer):
        num_calls = 0

        def propose(self, context, k):
            return good(context)

        def commit(self, context, verdict):
            self.num_calls += 1
            if self.num_calls == 3:
                raise RuntimeError("commit")

        def release(self, request_ids):
            raise RuntimeError("release")

    engine = make_engine(Late(), 3)
    assert outputs(run(engine, requests(3))) == plain(3)
    assert engine.stats.faults == 3


def test_invalid_ids_in_the_padding_are_not_a_fault():
    def script(context, k):
        batch = len(context.requests)
        return Proposal(torch.tensor([[1, -7, 999]] * batch), torch.ones(batch, dtype=torch.long))

    engine = make_engine(ScriptedProposer(script), 3)
    assert outputs(run(engine, requests(3))) == plain(3)
    assert engine.stats.faults == 0 and engine.stats.num_drafts > 0


def test_invalid_parents_in_the_padding_are_not_a_fault():
    parents = torch.tensor([[-1, 0, 1], [-1, 99, -7]])
    checked = check(Proposal(torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 1]), None, parents), [9, 9], 3, VOCAB)
    assert checked.faults == {} and checked.lens == [3, 1]
    assert ancestor_matrix(checked.proposal.parents)[0, 2].tolist() == [True] * 3
    assert checked.proposal.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]


def test_commit_is_called_only_for_requests_that_were_drafted_for():
    heard = []

    class Listener(Proposer):
        def propose(self, context, k):
            return good(context)

        def commit(self, context, verdict):
            heard.append((len(context.requests), len(verdict.paths), len(context.requests[0].token_ids)))

    class EveryOther(FixedLength):
        def next_lengths(self, context):
            self.k = 3 - self.k
            return super().next_lengths(context)

    run(make_engine(Listener(), policy=EveryOther(0)), requests(1, max_tokens=9))
    assert len(heard) < 9 and all(rows == 1 and verdicts == 1 for rows, verdicts, _ in heard)


def test_features_continue_after_another_requests_invalid_draft():
    runner = TableRunner()

    class Invalid(Features):
        num_calls = 0

        def propose(self, context, k):
            proposal = super().propose(context, k)
            self.num_calls += 1
            if self.num_calls == 3:
                raise InvalidLogits(["r1"])
            return proposal

    engine = make_engine(Invalid(runner), 3, runner=runner)
    assert outputs(run(engine, requests())) == plain()
    assert engine.stats.faults == 1


# --- failing targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fails_for", "nan_for"])
def test_a_failing_target_is_an_error_for_that_request_alone(kind):
    runner = TableRunner()
    runner.kept = []
    engine = make_engine(oracle(runner, 1), 3, runner=runner)
    for request in requests(3):
        engine.add(request)
    engine.step()
    getattr(runner, kind).add("r1")
    last, tokens = {}, {}
    while engine.has_work:
        for emission in engine.step():
            last[emission.request_id] = emission
            tokens.setdefault(emission.request_id, []).extend(emission.token_ids)
    assert [last[f"r{b}"].finish_reason for b in range(3)] == ["length", "error", "length"]
    assert ("out of memory" if kind == "fails_for" else "NaN") in last["r1"].error
    assert engine.stats.faults == 0  # its drafts are not the reason
    wanted = plain(3)
    assert all(wanted[name][0][-len(tokens[name]) :] == tokens[name] for name in ("r0", "r2"))
    assert runner.cached == {}
    assert [text[0] for text in runner.kept] == [3, 1]  # the cache of a failed request is not reused


def test_a_failed_round_without_drafts_is_not_run_again():
    runner = TableRunner()
    runner.fails_for = {"r0"}
    (emission,) = run(make_engine(runner=runner), requests(1))["r0"]
    assert emission.finish_reason == "error" and runner.num_scores == 1


def failing_on_drafts(runner, name, kind):
    """Let the target fail on drafts of a request: with an exception, or with NaN logits after the last one."""
    score = runner.score

    def failing(context, proposal, hidden):
        scores = score(context, proposal, hidden)
        for b, request in enumerate(context.requests):
            if request.request_id == name and proposal.lens[b]:
                if kind == "raises":
                    raise RuntimeError("out of memory")
                scores.logits[b, proposal.lens[b]] = float("nan")
        return scores

    runner.score = failing


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_a_request_whose_drafts_the_target_fails_on_continues_without_them(batch, kind, caplog):
    runner = TableRunner()
    failing_on_drafts(runner, f"r{batch - 1}", kind)
    found = run(make_engine(oracle(runner, 1), 3, runner=runner), requests(batch))
    assert outputs(found) == plain(batch)
    assert [found[f"r{b}"][-1].stats.faults for b in range(batch)] == [0] * (batch - 1) + [1]
    (record,) = caplog.records
    assert "the target fails on its drafts: " in record.getMessage()


@pytest.mark.parametrize(("coupled", "reason"), [(False, "error"), (True, "length")])
def test_sampled_drafts_that_the_target_fails_on_end_the_request_unless_noise_is_coupled(coupled, reason):
    """To leave them out because of their values would bias the output; with coupled noise it is the same without them."""
    runner = TableRunner()
    failing_on_drafts(runner, "r1", "nan")
    proposer = ScriptedProposer(lambda context, k: with_row_0(good(context)))
    found = run(make_engine(proposer, 3, runner=runner, coupled=coupled), requests(temperature=1.0))
    assert [found[f"r{b}"][-1].finish_reason for b in range(3)] == ["length", reason, "length"]


def test_a_proposer_gets_no_verdict_on_drafts_that_the_target_fails_on():
    runner, heard = TableRunner(), set()

    class Listener(Proposer):
        def propose(self, context, k):
            return good(context)

        def commit(self, context, verdict):
            heard.update(context.request_ids)

    failing_on_drafts(runner, "r1", "raises")
    assert outputs(run(make_engine(Listener(), 3, runner=runner), requests())) == plain()
    assert heard == {"r0", "r2"}


def test_draft_probabilities_are_moved_to_the_targets_device():
    class Elsewhere:
        def score(self, context, proposal, hidden):
            return Scores(torch.zeros(1, 2, VOCAB, device="meta"))

    class Verifier(RejectionVerifier):
        def verify(self, proposal, target, random):
            devices.append(proposal.probs.device.type)
            raise RuntimeError

    devices, sampler = [], SimpleNamespace(is_deterministic=False, probs=lambda logits, *_, lens: logits)
    batch = Batch((), Context((), (), sampler))
    proposal = Proposal(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, dtype=torch.long), torch.zeros(1, 1, VOCAB))
    parts = Parts(None, Elsewhere(), None, Verifier(), ExactMatchVerifier(), needs_hidden=())
    with pytest.raises(TargetError):
        finish_round(batch, 1, proposal, parts)
    assert devices == ["meta"]


@pytest.mark.parametrize("batch", [1, 2])
def test_the_time_of_a_failed_round_is_not_counted(batch):
    runner = TableRunner(max_batch=batch)
    score = runner.score

    def slow(context, proposal, hidden):
        if runner.fails_for & set(context.request_ids):
            time.sleep(0.2)
        return score(context, proposal, hidden)

    runner.score, runner.fails_for = slow, {f"r{batch - 1}"}  # the last one
    found = run(make_engine(runner=runner), requests(batch) + [make_request("later", [3, 4], max_tokens=4)][: 2 - batch])
    assert found[f"r{batch - 1}"][-1].finish_reason == "error"
    assert max(emissions[-1].stats.times.total for emissions in found.values()) < 0.2


def test_after_a_target_failure_each_verdict_matches_its_own_tree():
    """The target scores chains and fails for one request: other verdicts contain indices of their own trees."""
    runner, heard = TableRunner(), {}
    runner.supports_trees = False

    class Trees(Proposer):
        """Draft two correct tokens and a wrong one, in another order for r0 than for the others."""

        def propose(self, context, k):
            right = [greedy_continuation(runner, request.token_ids, 2) for request in context.requests]
            first = [name == "r0" for name in context.request_ids]
            rows = [[a, b, 1] if is_first else [a, 1, b] for (a, b), is_first in zip(right, first, strict=True)]
            parents = [[-1, 0, -1] if is_first else [-1, -1, 0] for is_first in first]
            return Proposal(torch.tensor(rows), torch.full((len(rows),), 3), None, torch.tensor(parents))

        def commit(self, context, verdict):
            heard.update(zip(context.request_ids, verdict.paths, strict=True))

    engine = make_engine(Trees(), 2, runner=runner)
    for request in requests(3):
        engine.add(request)
    runner.nan_for.add("r1")
    engine.step()
    assert heard == {"r0": [0, 1], "r2": [0, 2]}


def test_the_policy_observes_only_rounds_that_it_decided_on():
    """After a failure requests run one by one, in another batch than the policy decided on."""

    class Strict(FixedLength):
        num_heard = 0

        def next_lengths(self, context):
            self.decided_for = context.request_ids
            return super().next_lengths(context)

        def observe(self, context, round_):
            assert context.request_ids == self.decided_for
            self.num_heard += 1

    runner, policy = TableRunner(), Strict(3)
    engine = make_engine(oracle(runner, 1), policy=policy, runner=runner)
    for request in requests(3):
        engine.add(request)
    engine.step()
    runner.nan_for.add("r1")
    ends = {emission.request_id: emission.finish_reason for emission in engine.step()}
    assert ends == {"r0": None, "r1": "error", "r2": None} and policy.num_heard == 1
    engine.step()
    assert policy.num_heard == 2


def test_a_request_that_fails_at_admission_keeps_its_own_error_if_the_round_raises():
    runner = TableRunner()
    start = runner.start
    runner.start = lambda request_id, *rest: 1 / 0 if request_id == "r1" else start(request_id, *rest)
    runner.commit = lambda *_: [].pop()
    engine = make_engine(runner=runner)
    for request in requests():
        engine.add(request)
    (emission,) = engine.step()
    assert emission.request_id == "r1" and "ZeroDivisionError: division by zero" in emission.error
    with pytest.raises(IndexError):
        engine.step()


def test_time_is_not_counted_after_a_batch_that_cannot_be_made():
    engine = make_engine()
    engine.add(requests()[0])
    engine._make_sampler = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine._clock._phase is None


class PanicException(BaseException):
    """Raised by libraries in Rust."""


@pytest.mark.parametrize("kind", [IndexError, PanicException])
@pytest.mark.parametrize("params", [{}, {"stop": ("never",)}, {"logprobs": 1}])
def test_a_tokenizer_that_fails_ends_only_its_request(params, kind):
    class Decoder:
        """Fails at the output of the request whose prompt begins with 7."""

        def __init__(self, prompt_ids, *_):
            self.fails = prompt_ids[0] == 7

        def feed(self, token_ids):
            if self.fails:
                raise kind("piece id is\nout of range")
            return "x" * len(token_ids)

        def flush(self):
            assert not self.fails
            return ""

    runner = TableRunner()
    found = run(make_engine(oracle(runner, 1), 3, runner=runner, detokenizer=Decoder), requests(**params))
    wanted = plain()
    assert all(outputs(found)[name] == (wanted[name][0], "x" * 23, "length") for name in ("r0", "r2"))
    (emission,) = found["r1"]
    assert emission.finish_reason == "error" and not emission.token_ids and not emission.text
    assert emission.error.startswith("the target failed: its tokenizer cannot decode tokens [")
    assert emission.error.endswith(f"]: {kind.__name__}: piece id is out of range")
    assert runner.cached == {}


@pytest.mark.parametrize("per_round", [1, 2])
def test_text_that_may_begin_a_stop_string_is_returned_if_a_later_token_cannot_be_decoded(per_round):
    """Text of tokens that were not committed is not returned."""

    class Decoder:
        def __init__(self, *_):
            self.texts = iter(["a", "E", "N"])

        def feed(self, token_ids):
            return "".join([next(self.texts, None) or [].pop() for _ in token_ids])

    runner = TableRunner()
    proposer = oracle(runner, 1) if per_round == 2 else None
    found = run(make_engine(proposer, per_round - 1, runner=runner, detokenizer=Decoder), requests(stop=("END",))[:1])
    text = "".join(emission.text for emission in found["r0"])
    num_tokens = sum(len(emission.token_ids) for emission in found["r0"])
    assert found["r0"][-1].finish_reason == "error"
    assert (num_tokens, text) == {1: (3, "aEN"), 2: (2, "aE")}[per_round]


def test_nothing_is_kept_of_requests_that_ended_in_an_interrupted_round():
    engine = make_engine()
    for request in requests(max_tokens=1):
        engine.add(request)

    def interrupted(*_):
        time.sleep(0.2)
        raise KeyboardInterrupt

    engine.policy.observe = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_work and not engine._ledger._requests
    assert engine._clock.take().total < 0.2  # it is not part of the next round


def test_every_request_can_continue_after_an_interrupt():
    runner = TableRunner()
    engine = make_engine(oracle(runner, 1), 3, runner=runner)
    mine = requests(3)
    for request in mine:
        engine.add(request)
    engine.step()
    commit, runner.commit = runner.commit, lambda context, verdict: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    runner.commit = commit
    while engine.has_work:
        engine.step()
    wanted = plain(3)
    assert all(request.token_ids[request.num_prompt_tokens :] == wanted[request.request_id][0] for request in mine)
