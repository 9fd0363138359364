"""``outrider audit`` on a tiny model: exit codes, JSON document and self-contained page."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_folder import make_folder, make_tokenizer
from tiny_hybrids import hybrid

from outrider.audit import same_text, sampling, tables
from outrider.bench.workloads import Prompt
from outrider.cli.audit import OutputOptions, encode_prompts, stages, write_certificates
from outrider.errors import OutriderError
from outrider.files import earlier
from outrider.sampling_params import SamplingParams
from outrider.search.journal import is_finished

Run = Callable[..., "tuple[int, str, str]"]
QUICK = [
    "--compile",
    "never",
    "-k",
    2,
    "--num-prompts",
    2,
    "--max-tokens",
    8,
    "--tv",
    0.3,
    "--power",
    0.9,
    "--temperature",
    0.4,
    "--batch",
    256,
]


@pytest.fixture(scope="module")
def models(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Return options of a target with a draft that is not its copy."""
    return ["--target", target, "--draft", make_folder(tmp_path_factory.mktemp("models") / "other", seed=1)]


@pytest.fixture
def two_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the third control, which takes a hundred times as many samples to detect and has separate tests."""
    monkeypatch.setattr(sampling, "CONTROLS", sampling.CONTROLS[:2])


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models") / "hybrid", make_tokenizer()
    hybrid("qwen3_5_text", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("two_controls")
def test_a_recurrent_hybrid_is_certified(outrider: Run, tiny_hybrid: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    code, shown, err = outrider("audit", "--target", tiny_hybrid, *QUICK, "--method", "low-bit", "--out", out)
    assert code == 0, (shown, err)
    assert [each["verdict"] for each in read(out)["methods"]] == ["certified"]


@pytest.mark.usefixtures("two_controls")
def test_drafts_of_one_pass_over_mask_tokens_are_certified(outrider: Run, target: Path, tmp_path: Path) -> None:
    draft, out = make_folder(tmp_path / "parallel", seed=1, pard_token=9), tmp_path / "audit.json"
    code, shown, err = outrider("audit", "--target", target, "--draft", draft, *QUICK, "--method", "draft", "--out", out)
    assert code == 0, (shown, err)
    (method,) = read(out)["methods"]
    assert method["verdict"] == "certified" and method["sampling"]["parts"][sampling.AS_IS]["origins"]["accepted"] > 0


@pytest.mark.usefixtures("two_controls")
def test_a_certificate_is_written_and_the_exit_code_is_0(outrider: Run, models: list[object], tmp_path: Path) -> None:
    out, html = tmp_path / "audit.json", tmp_path / "audit.html"
    code, shown, err = outrider("audit", *models, *QUICK, "--method", "draft", "--out", out, "--html", html)
    assert code == 0, (shown, err)
    assert "certified" in shown and "2 of 2 caught" in shown
    document = read(out)
    assert document["schema"] == "outrider-audit/1" and document["kind"] == "certificate" and document["certified"]
    (method,) = document["methods"]
    assert method["verdict"] == "certified" and method["greedy"]["defects"] == 0
    assert {each["name"] for each in method["sampling"]["controls"]} == {"no residual", "untempered draft"}
    for part in method["sampling"]["parts"].values():
        assert all(0 <= test["p_value"] <= test["holm_p_value"] <= 1 for test in part["tests"])
    page = html.read_text()
    assert page.startswith("<!doctype html>") and "<title>Outrider audit" in page and page.count("<caption>") >= 5
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|src=", page)


def test_a_lossy_verifier_ends_with_exit_code_3(outrider: Run, models: list[object]) -> None:
    options = [*QUICK, "--method", "draft", "--verifier", "typical", "--temperature", 0]
    code, shown, _ = outrider("audit", *models, *options)
    assert code == 3 and "LOSSY" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "nonsense"], "unknown method"),
        (["--method", "plain"], "the baseline"),
        (["--method", "draft", "-k", "0"], "invalid --num-draft-tokens 0: expected a whole number, at least 1"),
        (["--method", "draft", "-k", "1,2"], "require --same-text"),
        (["--method", "medusa"], "medusa"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--same-text", "--resume"], "--out"),
    ],
)
def test_invalid_input_exits_with_code_2(outrider: Run, models: list[object], options: list[str], message: str) -> None:
    code, _, err = outrider("audit", *models, "--compile", "never", *options)
    assert code == 2 and message in err.splitlines()[-1]


def test_same_text_compares_every_cell_and_resumes(
    outrider: Run, models: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "grid.json"
    options = ["--compile", "never", "--method", "draft", "-k", "1,3", "--batch", "1,2", "--max-tokens", 8]
    options += ["--num-prompts", 3]
    code, shown, err = outrider("audit", "--same-text", *models, *options, "--out", out)
    assert code == 0, (shown, err)
    document = read(out)
    assert document["kind"] == "same-text" and document["differing"] == 0 and document["certified"]
    assert len(document["cells"]) == 2 * (1 + 2 * 2)  # two temperatures: plain at the second batch size, and the grid

    def twice(*args: Any) -> Iterator[object]:
        yield from islice(same_text.compared(*args), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("outrider.audit.run.compared", twice)
        part = tmp_path / "part.json"
        code, _, err = outrider("audit", "--same-text", *models, *options, "--out", part)
    assert code == 130 and "2 of 10 comparisons are in" in err and "--resume" in err and len(read(part)["cells"]) == 2
    document["cells"] = document["cells"][:4]
    document["cells"][0]["differing"] = 1
    out.write_text(json.dumps(document))
    code, shown, _ = outrider("audit", "--same-text", *models, *options, "--out", out, "--resume")
    assert code == 3 and "1 texts differ" in shown  # earlier cells were kept
    assert len(read(out)["cells"]) == 10
    code, _, err = outrider("audit", "--same-text", *models, *options, "--seed", 1, "--max-tokens", 9, "--out", out, "--resume")
    assert code == 2 and "was made with other values of" in err
    other = ["--target", models[1], "--draft", models[1]]
    code, _, err = outrider("audit", "--same-text", *other, *options, "--out", out, "--resume")
    assert code == 2 and "with other values of models" in err


def test_a_draft_length_above_the_maximum_of_a_method_is_not_tested_again() -> None:
    grid = same_text.Grid({"medusa": 3, "draft": 64}, (1, 3, 5, 8), (1,), (0.0,), [], SamplingParams())
    tested = [(cell["method"], cell["k"]) for cell in grid.cells()]
    assert tested == [("medusa", 1), ("medusa", 3), ("draft", 1), ("draft", 3), ("draft", 5), ("draft", 8)]


@pytest.mark.parametrize("methods", [["draft"], ["draft", "suffix"]])
def test_methods_that_all_need_too_many_samples_are_reported(
    methods: list[str], outrider: Run, models: list[object], tmp_path: Path
) -> None:
    out, html = tmp_path / "audit.json", tmp_path / "audit.html"
    options = [*QUICK, "--method", ",".join(methods), "--max-samples", 1, "--out", out, "--html", html]
    code, shown, _ = outrider("audit", *models, *options)
    assert code == 3 and all(f"{name}: " in shown for name in methods)
    assert re.search(r"draft: the audit needs [\d,]+ samples with .* drafts.*, more than --max-samples 1: ", shown)
    assert "verdict" not in shown  # no empty table
    assert set(read(out)["not_possible"]) == set(methods) and "not audited" in html.read_text()


def test_brackets_are_not_markup_and_failing_drafts_are_reported(tmp_path: Path) -> None:
    from rich.console import Console

    cell = {"method": "eagle:draft=./a[/b]", "k": 2, "batch": 1, "temperature": 0.0, "prompts": 3, "differing": 0}
    result = {
        "kind": "same-text", "target": "./my[/model]", "certified": False, "differing": 0, "faults": 4,
        "cells": [cell | {"faults": 4}], "grid": {"max_tokens": 8}, "not_possible": {},
        **dict.fromkeys(("command", "date", "version", "commit", "device", "dtype", "threads", "seconds"), "x"),
    }  # fmt: skip
    with (tmp_path / "screen").open("w+") as screen:
        Console(file=screen, width=200).print(tables.grid_table(result))
        Console(file=screen, width=200).print(tables.certificates(result | {"methods": [], "not_possible": {"a[/b]": "c[/d]"}}))
        screen.seek(0)
        shown = " ".join(screen.read().split())
    assert "./a[/b]" in shown and "./my[/model]" in shown and "a[/b]: c[/d]" in shown
    assert "drafting failed 4 time(s)" in shown and "drafting failed 4 time(s)" in tables.page(result)


def test_a_prompt_without_tokens_is_named() -> None:
    llm: Any = SimpleNamespace(tokenizer=lambda text: {"input_ids": [1] * len(text)}, runner=SimpleNamespace(max_len=100))
    with pytest.raises(OutriderError, match="prompt 2 is empty after tokenization"):
        encode_prompts(llm, [Prompt("audit", "a"), Prompt("audit", "")], max_tokens=4, longest=2)
    with pytest.raises(OutriderError, match=r"prompt 1 has 97 tokens; with the 8 tokens of .* exceeds the context of 100"):
        encode_prompts(llm, [Prompt("audit", "a" * 97)], max_tokens=4, longest=2)


def test_a_control_may_take_more_samples_than_planned() -> None:
    told: list[tuple[float, float, str]] = []
    say = stages(lambda *state: told.append(state), "draft")
    say("planning", 0, 0)
    say("as it is", 50, 200.0)
    say("as it is", 200, 200.0)
    assert told == [(0, 0, "draft: planning"), (50, 200, "draft: as it is"), (250, 250, "draft: as it is")]


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["cut", "list", "nested"])
def test_a_run_is_not_continued_from_another_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(text)
    with pytest.raises(OutriderError, match="was not written by outrider audit --same-text"):
        earlier(tmp_path / "out.json", {}, "grid", "outrider audit --same-text")
    assert not is_finished(tmp_path / "out.json")


def test_a_second_ctrl_c_does_not_lose_the_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[dict[str, Any]]:
        yield {"certified": False}
        raise KeyboardInterrupt

    def second(_: object) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    monkeypatch.setattr("outrider.audit.run.certificates", interrupted)
    monkeypatch.setattr("outrider.audit.tables.page", second)
    monkeypatch.setattr("outrider.audit.tables.certificates", str)
    output = OutputOptions(out=tmp_path / "x.json", html=tmp_path / "x.html")
    nothing: Any = None
    with pytest.raises(KeyboardInterrupt):
        write_certificates(nothing, nothing, 1, output)
    assert output.out is not None and json.loads(output.out.read_text()) == {"certified": False}
    assert output.html is not None and output.html.exists()
