"""Forced tokens in the engine: limits of runs, statistics, and the proposer's view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_grammar import RuleGrammar

from outrider.engine.config import build_engine
from outrider.engine.grammar_drafts import MAX_DRAFTS, MAX_STATES, TokenGuesser
from outrider.engine.options import Speculation
from outrider.engine.policy import FixedLength
from outrider.engine.scheduler import Scheduler
from outrider.proposers.base import Proposer, ScriptedProposer, chain_proposal
from outrider.proposers.plain import PlainProposer
from outrider.sampling import sampler
from outrider.types import Context, Proposal, Request, Round, SamplingParams, Verdict

from .test_failures import failing_on_drafts
from .toy import EOS, VOCAB, TableRunner, greedy_continuation, make_engine, make_request, oracle, outputs, run

FREE = range(1, VOCAB)


def forced(request_id: str, rule, prompt: Sequence[int] = (3, 4), **params) -> Request:
    """Return a request whose output follows a rule."""
    request = make_request(request_id, list(prompt), **params)
    return replace(request, matcher=RuleGrammar(rule, VOCAB, EOS).matcher())


def blocks(output: tuple[int, ...]) -> Sequence[int]:
    """Allow one free token, then four forced ones that depend on it, repeatedly."""
    at = len(output) % 5
    return FREE if at == 0 else [1 + (output[len(output) - at] + at) % (VOCAB - 1)]


def plain_output(rule, runner: TableRunner | None = None, **params) -> tuple:
    engine = make_engine(runner=runner, grammar_drafts=False)
    return outputs(run(engine, [forced("a", rule, **params)]))["a"]


class Recorder(Proposer):
    """Drafts the same token k times, and records requests and verdicts."""

    name = "recorder"

    def __init__(self, **attributes) -> None:
        self.seen: list[tuple[list[int], int]] = []  # tokens and limit
        self.told: list[tuple[list[int], int]] = []  # tokens and number of accepted drafts
        for name, value in attributes.items():
            setattr(self, name, value)

    def propose(self, context: Context, k: int) -> Proposal:
        pairs = list(zip(context.requests, context.limits, strict=True))
        self.seen += [(list(request.token_ids), limit) for request, limit in pairs]
        return chain_proposal([[5] * min(k, limit) for _, limit in pairs])

    def commit(self, context: Context, verdict: Verdict) -> None:
        for request, path in zip(context.requests, verdict.paths, strict=True):
            self.told.append((list(request.token_ids), len(path)))


def test_a_forced_run_is_one_pass() -> None:
    engine = make_engine()
    found = run(engine, [forced("a", blocks, max_tokens=50)])
    assert outputs(found)["a"] == plain_output(blocks, max_tokens=50)
    assert engine.runner.num_scores == 11  # no forced tokens precede the first round
    stats = engine.stats
    assert stats.num_tokens == 50 and stats.num_rounds == 11 and stats.num_grammar_tokens == 39  # the last round has room for 3
    assert stats.num_drafts == stats.num_reached == stats.num_drafted_rounds == 0 and stats.acceptance_histogram == {0: 11}
    origins = [origin for emission in found["a"] for origin in emission.origins]
    assert origins[:6] == ["plain", "grammar", "grammar", "grammar", "grammar", "plain"]


def test_drafts_that_the_target_fails_on_are_not_made_again(caplog: pytest.LogCaptureFixture) -> None:
    runner = TableRunner()
    failing_on_drafts(runner, "a", "raises")
    engine = make_engine(runner=runner)
    found = run(engine, [forced("a", blocks, max_tokens=50)])
    assert outputs(found)["a"] == plain_output(blocks, max_tokens=50)
    assert engine.stats.faults == len(caplog.records) == 1
    assert not engine._grammar_drafts._stopped


@pytest.mark.parametrize("length", [3, MAX_DRAFTS, MAX_DRAFTS + 1, 40])
def test_a_run_at_the_end_ends_with_the_text(length: int) -> None:
    """The end-of-sequence token is forced too, but needs no row: it is the round's next token."""

    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return FREE if not output else [EOS] if len(output) > length else [1 + len(output) % 9]

    widths = []
    engine = make_engine()
    score = engine.runner.score

    def watched(context, proposal, hidden=()):
        widths.append(proposal.num_nodes)
        return score(context, proposal, hidden)

    engine.runner.score = watched
    tokens, _, reason = outputs(run(engine, [forced("a", rule, max_tokens=90)]))["a"]
    assert (tokens, "", reason) == plain_output(rule, max_tokens=90) and reason == "stop" and tokens[-1] == EOS
    assert max(widths) <= MAX_DRAFTS and sum(widths) + len(widths) == len(tokens) == length + 2
    assert len(widths) == 1 + -(-(length + 1) // (MAX_DRAFTS + 1))


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_inside_a_run(max_tokens: int) -> None:
    engine = make_engine(oracle(TableRunner()), k=3)
    found = outputs(run(engine, [forced("a", blocks, max_tokens=max_tokens)]))["a"]
    assert found == plain_output(blocks, max_tokens=max_tokens)
    assert len(found[0]) == max_tokens and found[2] == "length"


def test_a_stop_token_inside_a_run() -> None:
    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return FREE if len(output) < 2 else [1 + len(output) % 9]

    engine = make_engine()
    found = run(engine, [forced("a", rule, stop_token_ids=(6,), max_tokens=40)])
    tokens, _, reason = outputs(found)["a"]
    assert tokens[2:] == [3, 4, 5, 6] and reason == "stop" and engine.stats.num_grammar_tokens == 4
    assert (tokens, "", reason) == plain_output(rule, stop_token_ids=(6,), max_tokens=40)


@pytest.mark.parametrize("after", [0, 1, 4, MAX_DRAFTS, MAX_DRAFTS + 1])
def test_a_dead_end_ends_the_request_where_plain_decoding_does(after: int) -> None:
    """The text before it is kept, and the other request of the batch continues."""

    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return FREE if len(output) < 2 else [] if len(output) == 2 + after else [2]

    engine = make_engine()
    found = run(engine, [forced("a", rule, max_tokens=60), make_request("b", [5, 6], max_tokens=20)])
    assert outputs(found)["a"] == plain_output(rule, max_tokens=60)
    assert outputs(found)["a"][2] == "error" and len(outputs(found)["a"][0]) == 2 + after
    assert "fully masked" in found["a"][-1].error and len(outputs(found)["b"][0]) == 20


@pytest.mark.parametrize("params", [{"banned_token_ids": (7,)}, {"allowed_token_ids": tuple(set(range(1, VOCAB)) - {7})}])
def test_a_forced_token_that_the_request_forbids_is_a_dead_end(params: dict) -> None:
    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return FREE if len(output) < 1 else [7] if len(output) == 4 else [2]

    found = outputs(run(make_engine(), [forced("a", rule, max_tokens=60, **params)]))["a"]
    assert found == plain_output(rule, max_tokens=60, **params)
    assert found[2] == "error" and found[0][1:] == [2, 2, 2]


def test_bias_and_penalties_do_not_matter_to_a_forced_token() -> None:
    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return FREE if len(output) % 5 == 0 else [2]

    params = {"max_tokens": 31, "logit_bias": {2: -100.0}, "repetition_penalty": 3.0, "frequency_penalty": 2.0}
    for temperature in (0.0, 1.0):
        engine = make_engine()
        found = outputs(run(engine, [forced("a", rule, temperature=temperature, seed=3, **params)]))["a"]
        assert found[0][1:5] == [2] * 4 and engine.stats.num_grammar_tokens == 24 and engine.stats.num_rounds == 7
        assert temperature or found == plain_output(rule, **params)


def test_a_matcher_that_fails_ends_its_request_with_the_reason_and_no_other() -> None:
    def rule(output: tuple[int, ...]) -> Sequence[int]:
        if len(output) > 6:
            raise RuntimeError("too complex")
        return blocks(output)

    engine = make_engine()
    found = run(engine, [forced("a", rule, max_tokens=60), forced("b", blocks, max_tokens=20)])
    assert "too complex" in found["a"][-1].error and len(outputs(found)["b"][0]) == 20
    assert outputs(found)["a"] == plain_output(rule, max_tokens=60)


def trap(refuses: bool, lure: int):
    """Return a grammar that allows every token, but none after ``lure``; if ``refuses``, its matcher raises an error there."""

    def rule(output: tuple[int, ...]) -> Sequence[int]:
        if output and output[-1] == lure:
            if refuses:
                raise RuntimeError("too complex")
            return []
        return FREE

    return rule


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_tree", [False, True])
def test_a_draft_that_leads_into_a_dead_end_costs_the_request_nothing(is_tree: bool, temperature: float, refuses: bool) -> None:
    """The target accepts the draft or samples another token, as without drafts.

    Other requests of the batch are not affected.
    """
    runner = TableRunner()
    lure = next(token for token in FREE if token not in greedy_continuation(runner, [3, 4], 20))
    params = {"max_tokens": 20, "temperature": temperature, "seed": 2}

    def drafts(context: Context, k: int) -> Proposal:
        right = [greedy_continuation(runner, request.token_ids, 2) for request in context.requests]
        chain = chain_proposal([[first, lure, second] for first, second in right])
        return replace(chain, parents=torch.tensor([[-1, 0, 1]] * len(right))) if is_tree else chain

    proposer = ScriptedProposer(drafts)
    engine = make_engine(proposer, k=3, coupled=True)
    found = run(engine, [forced("a", trap(refuses, lure), **params), make_request("b", [5, 6], **params)])
    alone = make_engine(coupled=True, grammar_drafts=False)
    assert outputs(found) == outputs(
        run(alone, [forced("a", trap(refuses, lure), **params), make_request("b", [5, 6], **params)])
    )
    assert engine.stats.num_accepted > 0 and engine.stats.faults == 0
    if temperature == 0:
        assert outputs(found)["a"][2] == "length"


@pytest.mark.parametrize("refuses", [False, True])
def test_a_dead_end_that_the_target_takes_ends_the_request_with_its_text(refuses: bool) -> None:
    """As without drafts: the last draft before the dead end is accepted, and the next round reports the error."""
    runner = TableRunner()
    text = greedy_continuation(runner, [3, 4], 20)
    lure = text[10]
    rule = trap(refuses, lure)
    length = text.index(lure) + 1
    engine = make_engine(oracle(runner), k=4)
    found = run(engine, [forced("a", rule, max_tokens=20)])
    assert outputs(found)["a"] == plain_output(rule, max_tokens=20) == (text[:length], "", "error")
    assert ("too complex" if refuses else "fully masked") in found["a"][-1].error and engine.stats.faults == 0


def test_the_proposer_drafts_after_the_run_and_is_told_of_its_own_drafts() -> None:
    recorder = Recorder()
    engine = make_engine(recorder, k=2)
    found = outputs(run(engine, [forced("a", blocks, max_tokens=16), make_request("b", [5, 6], max_tokens=16)]))
    assert found["a"] == plain_output(blocks, max_tokens=16)
    text = [3, 4, *found["a"][0]]
    asked = [(seen, limit) for seen, limit in recorder.seen if seen[:2] == [3, 4]]
    assert asked and all(seen == text[: len(seen)] for seen, _ in asked)
    lens = [len(seen) for seen, _ in asked]
    assert lens == [2, *lens[1:]] and all((length - 2) % 5 == 0 for length in lens)  # drafts start after whole runs
    assert all(limit <= 16 - (len(seen) - 2) - 1 for seen, limit in asked)
    told = [(seen, accepted) for seen, accepted in recorder.told if seen[:2] == [3, 4]]
    assert told and all(seen == text[: len(seen)] and accepted <= 2 for seen, accepted in told)
    assert engine.stats.faults == 0


def test_the_cost_of_a_verdict_is_linear_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of a round's requests are listed as often in a large batch as in a small one."""
    listed, ids = [], Context.request_ids.fget
    monkeypatch.setattr(Context, "request_ids", property(lambda context: listed.append(1) or ids(context)))
    counts = []
    for batch in (2, 7):
        listed.clear()
        engine = make_engine(Recorder(), k=9)
        run(engine, [forced(f"r{b}", blocks, max_tokens=16) for b in range(batch)])
        counts.append(len(listed))
    assert counts[0] == counts[1]


def test_settings_of_a_batch_are_prepared_once_and_not_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, shaping = [], sampler.Shaping
    monkeypatch.setattr(sampler, "Shaping", lambda *given: prepared.append(given) or shaping(*given))
    recorder, params = Recorder(), {"max_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.4}
    engine = make_engine(recorder, k=2)
    found = outputs(run(engine, [forced("a", blocks, **params), make_request("b", [5, 6], **params)]))
    assert found["a"] == plain_output(blocks, **params)
    assert len({len(text) for text, _ in recorder.seen if text[:2] == [3, 4]}) > 4
    assert len(prepared) <= 5  # batches of two and of one request, and those of plain decoding


def test_a_proposer_that_needs_hidden_states_waits_until_the_run_is_read() -> None:
    for recorder in (Recorder(needs_hidden=(1,)), Recorder(drafts_ahead=False)):
        engine = make_engine(recorder, k=2)
        found = outputs(run(engine, [forced("a", blocks, max_tokens=31), make_request("b", [5, 6], max_tokens=31)]))
        assert found["a"] == plain_output(blocks, max_tokens=31)
        assert all(len(text) == 2 for text, _ in recorder.seen if text[:2] == [3, 4])  # every other round has a forced run
        assert sum(text[:2] == [5, 6] for text, _ in recorder.seen) > 5 and engine.stats.faults == 0


def test_trees_hang_on_the_last_forced_token() -> None:
    runner = TableRunner()

    def tree(context: Context, k: int) -> Proposal:
        best = torch.stack([runner.logits_after(request.token_ids).topk(2).indices for request in context.requests])
        third = best[:, 1:] % (VOCAB - 1) + 1
        token_ids = torch.cat([best.flip(1), third], 1)
        return Proposal(token_ids, torch.full((len(best),), 3), None, torch.tensor([[-1, -1, 1]] * len(best)))

    proposer = ScriptedProposer(tree)
    engine = make_engine(proposer, k=2, runner=runner)
    found = run(engine, [forced("a", blocks, max_tokens=40), make_request("b", [5, 6], max_tokens=40)])
    assert outputs(found)["a"] == plain_output(blocks, max_tokens=40)
    assert engine.stats.faults == 0 and engine.stats.num_accepted > 20
    assert len(found["a"]) < 10  # four forced tokens, a correct draft and the next token per round


@pytest.mark.parametrize("own", [0, 2, None])
def test_a_request_for_plain_decoding_gets_it(own: int | None) -> None:
    engine = make_engine(oracle(TableRunner()), k=3)
    request = replace(forced("a", blocks, max_tokens=20), num_draft_tokens=own)
    found = run(engine, [request, forced("b", blocks, max_tokens=20)])
    assert outputs(found)["a"] == outputs(found)["b"]
    origins = {origin for emission in found["a"] for origin in emission.origins}
    assert ("grammar" in origins) == (own != 0) and (origins == {"plain"}) == (own == 0)
    assert len(found["a"]) == 20 if own == 0 else len(found["a"]) < 8


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_more_drafts_than_the_target_takes_in_a_pass_are_not_scored(most: int) -> None:
    """A round has nine rows: four forced tokens, a draft for the next free one, and four forced tokens after it."""
    runner = TableRunner()
    runner.max_drafts = most
    engine, score, widths = make_engine(oracle(runner), k=4, runner=runner), runner.score, []

    def watched(context, proposal, hidden=()):
        widths.append(proposal.num_nodes)
        return score(context, proposal, hidden)

    runner.score = watched
    found = outputs(run(engine, [forced("a", blocks, max_tokens=40)]))["a"]
    assert found == plain_output(blocks, max_tokens=40) and max(widths) == most


def test_a_proposal_may_not_call_its_drafts_forced() -> None:
    def propose(context: Context, k: int) -> Proposal:
        return replace(chain_proposal([[5] * k for _ in context.requests]), is_grammar=torch.ones(1, k, dtype=torch.bool))

    engine = make_engine(ScriptedProposer(propose), k=2)
    assert len(outputs(run(engine, [make_request("a", [3], max_tokens=9)]))["a"][0]) == 9
    assert engine.stats.faults > 0 and engine.stats.num_grammar_tokens == 0


def test_rounds_book_forced_rows_in_the_pass_and_nowhere_else() -> None:
    rounds: list[Round] = []
    engine = make_engine(oracle(TableRunner(), right=1), k=2)
    engine.observer = lambda _, round_: rounds.append(round_)
    run(engine, [forced("a", blocks, max_tokens=60), make_request("b", [5, 6], max_tokens=60)])
    with_runs = [round_ for round_ in rounds if round_.num_grammar is not None and len(round_.lens) == 2]
    assert max(round_.num_grammar[0] for round_ in with_runs) > 4  # three before a draft, four after it
    assert len(with_runs) > 5
    for round_ in with_runs:
        assert round_.depths[0] <= 1 and round_.depths[1] == 2 and round_.num_grammar[1] == 0
        assert round_.lens == [round_.num_grammar[0] + round_.depths[0], 2]
        counts = zip(round_.num_accepted, round_.num_reached, round_.depths, strict=True)
        assert all(accepted <= judged <= depth for accepted, judged, depth in counts)
    assert engine.stats.most_drafts == 2 and max(engine.stats.acceptance_histogram) <= 2


def test_no_draft_is_rejected_where_all_are_accepted_beside_a_longer_run() -> None:
    engine = make_engine(oracle(TableRunner()), k=2)
    found = run(engine, [forced("a", blocks, max_tokens=60), make_request("b", [5, 6], max_tokens=60)])
    assert {origin for emission in found["b"] for origin in emission.origins} - {"plain"} == {"accepted", "bonus"}


class Asked(FixedLength):
    """Records the rounds it observes."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.rounds: list[tuple[Context, Round]] = []

    def observe(self, context: Context, round_: Round) -> None:
        self.rounds.append((context, round_))


def test_the_policy_sees_the_requests_as_committed() -> None:
    policy = Asked(2)
    engine = make_engine(Recorder(), policy=policy)
    request = forced("a", blocks, max_tokens=30)
    run(engine, [request])
    assert policy.rounds and all(context.requests[0] is request for context, _ in policy.rounds)


def test_sampling_params_with_a_grammar_of_ones_own() -> None:
    """Only ``allowed`` of the protocol is required, no library."""
    params = SamplingParams(grammar=RuleGrammar(blocks, VOCAB, EOS))
    assert params.grammar is not None and params.grammar.matcher().allowed([5], []).sum() == 1


@pytest.mark.parametrize(("k", "drafts"), [("auto", True), (4, True), (0, False)])
def test_drafts_from_a_grammar_are_one_option_for_every_method(k: int | str, drafts: bool) -> None:
    for option in (True, False):
        runner, speculation = TableRunner(), Speculation(num_draft_tokens=k, grammar_drafts=option)
        scheduler = Scheduler(runner.max_batch, runner.max_len, [EOS])
        engine = build_engine(speculation, runner, PlainProposer(), FixedLength(0), scheduler)
        run(engine, [forced("a", blocks, max_tokens=9)])
        assert (engine.stats.num_grammar_tokens > 0) == (drafts and option)


def test_a_proposer_that_needs_hidden_states_drafts_through_a_short_run() -> None:
    """The masks leave it no other token there; what it drafted of the run counts as the grammar's."""
    runner = TableRunner()
    rounds: list[Round] = []
    seen: list[int] = []

    def chains(context: Context, k: int) -> Sequence[Sequence[int]]:
        drafts = []
        for request, limit in zip(context.requests, context.limits, strict=True):
            assert request.matcher is not None
            output, chain = request.token_ids[request.num_prompt_tokens :], []
            seen.append(len(output))
            for _ in range(min(k, limit)):
                allowed = request.matcher.allowed(output, chain)
                assert allowed is not None
                chain.append(int(runner.logits_after(request.token_ids + chain).masked_fill(~allowed, -1e9).argmax()))
            drafts.append(chain)
        return drafts

    proposer = ScriptedProposer.of_chains(chains)
    proposer.drafts_ahead = False
    engine = make_engine(proposer, k=6, runner=runner)
    engine.observer = lambda _, round_: rounds.append(round_)
    found = run(engine, [forced("a", blocks, max_tokens=50)])
    assert outputs(found)["a"] == plain_output(blocks, max_tokens=50)
    assert engine.stats.num_rounds == len(seen) <= 7  # asked in every round: six drafts, what is forced after them, one more
    assert (
        engine.stats.num_grammar_tokens >= 32
        and engine.stats.num_accepted + engine.stats.num_grammar_tokens + len(rounds) == 50
    )
    assert all(each.depths == each.num_accepted and max(each.depths) <= 2 for each in rounds)  # of six, four are forced
    assert max(each.proposed_depths[0] for each in rounds) == 6


@pytest.mark.parametrize("is_tree", [False, True])
def test_forced_tokens_that_a_proposer_misses_are_drafted_without_it(is_tree: bool) -> None:
    """It is asked to draft through the span, and each of its drafts violates the grammar; those of another request do not."""

    def wrong(context: Context, k: int) -> Proposal:
        chain = chain_proposal([[0] * min(k, limit) for limit in context.limits])
        parents = torch.arange(-1, chain.num_nodes - 1).repeat(len(context.limits), 1)
        return replace(chain, parents=parents) if is_tree else chain

    proposer = ScriptedProposer(wrong)
    proposer.drafts_ahead = False
    engine = make_engine(proposer, k=6)
    found = run(engine, [forced("a", blocks, max_tokens=50), make_request("b", [5, 6], max_tokens=50)])
    assert outputs(found)["a"] == plain_output(blocks, max_tokens=50)
    assert len(found["a"]) == 11 and engine.stats.num_grammar_tokens == 39 and engine.stats.faults == 0


def test_a_proposer_is_not_asked_to_draft_at_a_dead_end() -> None:
    recorder = Recorder()
    found = run(make_engine(recorder, k=2), [forced("a", lambda output: FREE if len(output) < 2 else [], max_tokens=9)])
    assert outputs(found)["a"][2] == "error" and {len(text) for text, _ in recorder.seen} <= {2, 3}


def test_forced_nodes_of_a_tree_count_for_the_grammar() -> None:
    runner = TableRunner()
    rounds: list[Round] = []

    def tree(context: Context, k: int) -> Proposal:
        (request,) = context.requests
        output, drafts = request.token_ids[request.num_prompt_tokens :], []
        for parents in ((), (0,), (), (2,)):  # two branches, each a free token and the forced one after it
            path = [drafts[node] for node in parents]
            allowed = request.matcher.allowed(output, path) if request.matcher is not None else None
            assert allowed is not None
            logits = runner.logits_after(request.token_ids + path).masked_fill(~allowed, -1e9)
            drafts.append(int(logits.topk(2).indices[1 if len(drafts) == 2 else 0]))
        return Proposal(torch.tensor([drafts]), torch.tensor([4]), None, torch.tensor([[-1, 0, -1, 2]]))

    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return FREE if len(output) % 2 == 0 else [3]

    proposer = ScriptedProposer(tree)
    engine = make_engine(proposer, k=2, runner=runner)
    engine.observer = lambda _, round_: rounds.append(round_)
    found = run(engine, [forced("a", rule, max_tokens=40)])
    assert outputs(found)["a"] == plain_output(rule, max_tokens=40)
    assert all(each.depths == [1] for each in rounds[:-2]) and engine.stats.num_accepted <= len(rounds)
    assert (
        engine.stats.num_grammar_tokens + engine.stats.num_accepted + len(rounds) == 40
        and engine.stats.num_grammar_tokens >= 13
    )


@pytest.mark.parametrize("supports_trees", [True, False])
@pytest.mark.parametrize("grammar_drafts", [True, False])
def test_verdicts_have_the_indices_of_the_proposers_own_tree(grammar_drafts: bool, supports_trees: bool) -> None:
    """The grammar drops nodes of the tree, so the scored tree has other indices."""
    runner = TableRunner()
    runner.supports_trees = supports_trees
    heard: list[tuple[list[int], list[int]]] = []

    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return [5, 6] if len(output) < 3 else [3]

    class Trees(Proposer):
        """Draft a forbidden token, and two correct tokens, each after a forbidden one."""

        def propose(self, context: Context, k: int) -> Proposal:
            (request,) = context.requests
            self.output, right = request.token_ids[request.num_prompt_tokens :], []
            for _ in range(2):
                logits = runner.logits_after([*request.token_ids, *right])
                right.append(max(rule((*self.output, *right)), key=lambda token: float(logits[token])))
            return Proposal(torch.tensor([[1, right[0], 2, right[1]]]), torch.tensor([4]), None, torch.tensor([[-1, -1, 1, 1]]))

        def commit(self, context: Context, verdict: Verdict) -> None:
            heard.append((self.output, verdict.paths[0]))

    engine = make_engine(Trees(), k=2, runner=runner, grammar_drafts=grammar_drafts)
    found = run(engine, [forced("a", rule, max_tokens=4)])
    assert outputs(found)["a"] == plain_output(rule, max_tokens=4)
    assert heard[0] == ([], [1, 3]) and engine.stats.faults == 0


# --- guesses -----------------------------------------------------------------------------------------------------------------


def mask(*allowed: int) -> torch.Tensor:
    found = torch.zeros(VOCAB, dtype=torch.bool)
    found[list(allowed)] = True
    return found


def test_a_guesser_repeats_a_choice_until_it_is_wrong() -> None:
    guesser = TokenGuesser()
    assert guesser.guess(1, mask(2, 3)) is None
    guesser.learn(1, mask(2, 3), 2)
    assert guesser.guess(1, mask(2, 3)) == 2
    guesser.learn(1, mask(2, 3), 3)
    assert guesser.guess(1, mask(2, 3)) is None  # neither has proved right
    for _ in range(9):
        guesser.learn(1, mask(2, 3), 3)
    guesser.learn(1, mask(2, 3), 2)
    guesser.learn(1, mask(2, 3), 2)
    assert guesser.guess(1, mask(2, 3)) == 3  # a counter of 3 survives two errors
    guesser.learn(1, mask(2, 3), 2)
    assert guesser.guess(1, mask(2, 3)) is None


def test_what_was_chosen_last_anywhere_is_guessed_in_a_new_state() -> None:
    guesser = TokenGuesser()
    guesser.learn(1, mask(2, 3), 2)
    guesser.learn(1, mask(4, 5), 4)
    assert guesser.guess(1, mask(2, 4, 6)) == 4 and guesser.guess(9, mask(2, 6)) == 2
    assert guesser.guess(1, mask(5, 6)) is None  # a guess is an allowed token


def test_only_few_choices_are_guessed_and_the_memory_is_limited() -> None:
    guesser, many = TokenGuesser(), [*range(1, 1 + VOCAB // 2 + 1)]
    guesser.learn(1, mask(*many), 2)
    guesser.learn(1, mask(2), 2)
    assert guesser.guess(1, mask(*many)) is None and guesser.guess(1, mask(2)) is None
    guesser.learn(0, mask(2, 3), 3)
    for before in range(MAX_STATES):
        guesser.learn(before + 1, mask(2, 3), 2)
    assert len(guesser._choices) == MAX_STATES and (0, np.array([2, 3]).tobytes()) not in guesser._choices


def few(output: tuple[int, ...]) -> Sequence[int]:
    """Allow one free token, then four times one of two that depend on it, repeatedly."""
    at = len(output) % 5
    return FREE if at == 0 else [1 + (output[len(output) - at] + at) % (VOCAB - 1), 1 + at]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}])
def test_guesses_save_passes_and_change_no_text(params: dict) -> None:
    engine = make_engine()
    found = outputs(run(engine, [forced("a", few, max_tokens=150, **params)]))["a"]
    assert params or found == plain_output(few, max_tokens=150)  # a rejected guess takes other random numbers
    stats = engine.stats
    assert stats.num_grammar_tokens > 30 and stats.num_rounds + stats.num_grammar_tokens == 150
    assert stats.num_drafts == stats.num_accepted == 0


def test_guesses_take_the_place_of_drafts_that_are_not_far_more() -> None:
    """A proposer never drafts after guesses; what it is told is of the text before them."""
    for k, is_asked in ((2, False), (9, True)):
        recorder = Recorder()
        engine = make_engine(recorder, k=k)
        found = outputs(run(engine, [forced("a", few, max_tokens=200)]))["a"]
        assert found == plain_output(few, max_tokens=200)
        share = sum(limit > 0 for _, limit in recorder.seen) / engine.stats.num_rounds
        assert share > 0.9 if is_asked else share < 0.5
        assert all(text == [3, 4, *found[0]][: len(text)] for text, _ in recorder.seen)


def test_guesses_are_drafted_beside_a_proposer_that_cannot_draft_ahead() -> None:
    """K is more than the guesses, and at most twice as many: the proposer makes no drafts in their rounds."""
    counts = []
    for drafts_ahead in (True, False):
        engine = make_engine(Recorder(drafts_ahead=drafts_ahead), k=6)
        assert outputs(run(engine, [forced("a", few, max_tokens=150)]))["a"] == plain_output(few, max_tokens=150)
        counts.append((engine.stats.num_grammar_tokens, engine.stats.num_rounds))
    assert counts[0] == counts[1] and counts[0][0] > 30


def test_a_rejected_guess_is_no_rejected_draft() -> None:
    """The proposer's draft is right, the guess after it wrong."""

    def rule(output: tuple[int, ...]) -> Sequence[int]:
        return FREE if len(output) % 2 == 0 else [2, 3]

    engine = make_engine(oracle(TableRunner()), k=1)
    wrong = {2: 3, 3: 2}
    greedy = plain_output(rule, max_tokens=20)[0]
    rounds: list[Round] = []
    engine.observer = lambda _, round_: rounds.append(round_)
    with pytest.MonkeyPatch.context() as patch:
        guess = next(wrong[token] for token in greedy if token in wrong)
        patch.setattr(TokenGuesser, "guess", lambda self, before, allowed: guess if int(allowed.sum()) == 2 else None)
        assert outputs(run(engine, [forced("a", rule, max_tokens=20)]))["a"][0] == greedy
    drafted = [each for each in rounds if each.num_grammar is not None and each.num_grammar[0] and each.depths[0]]
    assert drafted and all(each.num_reached[0] <= each.depths[0] for each in drafted)
