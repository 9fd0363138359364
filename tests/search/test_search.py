"""The whole search on a tiny model: the engine is real, times are given, so that no test depends on a clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_folder import make_folder

from outrider import LLM
from outrider.bench.contenders import Contender, Contenders
from outrider.engine.methods import chosen_methods, fitting_proposers
from outrider.proposers.base import Proposer
from outrider.proposers.combined import CombinedProposer
from outrider.proposers.degraded import Degraded
from outrider.proposers.ngram import NgramConfig, NgramProposer
from outrider.registry import PLAIN, PROPOSERS
from outrider.search import journal as journal_module
from outrider.search import search as search_module
from outrider.search.journal import Journal, exclusive
from outrider.search.report import oracle, result, rows, table, verdict
from outrider.search.search import Search
from outrider.search.space import SearchSpace
from outrider.search.traffic import RecordedPrompt
from outrider.types import OutriderError, SamplingParams

Speed = Callable[[Contender], float]


@pytest.fixture(scope="module")
def twin(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Proposer:
    """Return a draft whose drafts are all accepted."""
    folder = make_folder(tmp_path_factory.mktemp("search") / "twin")
    return fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, [f"draft:draft={folder}"])[0].popitem()[1]


def texts(count: int = 8, length: int = 24) -> list[RecordedPrompt]:
    return [
        RecordedPrompt([10 + i, 20, 30, 40 + i], SamplingParams(max_tokens=length, seed=i, ignore_eos=True), [])
        for i in range(count)
    ]


def started(llm: LLM, proposers: dict[str, Proposer], journal: Journal | None = None, **more: Any) -> Search:
    return Search(llm, proposers, texts(), SearchSpace((1, 2, 4), repeat=2), journal or Journal(None, {}), **more)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Speed], list[tuple[str, int]]]:
    """Replace measured times by given ones. Returns the list of runs: labels and numbers of prompts."""

    def use(speed: Speed) -> list[tuple[str, int]]:
        ran: list[tuple[str, int]] = []

        def generate(contenders: Contenders, contender: Contender, prompts: Sequence[Any], params: Any, batch: int) -> Any:
            ran.append((contender.label, len(prompts)))
            seconds = (1 + 0.01 * (len(ran) % 3)) / speed(contender)
            rounds = [SimpleNamespace(num_accepted=[1])] * 12
            batches = [SimpleNamespace(rounds=rounds, first_tokens=1)]
            stats = SimpleNamespace(mean_acceptance_length=2.0)
            return SimpleNamespace(seconds=seconds, first_seconds=0.0, stats=stats, faults=0, batches=batches)

        monkeypatch.setattr(search_module, "generate", generate)
        monkeypatch.setattr(search_module, "warm_up", lambda *args: None)
        return ran

    return use


BY_LENGTH = {0: 1.0, 1: 1.5, 2: 2.0, 4: 2.8, "auto": 2.5}


def test_a_good_draft_is_found_and_plain_decoding_runs_in_every_turn(llm: LLM, twin: Proposer, timed: Any) -> None:
    ran = timed(lambda each: BY_LENGTH[each.k])
    found = started(llm, {"draft": twin})
    chosen = found.run()
    assert chosen.chosen == Contender("draft", 4)
    assert {label for label, _ in ran[:5]} == {PLAIN, "draft k=1", "draft k=2", "draft k=4", "draft k=auto"}
    runs = {label: sum(each == label for each, _ in ran) for label, _ in ran}
    assert runs["draft k=1"] == runs["draft k=2"] == 2 and runs["draft k=4"] == runs[PLAIN] > 2
    assert [each.name for each in found.rung_results][:2] == ["rung 1", "rung 2"]
    assert found.rung_results[-1].leader == "draft k=4"
    assert "draft k=4 reached 2." in chosen.others["draft k=1"] and fmean(found.taus["draft k=4"]) == 2.0
    document = result(found, chosen, "toy")
    json.dumps(document)
    assert document["chosen"] == {"method": "draft", "k": 4, "label": "draft k=4"}
    assert document["oracle_gap"] == pytest.approx(1.0, rel=0.01)  # all rounds end at the same tokens
    assert "1.00 times" in oracle(document)[0]
    assert document["speedup"] == pytest.approx(2.8, rel=0.02)
    by_length = {row["k"]: row for row in document["candidates"]}
    assert by_length[1]["prompts"] == 2 < by_length[4]["prompts"] and by_length[1]["speedup"] == pytest.approx(1.5, rel=0.05)
    assert all(row["why"] for row in document["candidates"])
    assert [rung["contenders"] for rung in document["rungs"]][:2] == [4, 2] and document["rungs"][-1]["leader"] == "draft k=4"
    assert rows(document)[0][-1].startswith("chosen: ") and "the plan: draft, k = 4" in verdict(document)
    assert table(document).row_count == 4


def test_each_turn_has_another_order(llm: LLM, twin: Proposer, timed: Any) -> None:
    ran = timed(lambda each: 1.0)
    started(llm, {"draft": twin}).run()
    first, second = ([each for each, *_ in ran[5 * turn : 5 * turn + 5]] for turn in range(2))
    assert sorted(first) == sorted(second) and first[0] != second[0] and PLAIN in first


def test_a_useless_draft_means_plain_decoding(llm: LLM, twin: Proposer, timed: Any) -> None:
    ran = timed(lambda each: 1.0 if each.is_plain else 0.6)
    found = started(llm, {"draft": twin})
    chosen = found.run()
    assert chosen.chosen.is_plain
    assert len(found.rung_results) == 1 and len(ran) == 2 * 5 and found.rung_results[0].leader == PLAIN
    document = result(found, chosen, "toy")
    assert document["speedup"] is None and verdict(document).startswith("the plan: plain.")


def test_memories_are_forgotten_between_batch_sizes(
    llm: LLM, twin: Proposer, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a drafter that remembers requests would have seen the output of every prompt at the other batch size."""
    timed(lambda each: BY_LENGTH[each.k])
    generate, events = search_module.generate, list[Any]()

    def noted(contenders: Any, contender: Any, prompts: Any, params: Any, size: int) -> Any:
        events.append(size)
        return generate(contenders, contender, prompts, params, size)

    monkeypatch.setattr(search_module, "generate", noted)
    found = Search(llm, {"draft": twin}, texts(), SearchSpace((1, 4), batches=(1, 4), repeat=2), Journal(None, {}))
    forget = found.contenders.forget
    monkeypatch.setattr(found.contenders, "forget", lambda each=None: (each or events.append("forget"), forget(each)))
    found.run()
    changes = [events[at] for at in range(1, len(events)) if {events[at - 1], events[at]} == {1, 4}]
    assert {1, 4} < set(events) and changes == []


