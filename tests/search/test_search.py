"""The search as a whole: invented prices and measurements, a real engine on a tiny model; nothing here depends on a clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_folder import make_folder

from outrider import LLM
from outrider.bench.contenders import PLAIN, Contender
from outrider.engine.methods import chosen_methods, fitting_proposers
from outrider.proposers.base import Proposer
from outrider.proposers.combined import CombinedProposer
from outrider.proposers.degraded import Degraded
from outrider.proposers.ngram import NgramConfig, NgramProposer
from outrider.registry import PROPOSERS
from outrider.search import Question, Search, choice, confirming, prices, search
from outrider.search.journal import Journal
from outrider.search.report import result, rows, table, verdict
from outrider.search.traffic import Text
from outrider.types import OutriderError, PhaseTimes, Round, SamplingParams
from outrider.verifiers.exact import ExactMatchVerifier

from . import toys

Speed = Callable[[Contender], float]


@pytest.fixture(scope="module")
def twin(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Proposer:
    """A draft that is always right."""
    folder = make_folder(tmp_path_factory.mktemp("search") / "twin")
    return fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, [f"draft:draft={folder}"])[0].popitem()[1]


def texts(count: int = 4, length: int = 24) -> list[Text]:
    return [
        Text([10 + i, 20, 30, 40 + i], SamplingParams(max_tokens=length, seed=i, ignore_eos=True), []) for i in range(count)
    ]


@pytest.fixture
def clockless(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Speed], list[tuple[str, ...]]]:
    """Replaces what is timed by what a test says: drafting's price, and the speed of each contender. Gives who ran together."""

    def use(draft: float, speed: Speed, hopeless: float = 0.0) -> list[tuple[str, ...]]:
        ran: list[tuple[str, ...]] = []
        monkeypatch.setattr(choice, "HOPELESS", hopeless)
        monkeypatch.setattr(prices, "measure", lambda *args: toys.prices(draft=draft))

        def run(contenders: Any, heat: confirming.Heat, batch: int, *rest: Any) -> Iterator[confirming.Measured]:
            ran.append(tuple(contender.label for contender in heat.contenders))
            for repeat in range(heat.repeat):
                yield {
                    each.label: {
                        "tokens": [[10.0] * len(heat.texts)],
                        "seconds": [[(1 + 0.01 * ((i + repeat) % 3)) / speed(each) for i in range(len(heat.texts))]],
                    }
                    for each in (Contender(PLAIN, 0), *heat.contenders)
                }

        monkeypatch.setattr(confirming, "run", run)
        return ran

    return use


def started(llm: LLM, proposers: dict[str, Proposer], journal: Journal | None = None, **more: Any) -> Search:
    return Search(llm, proposers, texts(), Question((1, 2, 4), repeat=2), journal or Journal(None, {}), **more)


def test_a_good_draft_is_found_and_its_report_says_why(llm: LLM, twin: Proposer, clockless: Any) -> None:
    ran = clockless(0.05, lambda each: {0: 1.0, 1: 1.5, 2: 2.0, 4: 2.8, "auto": 2.5}[each.k])
    found = started(llm, {"draft": twin})
    chosen = found.run()
    assert chosen.chosen == Contender("draft", 4)
    by_length = {each.k: each for each in found.predictions}
    assert by_length[4].tau == pytest.approx(24 / 5, rel=0.05)  # every draft is right: five tokens a round, but for the last
    assert by_length[4].speedup > by_length[2].speedup > by_length[1].speedup > 1
    assert [set(labels) for labels in ran] == [{"draft k=4", "draft k=auto", "draft k=2"}]
    document = result(found, chosen, "toy")
    json.dumps(document)
    assert document["chosen"] == {"method": "draft", "k": 4, "label": "draft k=4"}
    assert document["speedup"] == pytest.approx(2.8)
    assert [row["why"] for row in document["candidates"] if row["k"] == 1] and all(row["why"] for row in document["candidates"])
    assert rows(document)[0][-1].startswith("chosen: ") and "the plan: draft, k = 4" in verdict(document)
    assert table(document).row_count == 4


def test_a_draft_made_useless_means_plain_decoding(llm: LLM, twin: Proposer, clockless: Any) -> None:
    ran = clockless(0.1, lambda each: 1.0 if each.is_plain else 0.99, hopeless=choice.HOPELESS)
    found = started(llm, {"draft": Degraded(twin, accuracy=0.0)})
    chosen = found.run()
    assert chosen.chosen.is_plain
    assert all(each.speedup < 1 for each in found.predictions if each.k != "auto")
    assert all("draft k=4" not in labels for labels in ran)  # five times the price for nothing: not worth a measurement
    document = result(found, chosen, "toy")
    assert document["speedup"] is None and verdict(document).startswith("the plan: plain.")


