"""Workloads, the grid's order, and the figures made of runs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from tiny_folder import make_folder

from outrider import LLM, OutriderError
from outrider.bench import grid, report, workloads
from outrider.bench.contenders import Contender, Contenders
from outrider.bench.grid import PLAIN_CONTENDER, Group, Plan
from outrider.bench.measure import Run, generate
from outrider.engine import PhaseTimes, Round

NGRAM = Contender("ngram", 3)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(make_folder(tmp_path_factory.mktemp("bench") / "model"), method="plain", compile="never", max_batch=2)


def test_every_workload_has_eight_different_prompts_or_more() -> None:
    for name in workloads.WORKLOADS:
        texts = [prompt.text for prompt in workloads.builtin(name)]
        assert len(set(texts)) == len(texts) >= 8
        assert not any("%%" in text or text != text.rstrip("\n") for text in texts)
    assert len(workloads.builtin("code", 3)) == 3
    with pytest.raises(OutriderError, match="known: code, edit"):
        workloads.builtin("poems")


def test_humaneval_mt_bench_and_gsm8k_lines_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "Human.jsonl.gz"
    lines = [{"task_id": "x/0", "prompt": "def f():\n"}, {"turns": ["Hello", "again"]}, {"question": "2 + 2?", "answer": "4"}]
    with gzip.open(file, "wt") as stream:
        stream.write("\n".join(map(json.dumps, lines)) + "\n")
    prompts = workloads.from_file(file)
    assert [(p.workload, p.text, p.is_chat) for p in prompts] == [
        ("Human", "def f():\n", False),
        ("Human", "Hello", True),
        ("Human", "2 + 2?", True),
    ]
    assert len(workloads.from_file(file, 2)) == 2


@pytest.mark.parametrize("line", ["[]", "3", '{"text": "x"}', '{"prompt": ""}', '{"turns": []}', '{"prompt": "x"', "null"])
def test_a_line_that_is_no_prompt_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(OutriderError, match="line 2"):
        workloads.from_file(file)


def test_chat_goes_through_the_template_where_there_is_one(llm: LLM) -> None:
    prompt = workloads.Prompt("chat", "Hi", is_chat=True)
    text = llm.tokenizer.decode(workloads.encode(llm.tokenizer, prompt))
    assert text == "<|user|>Hi\n<|assistant|>"


def test_contenders_share_the_target_and_leave_no_trace(llm: LLM) -> None:
    contenders, engine, policy = Contenders(llm), llm.engine, llm.engine.policy
    prompt = workloads.encode(llm.tokenizer, workloads.Prompt("x", "for i in range(10):\n    print(i)\nfor i in"))
    plan = Plan((NGRAM,), {"x": [prompt]}, max_tokens=20)
    runs = {c: generate(contenders, c, [prompt], plan.params(0, 0), 1) for c in (PLAIN_CONTENDER, NGRAM)}
    assert runs[NGRAM].token_ids == runs[PLAIN_CONTENDER].token_ids
    assert runs[PLAIN_CONTENDER].num_drafts == 0 and runs[NGRAM].num_drafts > 0
    assert (llm.engine, llm.engine.policy) == (engine, policy)
    assert llm.runner.needs_hidden == llm.proposer.needs_hidden


def test_plain_and_contenders_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(contenders: object, contender: Contender, prompts: list[list[int]], params: object, batch: int) -> Run:
        order.append(contender.label)
        return Run(token_ids=[[1]], seconds=1.0)

    monkeypatch.setattr(grid, "generate", note)
    monkeypatch.setattr(grid, "warm_up", lambda *args: None)
    plan = Plan((NGRAM, Contender("ngram", 5)), {"x": [[1]]}, repeat=3)
    groups = list(grid.run_grid(Contenders(llm), plan))
    assert order == [
        "plain", "ngram k=3", "ngram k=5",
        "ngram k=3", "ngram k=5", "plain",
        "ngram k=5", "plain", "ngram k=3",
    ]  # fmt: skip
    assert [len(group.repeats) for group in groups] == [3]
    assert plan.num_runs == len(order)


def test_k_zero_is_plain_decoding() -> None:
    assert Contender("draft", 0).is_plain and Contender("draft", 0).label == "plain"


def rounds(*accepted: int, lens: int = 4) -> list[Round]:
    return [Round(lens, [lens], [lens], [n], PhaseTimes(0.1, 0.2, 0.05, 0.01)) for n in accepted]


def test_rates_are_those_of_the_glossary() -> None:
    run = Run(token_ids=[[1] * 11], seconds=3.0, first_seconds=1.0, first_tokens=1)
    run.add_rounds(rounds(4, 0, 2), decode_seconds=2.0)
    assert run.histogram == Counter({4: 1, 0: 1, 2: 1})
    assert run.mean_acceptance_length == 1 + 6 / 3
    assert run.acceptance_rate == 6 / (4 + 1 + 3)  # reached: all 4, the first only, 2 and the one rejected
    assert run.tok_s == 11 / 3 and run.decode_tok_s == 10 / 2
    assert run.ms["draft"] == pytest.approx(100) and run.ms["score"] == pytest.approx(200)
    assert sum(run.ms.values()) == pytest.approx(2000 / 3)  # host is whatever of the wall clock is left


def test_cells_are_medians_of_ratios_within_a_repeat() -> None:
    def run(tokens: int, seconds: float, ids: int) -> Run:
        return Run(token_ids=[[ids] * tokens], seconds=seconds)

    speeds = [(10.0, 5.0), (10.0, 2.0), (20.0, 5.0)]  # seconds of plain, of the other; the machine was slow in the last one
    repeats = [{NGRAM: run(10, fast, 1), PLAIN_CONTENDER: run(10, slow, 1)} for slow, fast in speeds]
    repeats[2][NGRAM].token_ids = [[2] * 10]
    cells = report.cells([Group(0.0, 1, "x", repeats)])
    assert [cell["method"] for cell in cells] == ["plain", "ngram"]
    assert cells[1]["speedup"] == 4.0 and cells[1]["speedup_range"] == [2.0, 5.0]
    assert cells[1]["same_text"] == pytest.approx(2 / 3, abs=1e-3)
    assert report.cells([Group(0.8, 1, "x", repeats)])[1]["same_text"] is None
    assert report.cells([Group(0.8, 1, "x", repeats)], same_text_when_sampled=True)[1]["same_text"] is not None