def test_batch_sizes_are_run_and_averaged(llm: LLM, twin: Proposer, timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [1]

    def speed(each: Contender) -> float:
        return {0: 1.0, 1: 1.4, 2: 1.3, 4: 2.0 if batch[0] == 1 else 0.5, "auto": 1.2}[each.k]

    ran = timed(speed)
    generate = search_module.generate

    def noted(contenders: Any, contender: Any, prompts: Any, params: Any, size: int) -> Any:
        batch[0] = size
        return generate(contenders, contender, prompts, params, size)

    monkeypatch.setattr(search_module, "generate", noted)
    found = Search(llm, {"draft": twin}, texts(), SearchSpace((1, 2, 4), (1, 4), repeat=2), Journal(None, {}))
    assert found.run().chosen == Contender("draft", 1)
    assert {count for _, count in ran} == {1, 4}


def test_only_whole_batches_run(llm: LLM, twin: Proposer, timed: Any) -> None:
    ran = timed(lambda each: BY_LENGTH[each.k])
    found = Search(llm, {"draft": twin}, texts(7), SearchSpace((1, 2, 4), (3,), repeat=2), Journal(None, {}))
    assert found.run().chosen == Contender("draft", 4)
    assert {count for _, count in ran} == {3} and found.num_prompts("draft k=4") == len(found.texts) == 6


def test_the_best_of_both_kinds_are_combined(llm: LLM, twin: Proposer, timed: Any) -> None:
    ran = timed(lambda each: 1.0 if each.is_plain else 3.0 if "+" in each.method else 1.5)
    proposers = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, ["ngram:max_n=3"])[0]
    found = started(llm, proposers | {"draft": twin})
    assert found.run().chosen.method == "ngram+draft:ngram.max_n=3"
    assert isinstance(found.proposers["ngram+draft:ngram.max_n=3"], CombinedProposer)
    pairs = [at for at, (label, _) in enumerate(ran) if "+" in label]
    # compared in separate turns on the first prompts
    assert any(label == PLAIN for label, _ in ran[pairs[0] - 4 : pairs[0] + 5])
    timed(lambda each: 1.0 if each.is_plain or "ngram" in each.method else 1.5)
    assert all("+" not in label for label in _labels_of(started(llm, proposers | {"draft": twin})))