def test_the_best_of_both_kinds_are_joined(llm: LLM, twin: Proposer, clockless: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clockless(0.05, lambda each: 3.0 if "+" in each.method else 1.5)
    monkeypatch.setattr(search, "JOINED_FROM", 0.0)
    proposers = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, ["ngram:max_n=3"])[0]
    found = started(llm, proposers | {"draft": twin})
    assert found.run().chosen.method == "ngram+draft:ngram.max_n=3"
    assert "+" not in "".join(found.journal.document["found"]["prices"])  # played from its parts
    monkeypatch.setattr(search, "JOINED_FROM", 100.0)
    assert "+" not in started(llm, proposers | {"draft": twin}).run().chosen.method


def test_a_pair_that_the_user_names_is_studied_by_its_parts(llm: LLM, twin: Proposer, clockless: Any) -> None:
    clockless(0.05, lambda each: 1.0 if each.is_plain else 2.0)
    pair = CombinedProposer(NgramProposer(NgramConfig(max_n=3)), twin)
    found = started(llm, {"ngram+draft:ngram.max_n=3:min_first=8": pair})
    assert found.run().chosen.method == "ngram+draft:ngram.max_n=3:min_first=8"
    assert {each.method for each in found.predictions} == {"ngram+draft:ngram.max_n=3:min_first=8"}
    assert list(found.journal.document["found"]["replays"]) == ["ngram:max_n=3", "draft"]
    for each in found.predictions:
        if isinstance(each.k, int):
            with found.contenders.active(each.contender) as record:
                for text in found.texts:
                    llm.generate([text.prompt], text.again)
            num_rounds = len(found.texts) + len(record.rounds)  # those that read the prompts are not recorded
            assert each.tau == pytest.approx(sum(len(text.output) for text in found.texts) / num_rounds)


def test_a_method_that_fails_on_the_way_is_left_out_with_the_reason(llm: LLM, twin: Proposer, clockless: Any) -> None:
    clockless(0.05, lambda each: 1.0 if each.is_plain else 2.0)
    broken = Degraded(twin)
    broken.propose = lambda context, k: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    greedy = NgramProposer()
    greedy.propose = broken.propose  # type: ignore[method-assign]
    found = started(llm, {"draft": twin, "broken": broken, "greedy": greedy})
    assert found.run().chosen.method == "draft"
    assert "failed" in found.reasons["broken"] and {each.method for each in found.predictions} == {"draft"}
    assert "ZeroDivisionError" in found.reasons["greedy"]
    assert not llm.engine.has_work and llm.proposer.name == PLAIN


@pytest.mark.parametrize("stop_at", [2, 4, 7])
def test_an_interrupt_loses_only_what_was_under_way(
    llm: LLM, twin: Proposer, clockless: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    clockless(0.05, lambda each: {0: 1.0, 1: 1.5, 2: 2.0, 4: 2.8, "auto": 2.5}[each.k])
    once, stop, sought = Journal.once, stop_at, list[tuple[str, str]]()

    def counted(self: Journal, stage: str, name: str, find: Callable[[], Any]) -> Any:
        if not self.has(stage, name):
            if len(sought) == stop - 1:
                raise KeyboardInterrupt
            sought.append((stage, name))
        return once(self, stage, name, find)

    file = tmp_path / "found.json"
    proposers = {"draft": twin, **fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, ["ngram"])[0]}
    monkeypatch.setattr(Journal, "once", counted)
    with pytest.raises(KeyboardInterrupt):
        started(llm, dict(proposers), Journal(file, {"a": 1})).run()
    before = list(sought)
    stop = 1000
    assert started(llm, dict(proposers), Journal(file, {"a": 1}, resume=True)).run().chosen == Contender("ngram", 4)
    assert len(before) == stop_at - 1 and len(sought) > len(before)
    assert len(set(sought)) == len(sought)  # nothing was looked for twice


def test_what_the_journal_holds_of_a_heat_is_of_those_who_ran_in_it(llm: LLM, twin: Proposer, clockless: Any) -> None:
    ran = clockless(0.05, lambda each: 1.0)
    found = started(llm, {"draft": twin})
    for k in (1, 2, 2):
        heat = confirming.Heat((Contender("draft", k),), texts(), 2)
        assert set(found._measured(0, heat, 1)) == {PLAIN, f"draft k={k}"}
    assert ran == [("draft k=1",), ("draft k=2",)]


