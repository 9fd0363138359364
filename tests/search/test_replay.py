"""Replay: what drafts are worth along a recorded text, against counts by hand and against the engine itself."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM
from outrider.engine import FixedLength
from outrider.engine.methods import fitting_proposers
from outrider.proposers.base import Proposer, ScriptedProposer
from outrider.proposers.combined import CombinedProposer
from outrider.proposers.degraded import Degraded
from outrider.proposers.ngram import NgramProposer
from outrider.search import Question, Search
from outrider.search.journal import Journal
from outrider.search.leading import lead
from outrider.search.prediction import predict
from outrider.search.traces import Drafted, Replay, Trace, replay_text
from outrider.search.traffic import Text
from outrider.types import Context, OutriderError, Proposal, SamplingParams
from tests.audit.toys import TableDraft
from tests.engine.toy import TableRunner, make_engine, make_request, run

from .toys import alone, fickle, prices, recorded, sure


def test_a_text_that_repeats_is_replayed_as_counted_by_hand() -> None:
    text = Text([1, 2, 3, 4, 9], SamplingParams(), [1, 2, 3, 4, 1, 2, 5, 7])
    trace = replay_text(NgramProposer(), text, 4, vocab_size=17)
    # Places whose last two tokens stood before: after "1 2" comes "3 4 9 1"; the text says "3 4 1 2".
    assert trace.rounds[2] == Drafted(4, (1.0, 1.0, 0.0))
    assert trace.rounds[3] == Drafted(4, (1.0, 0.0))  # after "2 3": "4 9 1 2"
    assert trace.rounds[4] == Drafted(4, (0.0,))  # after "3 4": "9 1 2 3", though three would be of use
    assert trace.rounds[6] == Drafted(4, (0.0,))  # after "1 2", the latter time: "3 4 1 2"; the text says "5"
    assert {place for place, drafted in trace.rounds.items() if drafted.depth} == {2, 3, 4, 6}


def test_a_text_based_proposer_keeps_nothing_of_a_replay() -> None:
    proposer = NgramProposer()
    replay_text(proposer, Text([1, 2], SamplingParams(), [1, 2, 1]), 4, vocab_size=17)
    assert not proposer._indexes


def test_a_replay_finds_no_text_in_the_proposer_s_memory_but_those_before_it(llm: LLM) -> None:
    """What was replayed, priced or led with it earlier in the search are the very texts that it is asked for."""
    method = "suffix:earlier_tokens=4000"
    proposers, _ = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, [method])
    said = [[50 + i for i in range(24)], [90 - i for i in range(24)]]
    texts = [Text([10 + i, 20], SamplingParams(max_tokens=24, seed=i), said[i]) for i in range(2)]
    pair = CombinedProposer(proposers[method], ScriptedProposer(lambda context, k: Proposal.empty(len(context.requests))))
    search = Search(llm, {**proposers, "both": pair}, texts, Question((4,)), Journal(None, {}))
    first = search.replay(method)
    assert first.alpha == 0.0  # nothing repeats
    search.journal = Journal(None, {})
    assert search.replay(method) == first
    assert search.replay("both").alpha == 0.0


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_replay_accepts_what_the_engine_accepts(k: int) -> None:
    runner = TableRunner()
    wrong = {7, 8, 12, 19, 20, 21, 30}
    proposer = fickle(runner, wrong)
    text = recorded(runner, [3, 5], 40)
    traces = lead(runner, proposer, [text], 6, 2)
    played = predict(proposer, k, alone(Replay({6: traces}), prices()), 1)
    engine = make_engine(fickle(runner, wrong), k=k, runner=runner)
    run(engine, [make_request("r", text.prompt, max_tokens=40)])
    assert played.tokens == 40
    assert played.rounds == engine.stats.num_rounds


def test_one_replay_of_a_chain_tries_every_token_of_the_text() -> None:
    """Rounds begin where others end, but a chain's draft of a token is the same from whichever place."""
    runner = TableRunner()
    wrong = {6, 11, 12, 13, 25}
    text = recorded(runner, [3, 5], 40)
    proposer = fickle(runner, wrong)
    (led,) = lead(runner, proposer, [text], 4, 1)
    whole = replay_text(proposer, text, 4, vocab_size=17)
    assert len(led.rounds) < len(whole.rounds)
    assert led.by_position == whole.by_position
    assert {position + 2 for position, chance in led.by_position.items() if not chance} == wrong


def test_texts_of_a_batch_are_led_side_by_side_and_the_runner_is_left_as_it_was() -> None:
    runner = TableRunner()
    texts = [recorded(runner, [3, 5], 20), recorded(runner, [1, 2, 4], 9), recorded(runner, [7], 1)]
    seen: list[int] = []

    def watched(context: Context, k: int) -> Proposal:
        seen.append(len(context.requests))
        return fickle(runner, {9})._script(context, k)

    traces = lead(runner, ScriptedProposer(watched), texts, 3, 2)
    assert seen[0] == 2 and seen[-1] == 1
    assert [trace.num_tokens for trace in traces] == [20, 9, 1] and not traces[2].rounds
    assert not runner.cached
    alone = lead(runner, fickle(runner, {9}), texts[1:2], 3, 1)
    assert traces[1].rounds == alone[0].rounds