def _labels_of(search: Search) -> set[str]:
    search.run()
    return set(search.candidates)


def test_only_pairs_named_by_the_user_are_tried(llm: LLM, twin: Proposer, timed: Any) -> None:
    timed(lambda each: 1.0 if each.is_plain else 2.0)
    pair = CombinedProposer(NgramProposer(NgramConfig(max_n=3)), twin)
    named = "ngram+draft:ngram.max_n=3:min_first=8"
    found = started(llm, {named: pair, "ngram": NgramProposer(), "draft": twin})
    found.run()
    assert {contender.method for contender in found.candidates.values()} == {named, "ngram", "draft"}


def test_a_method_that_fails_is_dropped_with_the_reason(llm: LLM, twin: Proposer) -> None:
    broken = Degraded(twin)
    broken.propose = lambda context, k: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    found = started(llm, {"ngram": broken, "draft": twin})
    chosen = found.run()
    assert "failed during a run" in found.reasons["ngram"]
    assert chosen.chosen.method in (PLAIN, "draft") and not any(label.startswith("ngram") for label in found.taus)
    assert all("ngram" not in label for each in found.rung_results for label in each.ranking.speedups)
    assert not llm.engine.has_work and llm.proposer.name == PLAIN


def test_plain_decoding_is_chosen_if_every_method_fails(llm: LLM, timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(lambda each: 1.0)
    generate = search_module.generate

    def failing(contenders: Any, contender: Contender, *args: Any) -> Any:
        if not contender.is_plain:
            raise RuntimeError("out of memory")
        return generate(contenders, contender, *args)

    monkeypatch.setattr(search_module, "generate", failing)
    found = started(llm, {"ngram": NgramProposer()})
    chosen = found.run()
    assert chosen.chosen.is_plain and set(found.reasons) == {"ngram"}
    assert result(found, chosen, "toy")["candidates"] == []


def test_a_method_that_fails_later_keeps_measurements_of_others(
    llm: LLM, twin: Proposer, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(lambda each: BY_LENGTH[each.k])
    generate, runs = search_module.generate, [0]

    def failing(contenders: Any, contender: Contender, *args: Any) -> Any:
        runs[0] += contender.method == "ngram"
        if runs[0] == 6:
            runs[0] += 1
            raise RuntimeError("out of\nmemory")
        return generate(contenders, contender, *args)

    monkeypatch.setattr(search_module, "generate", failing)
    found = started(llm, {"draft": twin, "ngram": NgramProposer()})
    assert found.run().chosen == Contender("draft", 4)
    assert found.reasons == {"ngram": "RuntimeError: out of memory"}


def test_a_target_that_fails_ends_the_search(llm: LLM, twin: Proposer, timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(lambda each: 1.0)

    def failing(contenders: Any, contender: Contender, *args: Any) -> Any:
        raise OutriderError("the target failed")

    monkeypatch.setattr(search_module, "generate", failing)
    with pytest.raises(OutriderError, match="the target failed"):
        started(llm, {"draft": twin}).run()


def test_a_full_disk_ends_the_search_and_is_no_fault_of_a_method(
    llm: LLM, twin: Proposer, timed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed(lambda each: 1.0)
    written: list[str] = []

    def write(path: Path, text: str) -> None:
        written.append(text)
        if '"rung 1"' in text:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module, "write_whole", write)
    search = started(llm, {"draft": twin}, Journal(tmp_path / "journal.json", {}))
    with pytest.raises(OSError, match=r"No space left on device: .*journal\.json"):
        search.run()
    assert written and not search.reasons


@pytest.mark.parametrize("stop_at", [2, 7, 15, 18])
def test_an_interrupt_loses_only_the_run_in_progress(
    llm: LLM, twin: Proposer, timed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    timed(lambda each: BY_LENGTH[each.k] * (0.8 if each.method == "ngram" else 1.0))
    once, stop, sought = Journal.once, stop_at, list[tuple[str, str]]()

    def counted(self: Journal, stage: str, name: str, find: Callable[[], Any]) -> Any:
        if name not in self.document["found"].get(stage, {}):
            if len(sought) == stop - 1:
                raise KeyboardInterrupt
            sought.append((stage, name))
        return once(self, stage, name, find)

    file = tmp_path / "found.json"
    proposers = {"draft": twin, "ngram": NgramProposer()}
    monkeypatch.setattr(Journal, "once", counted)
    with pytest.raises(KeyboardInterrupt):
        started(llm, dict(proposers), Journal(file, {"a": 1})).run()
    before = list(sought)
    stop = 1000
    resumed = started(llm, dict(proposers), Journal(file, {"a": 1}, resume=True))
    assert resumed.run().chosen == Contender("draft", 4)
    assert len(before) == stop_at - 1 and len(sought) > len(before)
    assert len(set(sought)) == len(sought)  # nothing was measured twice
    stop = len(sought) + 1
    warmed: list[str] = []
    monkeypatch.setattr(search_module, "warm_up", lambda _, contender, *more: warmed.append(contender.label))
    again = started(llm, dict(proposers), Journal(file, {"a": 1}, resume=True))
    again.run()  # a finished search runs nothing
    assert not warmed
    assert [each.ranking for each in again.rung_results] == [each.ranking for each in resumed.rung_results]


def test_progress_counts_runs(llm: LLM, twin: Proposer, timed: Any) -> None:
    timed(lambda each: BY_LENGTH[each.k])
    told: list[tuple[float, float, str]] = []
    started(llm, {"draft": twin}, report=lambda *state: told.append(state)).run()
    runs = [each for each in told if each[2].startswith("rung")]
    assert [done for done, *_ in runs] == list(range(len(runs)))
    assert all(done < total for done, total, _ in runs)
    assert told[-1][2].startswith("rung 2: ") and told[-1][2].endswith(", batch 1")


def test_recorded_outputs_equal_plain_decoding(llm: LLM, twin: Proposer) -> None:
    found = started(llm, {"draft": twin})
    answers = {tuple(text.prompt): text.output for text in found.record()}
    assert answers == {tuple(text.prompt): llm.generate(text.prompt, text.params)[0].outputs[0].token_ids for text in texts()}


def test_real_runs_generate_the_recorded_outputs(llm: LLM, twin: Proposer) -> None:
    found = Search(llm, {"draft": twin}, texts(2, 8), SearchSpace((2,), repeat=1), Journal(None, {}))
    found.run()
    assert set(found.taus) == {PLAIN, "draft k=2", "draft k=auto"}
    assert fmean(found.taus[PLAIN]) == 1.0 and fmean(found.taus["draft k=2"]) > 2
    assert found.num_prompts("draft k=2") == 2


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    refused = pytest.raises(
        OutriderError, match=r"^cannot lock .*lock \(No locks available\): write to a disk that supports locks"
    )
    with refused, exclusive(tmp_path / "found.json"):
        pass


def test_a_journal_of_another_search_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    Journal(file, {"batch": [1], "traffic": "x"}).once("recorded", "0", lambda: [[1]])
    assert "0" in Journal(file, {"batch": (1,), "traffic": "x"}, resume=True).document["found"]["recorded"]
    with pytest.raises(OutriderError, match="with other values of batch"):
        Journal(file, {"batch": [2], "traffic": "x"}, resume=True)
    file.write_text("[]")
    with pytest.raises(OutriderError, match="was not written by outrider tune"):
        Journal(file, {}, resume=True)


def test_recorded_outputs_of_other_traffic_are_rejected(llm: LLM, twin: Proposer) -> None:
    journal = Journal(None, {})
    journal.once("recorded", "0", lambda: [[1, 2]])
    with pytest.raises(OutriderError, match="outputs of this traffic"):
        started(llm, {"draft": twin}, journal).run()


def test_a_method_out_of_memory_does_not_affect_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(setting: object) -> Proposer:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more of it")

    monkeypatch.setattr(PROPOSERS.get("low-bit"), "build", build)
    proposers, reasons = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, ["low-bit", "ngram"])
    assert set(proposers) == {"ngram"}
    assert reasons == {"low-bit": "RuntimeError: DefaultCPUAllocator: can't allocate memory and more of it"}


def test_methods_that_fit_a_target(llm: LLM) -> None:
    names = chosen_methods(["suffix", "all"])
    assert names[0] == "suffix" and PLAIN not in names and len(names) == len(set(names))
    proposers, reasons = fitting_proposers(llm.speculation, llm.runner, llm.tokenizer, names)
    assert {"suffix", "ngram", "early-exit", "low-bit"} <= set(proposers) and {"draft", "medusa", "eagle"} <= set(reasons)
    with pytest.raises(OutriderError, match="unknown method"):
        chosen_methods(["nonsense"])