def test_a_method_is_priced_and_predicted_once(
    llm: LLM, twin: Proposer, clockless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clockless(0.05, lambda each: 1.0)
    asked: list[object] = []
    predict = search.predict
    monkeypatch.setattr(search, "predict", lambda *args: asked.append(args[1]) or predict(*args))  # type: ignore[func-returns-value]
    started(llm, {"draft": twin}).run()
    assert asked == [0, 1, 2, 4, "auto"]


def test_a_journal_of_another_question_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    Journal(file, {"batch": [1], "traffic": "x"}).once("recorded", "0", lambda: [1])
    assert Journal(file, {"batch": (1,), "traffic": "x"}, resume=True).has("recorded", "0")
    with pytest.raises(OutriderError, match="with another batch"):
        Journal(file, {"batch": [2], "traffic": "x"}, resume=True)
    file.write_text("[]")
    with pytest.raises(OutriderError, match="no document of outrider tune"):
        Journal(file, {}, resume=True)


def test_recorded_answers_are_plain_decoding_s(llm: LLM, twin: Proposer) -> None:
    found = started(llm, {"draft": twin})
    answers = [text.output for text in found.record()]
    assert answers == [llm.generate(text.prompt, text.params)[0].token_ids for text in texts()]


def test_prices_are_of_rounds_that_the_engine_ran(llm: LLM, twin: Proposer) -> None:
    found = started(llm, {"draft": twin})
    found.texts = found.record()
    (priced,) = found.price("draft").values()
    assert set(priced.rounds) >= {0, 1, 2, 4} and priced.plain > 0
    assert all(each.draft > 0 and each.score > 0 for depth, each in priced.rounds.items() if depth)
    assert priced.rounds[0].draft == 0
    assert llm.proposer.name == PLAIN and llm.engine.observer is None


def test_a_method_that_never_drafts_is_priced_by_width_alone(llm: LLM) -> None:
    proposers, _ = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, ["ngram:min_n=20:max_n=20"])
    found = started(llm, proposers)
    found.texts = found.record()
    (priced,) = found.price("ngram:min_n=20:max_n=20").values()
    assert set(priced.rounds) == {0, 1, 2, 4, 8, 15} and priced.rounds[8].score >= priced.rounds[0].score


def test_lengths_that_never_came_are_priced_by_the_width_of_their_passes() -> None:
    seen = {0: prices.Price(0.0, 1.0, 0.5, 0), 2: prices.Price(0.1, 3.0, 0.6, 2)}
    found = prices._unseen(seen, 0.1, [0, 1, 2, 4, 15, 0], {2: 10.0, 4: 11.0, 15: 9.0}.__getitem__)
    assert found == {4: prices.Price(0.1, pytest.approx(3.3), 0.6, 4), 15: prices.Price(0.1, 3.0, 0.6, 15)}


def test_drafts_that_are_cheap_or_dear_are_priced_at_what_they_cost_on_average() -> None:
    watch = prices._Watch(1, is_padded=False)
    for number, draft in enumerate([9.0, 1.0, 1.0, 1.0, 9.0, 9.0], start=1):
        watch.rounds.append((number, Round(4, [4], [4], [4], PhaseTimes(draft=draft))))
    assert watch.priced()[4].draft == pytest.approx((1 + 1 + 1 + 9) / 4)


def test_a_block_s_first_round_and_a_hiccup_of_one_are_no_price() -> None:
    watch = prices._Watch(1, is_padded=False)
    for number, (depth, seconds) in enumerate([(0, 1.0)] * 5 + [(2, 50.0), (2, 2.0), (2, 2.1), (2, 2.2), (3, 90.0)], start=1):
        watch.rounds.append((number, Round(depth, [depth], [depth], [0], PhaseTimes(score=seconds))))
    assert {depth: price.score for depth, price in watch.priced().items()} == {0: 1.0, 2: 2.1}


def test_a_method_that_runs_out_of_memory_leaves_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(setting: object) -> Proposer:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more of it")

    monkeypatch.setattr(PROPOSERS.get("low-bit"), "build", build)
    proposers, reasons = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, ["low-bit", "ngram"])
    assert set(proposers) == {"ngram"}
    assert reasons == {"low-bit": "RuntimeError: DefaultCPUAllocator: can't allocate memory and more of it"}


def test_long_prompts_that_are_read_while_others_decode_are_priced() -> None:
    watch = prices._Watch(2, is_padded=False)
    for is_prefill, batch, times in [(True, 1, PhaseTimes(score=1.0)), (False, 1, PhaseTimes(score=1.0, read=4.0))]:
        round_ = Round(0, [0] * batch, [0] * batch, [0] * batch, times)
        watch.see(SimpleNamespace(is_prefill=is_prefill, round=round_))  # type: ignore[arg-type]
    assert sum(watch.prompts) == 5.0


def test_which_methods_a_target_can_have(llm: LLM) -> None:
    names = chosen_methods(["suffix", "all"])
    assert names[0] == "suffix" and PLAIN not in names and len(names) == len(set(names))
    proposers, reasons = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, names, ExactMatchVerifier())
    assert {"suffix", "ngram", "early-exit", "low-bit"} <= set(proposers) and {"draft", "medusa", "eagle"} <= set(reasons)
    chains = ExactMatchVerifier()
    chains.handles_trees = False  # type: ignore[misc]
    assert "judges chains" in fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, ["eagle"], chains)[1]["eagle"]
    with pytest.raises(OutriderError, match="unknown method"):
        chosen_methods(["nonsense"])


def test_trees_are_replayed_at_two_depths_and_chains_at_one(twin: Proposer) -> None:
    assert search.led_lengths(twin, 15) == [search.LED]
    twin_of_trees = Degraded(twin)
    twin_of_trees.drafts_trees = True
    assert search.led_lengths(twin_of_trees, 8) == [4, 8] and search.led_lengths(twin_of_trees, 1) == [1]
    assert choice.ALIKE < 0.05