def test_sampled_drafts_are_worth_the_overlap_of_the_two_distributions() -> None:
    runner = TableRunner(seed=3)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    plain = run(make_engine(runner=runner), [make_request("r", [2, 3], max_tokens=30, temperature=1.0, seed=5)])
    text = Text([2, 3], params, [token for emission in plain["r"] for token in emission.token_ids])
    draft = TableDraft(runner)
    (trace,) = lead(runner, draft, [text], 3, 1)
    drafted_places = {place: drafted for place, drafted in trace.rounds.items() if drafted.depth}
    assert set(trace.rounds) - set(drafted_places) <= {29}  # before the last token no draft is of use
    for place, drafted in drafted_places.items():
        before = [*text.prompt, *text.output[:place]][-2:]
        target, other = (table[before[0], before[1]].softmax(-1) for table in (runner.table, draft.table))
        assert drafted.chances[0] == pytest.approx(float(torch.minimum(target, other).sum()), abs=1e-5)


def test_replayed_chances_predict_the_engine_s_sampled_acceptance() -> None:
    runner = TableRunner(seed=3)
    draft = TableDraft(runner)
    requests = [make_request(f"r{i}", [2, 3], max_tokens=60, temperature=1.0, seed=i) for i in range(24)]
    plain = run(make_engine(runner=runner), requests)
    texts = []
    for i in range(24):
        said = [token for emission in plain[f"r{i}"] for token in emission.token_ids]
        texts.append(Text([2, 3], SamplingParams(max_tokens=60, temperature=1.0, seed=i), said))
    traces = lead(runner, draft, texts, 4, 8)
    played = predict(draft, 4, alone(Replay({4: traces}), prices()), 1)
    engine = make_engine(draft, k=4, runner=runner)
    run(engine, [make_request(f"s{i}", [2, 3], max_tokens=60, temperature=1.0, seed=100 + i) for i in range(24)])
    assert played.tau == pytest.approx(engine.stats.mean_acceptance_length, rel=0.08)


def test_siblings_of_a_tree_are_tried_one_after_the_other() -> None:
    runner = TableRunner(seed=1)
    law = runner.logits_after([2, 3]).softmax(-1)
    likely = law.topk(2).indices.tolist()

    def tree(context: Context, k: int) -> Proposal:
        return Proposal(torch.tensor([likely]), torch.tensor([2]), None, torch.tensor([[-1, -1]]))

    proposer = ScriptedProposer(tree)
    proposer.drafts_trees = True
    text = Text([2, 3], SamplingParams(temperature=1.0, seed=0), [likely[1], 4, 5])
    (trace,) = lead(runner, proposer, [text], 1, 1)
    assert trace.rounds[0].depth == 1
    # Without the first, the second is tried against what is left: together they are as likely as the target says either.
    assert trace.rounds[0].chances[0] == pytest.approx(float(law[likely].sum()), abs=1e-5)


def test_a_proposer_that_fails_is_an_error_and_leaves_nothing_behind() -> None:
    runner = TableRunner()

    def broken(context: Context, k: int) -> Proposal:
        raise RuntimeError("boom")

    with pytest.raises(OutriderError, match="failed while it was led"):
        lead(runner, ScriptedProposer(broken), [recorded(runner, [3, 5], 9)], 2, 1)
    assert not runner.cached


def test_a_useless_draft_is_seen_as_one() -> None:
    runner = TableRunner()
    useless = Degraded(fickle(runner, set()), accuracy=0.0)
    text = recorded(runner, [3, 5], 30)
    found = Replay({4: lead(runner, useless, [text], 4, 1)})
    assert found.alpha == 0.0
    known = alone(found, prices(draft=0.1))
    assert predict(useless, 4, known, 1).seconds > predict(useless, 0, known, 1).seconds


def test_a_replay_survives_the_journal() -> None:
    found = Replay({4: [sure(12, {1, 2, 5}, 4), Trace(3, 7, 0.8, {0: Drafted(2, (0.25, 0.5))})]})
    assert Replay.from_json(found.as_json()) == found
    assert not found.is_certain and Replay({4: found.traces[4][:1]}).is_certain


def test_longer_drafts_than_were_tried_go_on_as_their_tokens_did() -> None:
    trace = Trace(0, 12, 0.0, {0: Drafted(2, (1.0, 1.0)), 3: Drafted(2, (1.0, 0.0))})
    found = Replay({2: [trace]})
    mean = (1 + 1 + 1 + 0) / 4
    assert found.drafts(0, 0, 5) == Drafted(5, (1.0, 1.0, mean, 1.0, 0.0))
    assert found.drafts(0, 1, 1) == Drafted(1, (1.0,))


class Short(Proposer):
    """Stops after one draft, however many are asked for."""

    def propose(self, context: Context, k: int) -> Proposal:
        return Proposal(
            torch.ones(len(context.requests), 1, dtype=torch.long), torch.ones(len(context.requests), dtype=torch.long)
        )


def test_a_proposer_that_stops_early_is_not_credited_with_more() -> None:
    runner = TableRunner()
    (trace,) = lead(runner, Short(), [recorded(runner, [3, 5], 9)], 4, 1)
    assert {drafted.depth for drafted in trace.rounds.values()} <= {0, 1}
    place = next(iter(trace.rounds))
    assert Replay({4: [trace]}).drafts(0, place, 4).depth == 1
    assert FixedLength(4).k == 4
