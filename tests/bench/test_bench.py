"""Order of the grid's runs, and results computed from runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import LISTED, children
from tiny_folder import make_folder

from outrider import LLM
from outrider.bench import cells, grid, workloads
from outrider.bench.breakdown import PARTS, expectation, main_part
from outrider.bench.contenders import PLAIN_CONTENDER, Contender, Contenders
from outrider.bench.grid import GridPlan, Group
from outrider.bench.measure import Arrival, Batch, Run, batch_of, generate, pauses
from outrider.types import Context, OutriderError, PhaseTimes, Proposal, Round, Scores

NGRAM = Contender("ngram", 3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(make_folder(tmp_path_factory.mktemp("bench") / "model"), method="plain", compile="never", max_batch=2)


def test_contenders_share_the_target_and_restore_its_engine(llm: LLM) -> None:
    contenders, engine, policy = Contenders(llm), llm.engine, llm.engine.policy
    prompt = workloads.encode(llm.tokenizer, workloads.Prompt("x", "for i in range(10):\n    print(i)\nfor i in"))
    plan = GridPlan((NGRAM,), {"x": [prompt]}, max_tokens=20)
    runs = {c: generate(contenders, c, [prompt], plan.params(0, 0), 1) for c in (PLAIN_CONTENDER, NGRAM)}
    assert runs[NGRAM].token_ids == runs[PLAIN_CONTENDER].token_ids
    assert runs[PLAIN_CONTENDER].stats.num_drafts == 0 and runs[NGRAM].stats.num_drafts > 0
    assert (llm.engine, llm.engine.policy) == (engine, policy)


def test_plain_and_contenders_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(
        contenders: object, contender: Contender, prompts: list[list[int]], params: object, batch: int, run: Run | None
    ) -> Run:
        order.append(f"{contender.label} {prompts}")
        run = run or Run()
        run.token_ids.append([1])
        run.batches.append(Batch(1, 1.0))
        return run

    monkeypatch.setattr(grid, "generate", note)
    monkeypatch.setattr(grid, "warm_up", lambda *args: None)
    plan = GridPlan((NGRAM, Contender("ngram", 5)), {"x": [[1], [2], [3], [4], [5]]}, batches=(2,), repeat=2)  # [5] is left out
    (group,) = grid.run_grid(Contenders(llm), plan)
    assert order == [
        "plain [[1], [2]]", "ngram k=3 [[1], [2]]", "ngram k=5 [[1], [2]]",
        "ngram k=3 [[3], [4]]", "ngram k=5 [[3], [4]]", "plain [[3], [4]]",
        "ngram k=3 [[1], [2]]", "ngram k=5 [[1], [2]]", "plain [[1], [2]]",
        "ngram k=5 [[3], [4]]", "plain [[3], [4]]", "ngram k=3 [[3], [4]]",
    ]  # fmt: skip
    assert [len(run.batches) for runs in group.repeats for run in runs.values()] == [2] * 6
    assert plan.num_runs == len(order)


def test_busy_processes_end_if_one_of_them_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("too many processes")
        started.append(popen([*command[:2], "-c", "import time; time.sleep(60)"], **more))
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(grid.subprocess, "Popen", start)
    with pytest.raises(BlockingIOError), grid.busy_processes(2):
        pass
    assert started[0].returncode is not None


def test_a_measurement_waits_until_other_processes_are_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "busy"
    slow = f"import time; time.sleep(0.4); open({str(file)!r}, 'w').close(); print({{}}, flush=True); time.sleep(60)"
    monkeypatch.setattr(grid, "BUSY", slow)
    with grid.busy_processes(1):
        assert file.exists()


@pytest.mark.skipif(not LISTED, reason="needs /proc (Linux)")
def test_busy_processes_run_only_during_the_measurement(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    others = children(os.getpid())
    real = grid.generate

    def count(*args: Any) -> Run:
        running.append(len(children(os.getpid()) - others))
        return real(*args)

    monkeypatch.setattr(grid, "generate", count)
    plan = GridPlan((NGRAM,), {"x": [[1, 2, 3]]}, max_tokens=4, repeat=1, busy=(0, 2))
    groups = list(grid.run_grid(Contenders(llm), plan))
    assert [group.busy for group in groups] == [0, 2] and {cell["busy"] for cell in cells.cells(groups)} == {0, 2}
    assert running[-2:] == [2, 2] and set(running[:-2]) == {0} and plan.num_runs == 4
    assert not children(os.getpid()) - others


def test_contenders_do_not_remember_outputs_of_other_runs_or_repeats(llm: LLM) -> None:
    contenders = Contenders(llm)
    first, second = (Contender("suffix:earlier_tokens=4000", k) for k in (3, 5))
    params = GridPlan((), {}, max_tokens=20).params(0, 0)

    def num_remembered(contender: Contender) -> int:
        with contenders.active(contender):
            return len(llm.proposer.memory[""].blocks)  # type: ignore[attr-defined]

    generate(contenders, first, [list(range(5, 40))], params, 1)
    assert (num_remembered(first), num_remembered(second)) == (1, 0)
    contenders.forget()
    assert num_remembered(first) == 0


def test_k_zero_is_plain_decoding() -> None:
    assert Contender("draft", 0).is_plain and Contender("draft", 0).label == "plain"


def rounds(*accepted: int, lens: int = 4) -> tuple[Round, ...]:
    times = PhaseTimes(0.1, 0.2, 0.05, 0.01)
    return tuple(Round(lens, [lens], [lens], [lens], [n], [min(n + 1, lens)], times) for n in accepted)


def test_rates_match_the_glossary() -> None:
    run = Run(token_ids=[[1] * 11], batches=[Batch(11, 3.0, 1, 1.0, rounds=rounds(4, 0, 2))])
    assert run.stats.acceptance_histogram == {4: 1, 0: 1, 2: 1}
    assert run.stats.mean_acceptance_length == 1 + 6 / 3
    assert run.stats.acceptance_rate == 6 / (4 + 1 + 3)  # reached: all 4; the first only; 2 and the rejected one
    assert run.tok_s == 11 / 3 and run.decode_tok_s == 10 / 2
    assert run.ms["draft"] == pytest.approx(100) and run.ms["score"] == pytest.approx(200)
    assert sum(run.ms.values()) == pytest.approx(2000 / 3)  # host is the remainder of wall-clock time


def test_cells_are_medians_of_ratios_within_a_repeat() -> None:
    def run(tokens: int, seconds: float, ids: int) -> Run:
        return Run(token_ids=[[ids] * tokens], batches=[Batch(tokens, seconds)])

    speeds = [(10.0, 5.0), (10.0, 2.0), (20.0, 5.0)]  # seconds (plain, other); a slow machine in the last repeat
    repeats = [{NGRAM: run(10, fast, 1), PLAIN_CONTENDER: run(10, slow, 1)} for slow, fast in speeds]
    repeats[2][NGRAM].token_ids = [[2] * 10]
    found = cells.cells([Group(0.0, 1, "x", repeats)])
    assert [cell["method"] for cell in found] == ["plain", "ngram"]
    assert found[1]["speedup"] == 4.0
    assert found[1]["same_text"] == pytest.approx(2 / 3, abs=1e-3)
    assert cells.cells([Group(0.8, 1, "x", repeats)])[1]["same_text"] is None
    assert cells.cells([Group(0.8, 1, "x", repeats)], same_text_when_sampled=True)[1]["same_text"] is not None
    assert found[1]["repeat_speedup"] == [2.0, 5.0, 4.0] and found[0]["speedup_interval"] == [1.0, 1.0]
    low, high = found[1]["speedup_interval"]
    assert 2.0 <= low < 4.0 < high <= 5.0


def test_a_run_records_latencies_and_predicted_plain_speed(llm: LLM) -> None:
    prompts = [
        workloads.encode(llm.tokenizer, workloads.Prompt("x", text)) for text in ("for i in range(10):", "def add(", "The")
    ]
    llm.engine._clock.take()  # what was measured after the last round of another test
    run = generate(Contenders(llm), PLAIN_CONTENDER, prompts, GridPlan((), {}, max_tokens=8).params(0, 0), 2)
    assert [batch.num_tokens for batch in run.batches] == [16, 8]
    assert len(run.pauses) == 3 * 7 and all(seconds > 0 and tokens == 1 for seconds, tokens in run.pauses)
    # The prediction covers the time of the rounds, without the caller's loop. What follows a round counts for the next one,
    # which may belong to the next batch.
    predicted = [batch.plain_seconds or 0 for batch in run.batches]
    assert min(predicted) > 0 and sum(predicted) <= sum(batch.seconds for batch in run.batches)
    assert run.predicted_plain_tok_s == pytest.approx(24 / sum(predicted))
    cell = cells.cells([Group(0.0, 2, "x", [{PLAIN_CONTENDER: run}])])[0]
    assert set(cell["inter_token_ms"]) == {"p50", "p95"} and cell["prediction_error_percent"] > -5
    assert cell["expected_speedup"] is None and cell["cost_ratio"] is None


def test_decoding_starts_after_the_first_tokens_of_every_prompt(tmp_path: Path) -> None:
    llm = LLM(make_folder(tmp_path), method="plain", compile="never", max_batch=2, prefill_chunk=20)
    prompts = [[7, 8, 9], [10 + i % 30 for i in range(90)]]  # the second is prefilled in five chunks while the first decodes
    run = generate(Contenders(llm), PLAIN_CONTENDER, prompts, GridPlan((), {}, max_tokens=12).params(0, 0), 2)
    (batch,) = run.batches
    assert batch.num_tokens == 24 and batch.first_tokens >= 5
    assert batch.waits[0] < batch.waits[1] == batch.first_seconds
    assert run.stats.num_rounds == run.num_tokens - batch.first_tokens  # one round per token after the first ones
    cell = cells.cells([Group(0.0, 2, "x", [{PLAIN_CONTENDER: run}])])[0]
    assert cell["time_to_first_token_ms"]["p50"] == pytest.approx(1e3 * batch.waits[0], rel=1e-3)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_the_order_of_prompts_within_a_round_does_not_matter(is_swapped: bool) -> None:
    def at(seconds: float, num_rounds: int, *num_tokens: int) -> list[Arrival]:
        found = [Arrival(seconds, prompt, count, num_rounds) for prompt, count in enumerate(num_tokens) if count]
        return found[::-1] if is_swapped else found

    arrivals = [*at(0.5, 0, 1), *at(1.0, 1, 3), *at(2.0, 1, 4, 1), *at(3.0, 2, 6, 2), *at(3.5, 3, 7, 4)]
    batch = batch_of(arrivals, rounds(1, 1, 0), 4.0, 9.0)  # the second prompt was prefilled in the third pass
    assert (batch.num_tokens, batch.first_tokens, batch.first_seconds) == (11, 4 + 1, 2.0)
    assert batch.waits == (0.5, 2.0) and len(batch.rounds) == 2 and batch.plain_seconds == 9.0
    assert [each.num_rounds for each in batch.arrivals] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert sorted(pauses(arrivals)) == [(0.5, 1), (0.5, 2), (0.5, 2), (1.0, 1), (1.0, 1), (1.0, 2)]


def test_a_failing_target_ends_the_measurement(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    score = llm.runner.score

    def failing(context: Context, proposal: Proposal, hidden: tuple[int, ...] = ()) -> Scores:
        if any(request.token_ids[0] == 9 for request in context.requests):
            raise RuntimeError("out of memory")
        return score(context, proposal, hidden)

    monkeypatch.setattr(llm.runner, "score", failing)
    with pytest.raises(OutriderError, match="out of memory"):
        generate(Contenders(llm), PLAIN_CONTENDER, [[7, 8], [9, 8]], GridPlan((), {}, max_tokens=4).params(0, 0), 2)
    assert not llm.engine.has_work


PLAIN_MS = {"draft": 0.0, "score": 10.0, "verify": 0.0, "host": 0.0}


def test_costs_that_match_the_formula_give_no_difference() -> None:
    alpha, k, tau = 0.5, 2.0, 1 + 0.5 + 0.25
    ms = {"draft": 2.0, "score": 10.0, "verify": 0.0, "host": 0.0}
    found = expectation(ms, PLAIN_MS, tau, alpha, k, 1.0, tau * 10 / 12)
    assert found["cost_ratio"] == 0.1 and found["expected_speedup"] == pytest.approx(tau / 1.2)
    assert all(part == pytest.approx(0) for part in found["difference"].values())


@pytest.mark.parametrize(
    ("part", "ms", "tau"),
    [
        ("score", {"draft": 2.0, "score": 20.0, "verify": 0.0, "host": 0.0}, 1.75),
        ("draft", {"draft": 9.0, "score": 10.0, "verify": 0.0, "host": 0.0}, 1.75),
        ("verify", {"draft": 2.0, "score": 10.0, "verify": 5.0, "host": 0.0}, 1.75),
        ("host", {"draft": 2.0, "score": 10.0, "verify": 0.0, "host": 5.0}, 1.75),
        ("acceptance", {"draft": 2.0, "score": 10.0, "verify": 0.0, "host": 0.0}, 1.2),
    ],
)
def test_the_part_that_exceeds_the_formula_is_named(part: str, ms: dict[str, float], tau: float) -> None:
    measured = tau * 10 / sum(ms.values())
    found = expectation(ms, PLAIN_MS, tau, 0.5, 2.0, 1.0, measured)
    parts = found["difference"]
    assert list(parts) == list(PARTS) and main_part(parts) == part
    assert sum(parts.values()) == pytest.approx(measured - found["expected_speedup"])
    assert all(value == pytest.approx(0) for name, value in parts.items() if name != part)


def test_acceptance_by_position_covers_rounds_and_reached_drafts() -> None:
    run = Run(batches=[Batch(10, 1.0, rounds=rounds(4, 0, 2, lens=4))], token_ids=[list(range(10))])
    cell = cells.cells([Group(0.0, 1, "x", [{PLAIN_CONTENDER: run, NGRAM: run}])])[1]
    assert cell["acceptance_by_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3], abs=1e-4)
    assert cell["conditional_acceptance"] == pytest.approx([2 / 3, 1, 0.5, 1], abs=1e-4)
    assert cell["mean_k"] == 4 and cell["draft_acceptance_rate"] == 0.5


def test_acceptance_without_drafts_is_unknown() -> None:
    run = Run(batches=[Batch(3, 1.0, rounds=rounds(0, 0, lens=0))], token_ids=[[1, 2, 3]])
    cell = cells.cells([Group(0.0, 1, "x", [{PLAIN_CONTENDER: run, NGRAM: run}])])[1]
    assert run.stats.acceptance_rate is cell["acceptance_rate"] is cell["expected_speedup"] is None
    assert cell["acceptance_by_position"] == cell["conditional_acceptance"] == []


def test_reached_drafts_of_a_tree_are_counted_by_depth() -> None:
    times = PhaseTimes(0.3, 0.2, 0.0, 0.0)
    whole = Round(3, [9], [3], [3], [3], [3], times)
    run = Run(batches=[Batch(4, 1.0, rounds=(whole,))], token_ids=[[1, 2, 3, 4]])
    assert run.stats.num_drafts == 9 and run.stats.num_reached == 3 and run.stats.acceptance_rate == 1.0
    plain = Run(batches=[Batch(4, 2.0, rounds=rounds(0, lens=0))], token_ids=[[1, 2, 3, 4]])
    cell = cells.cells([Group(0.0, 1, "x", [{PLAIN_CONTENDER: plain, NGRAM: run}])])[1]
    assert cell["cost_ratio"] == pytest.approx(0.1 / 0.2)  # three levels in 0.3 s
    # The accepted path ended at a leaf of depth 1: no draft after it, so none was rejected.
    run.batches.append(Batch(2, 1.0, rounds=(Round(3, [9], [3], [3], [1], [1], times),)))
    assert run.stats.num_reached == 4 and run.stats.acceptance_rate == 1.0
    assert run.acceptance_counts() == [(2, 2), (1, 1), (1, 1)]


def test_tokens_that_a_grammar_determined_are_not_counted_as_drafts() -> None:
    round_ = Round(3, [5], [3], [5], [3], [3], PhaseTimes(0.3, 0.2, 0.0, 0.0), num_grammar=[2])
    stats = Run(batches=[Batch(6, 1.0, rounds=(round_,))], token_ids=[[1] * 6]).stats
    assert (stats.num_drafts, stats.num_reached, stats.num_accepted) == (3, 3, 3)
