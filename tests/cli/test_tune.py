"""`outrider tune` on tiny models: plan, report, resuming after an interrupt, and one-line errors."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.contenders import Contender
from outrider.cli import app
from outrider.cli.options import MethodOptions, ModelOptions
from outrider.cli.serve import joined
from outrider.cli.tune import PLAN, OutputOptions, plan_values
from outrider.engine.plan import Plan
from outrider.errors import OutriderError
from outrider.proposers.plain import PlainProposer
from outrider.search.journal import SCHEMA

Run = Callable[..., "tuple[int, str, str]"]
QUICK = ["--compile", "never", "--num-prompts", 4, "--max-tokens", 20, "--repeat", 1, "-k", "1,3"]


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    file = tmp_path / "traffic.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "def add(first, second):\n    return", "ignore_eos": True},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "naïve café"}]}], "max_tokens": 12},
        {"prompt": "while number > 1:\n    number"},
        {"custom_id": "3", "body": {"prompt": "for i in range(10):\n    print(i)\n" * 3, "temperature": 0, "stop": "zzz"}},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_plan_is_written_that_serve_reads(outrider: Run, target: Path, draft: Path, traffic: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "plan.toml", tmp_path / "tune.html"
    code, shown, err = outrider(
        "tune", "--target", target, "--draft", draft, "--traffic", traffic, *QUICK, "--method", "draft,suffix,early-exit",
        "--batch", "1,2", "--out", out, "--report", page,
    )  # fmt: skip
    assert code == 0, err
    plan = Plan.read(out)
    document = json.loads((tmp_path / "plan.json").read_text())
    found = document["result"]
    assert document["schema"] == "outrider-tune/2"
    assert plan.values["method"] == found["chosen"]["method"] and plan.values["num_draft_tokens"] == found["chosen"]["k"]
    assert plan.values["target"] == str(target) and plan.values["compile"] == "never"
    assert ("draft" in plan.values) == ("draft" in plan.values["method"])
    assert out.read_text().count("\n#") >= 3 and "the plan:" in shown
    methods = {row["method"] for row in found["candidates"]}
    assert {"draft", "suffix", "early-exit"} <= methods
    assert {row["k"] for row in found["candidates"] if row["method"] == "draft"} == {1, 3, "auto"}
    assert all(row["why"] and row["speedup"] > 0 and 2 <= row["prompts"] <= 4 for row in found["candidates"])
    assert found["rungs"] and found["rungs"][0]["contenders"] >= 7
    assert any("batch 2, prompts 1" in name for name in document["found"]["rung 1"])
    twin = next(row for row in found["candidates"] if row["method"] == "draft" and row["k"] == 3)
    assert twin["tau"] > 2.5  # the draft is a copy of the target
    html = page.read_text()
    assert html.startswith("<!doctype html>") and "Outrider plan" in html and html.count("<svg") == 1
    assert not re.search(r"https?:|<script|<link|<img|@import|src=", html)


def test_an_interrupted_search_resumes(
    outrider: Run, target: Path, traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.search import search

    out = tmp_path / "plan.toml"
    command = ["tune", "--target", target, "--traffic", traffic, *QUICK, "--method", "ngram,suffix", "--out", out]
    generate, ran = search.generate, list[str]()

    def interrupted(contenders: Any, contender: Contender, *args: Any) -> Any:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(contender.label)
        return generate(contenders, contender, *args)

    monkeypatch.setattr(search, "generate", interrupted)
    code, _, err = outrider(*command)
    assert code == app.EXIT_INTERRUPTED and "--resume" in err and not out.exists()
    found = json.loads(out.with_suffix(".json").read_text())["found"]
    assert set(found) == {"recorded", "rung 1"} and len(found["rung 1"]) == 3

    asked: list[str] = []
    monkeypatch.setattr(search, "generate", lambda *args: [asked.append(args[1].label), generate(*args)][1])
    code, _, err = outrider(*command, "--seed", 7, "--resume")
    assert code == 2 and "other values of sampling settings:" in err and not asked

    def full_disk(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.search.report.page", full_disk)  # a missing report loses neither plan nor table
    code, shown, err = outrider(*command, "--resume", "--report", tmp_path / "page.html")
    assert code == 0 and "page.html: No space left on device" in err, err
    assert "the plan:" in shown and out.exists()
    after = json.loads(out.with_suffix(".json").read_text())["found"]
    assert after["recorded"] == found["recorded"] and after["rung 1"].items() >= found["rung 1"].items()
    assert len(asked) == sum(len(runs) for stage, runs in after.items() if stage != "recorded") - 3


def test_two_searches_do_not_write_one_journal(
    outrider: Run, target: Path, traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.search.journal import exclusive

    monkeypatch.setattr("outrider.cli.session.load_plain", lambda *_, **__: pytest.fail("the target was loaded"))
    journal = tmp_path / "plan.json"
    command = ["tune", "--target", target, "--traffic", traffic, *QUICK, "--out", tmp_path / "plan.toml"]
    with exclusive(journal):
        code, _, err = outrider(*command)
        assert code == 2 and err.endswith(
            f"another search is writing to {journal}: wait for it, or give another --out or --json\n"
        )
        opened = (tmp_path / ".plan.json.lock").open("a")  # of a search that is about to lock it
    with opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(OutriderError, match="another search is writing"), exclusive(journal):
            pass


def test_an_interrupt_before_the_first_result_promises_no_results(
    outrider: Run, target: Path, traffic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.search.search.Search.run", interrupted)
    command = ["--target", target, "--traffic", traffic, *QUICK, "--method", "ngram", "--out", tmp_path / "plan.toml"]
    code, _, err = outrider("tune", *command)
    assert code == app.EXIT_INTERRUPTED and "--resume" not in err and not (tmp_path / "plan.json").exists()


def test_a_search_without_a_run_leaves_no_journal(outrider: Run, target: Path, tmp_path: Path) -> None:
    traffic = tmp_path / "short.jsonl"
    traffic.write_text('{"prompt": "hi", "max_tokens": 1}\n' * 2)
    command = ["--target", target, "--traffic", traffic, "--method", "ngram", "--compile", "never"]
    code, _, err = outrider("tune", *command, "--out", tmp_path / "plan.toml")
    assert code == 2 and "all outputs have fewer than 2 tokens" in err
    assert sorted(tmp_path.iterdir()) == [tmp_path / ".plan.json.lock", traffic]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no traffic"),
        (["--workloads", "code", "--traffic", "x.jsonl"], "exclude each other"),
        (["--workloads", "opera"], "unknown workload"),
        (["--traffic", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--workloads", "code", "--method", "plain"], "name a method that drafts"),
        (["--workloads", "code", "--method", "nonsense"], "unknown method"),
        (["--workloads", "code", "--method", "medusa"], "medusa"),
        (["--workloads", "code", "-k", "2,0"], "invalid --num-draft-tokens 0: expected at least 1"),
        (["--workloads", "code", "-k", "few"], "--num-draft-tokens"),
        (["--workloads", "code", "--batch", "0"], "invalid --batch 0: expected at least 1"),
        (["--workloads", "code", "--batch", "1,8", "--num-prompts", "15"], "--batch 8 needs at least 16 prompts (two batches)"),
        (["--workloads", "code", "--num-prompts", "1"], "--batch 1 needs at least 2 prompts (two batches), got 1"),
        (["--workloads", "code", "--batch", "16"], "--batch 16 needs at least 32 prompts (two batches), got"),
        (["--workloads", "code", "--report", "x.pdf"], ".html"),
        (["--workloads", "code", "--resume"], "--resume"),
        (["--workloads", "code", "--out", "found.json"], "--out and --json are both found.json"),
        (["--workloads", "code", "--max-tokens", "1"], "invalid --max-tokens 1: expected a whole number, at least 2"),
        (["--workloads", "code", "--max-tokens", "600"], "no room for a prompt"),
    ],
)
def test_invalid_input_gives_one_line(
    outrider: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = outrider("tune", "--target", target, "--compile", "never", *options)
    lines = [line for line in err.splitlines() if line.strip() and not line.endswith("...") and "auto: " not in line]
    assert code == 2 and len(lines) == 1 and words in lines[0], err
    assert not (tmp_path / "plan.toml").exists()


def test_a_plan_works_from_any_directory(tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders in the plan, also in options of a method, are absolute; hub ids of drafts are unchanged."""
    monkeypatch.chdir(draft.parent)
    given = SimpleNamespace(
        llm=SimpleNamespace(speculation=SimpleNamespace(drafts={"heads": draft})),
        proposers=dict.fromkeys(["draft:draft=draft", "eagle:draft=heads", "suffix+draft:draft.draft=draft"], PlainProposer()),
    )
    (draft.parent / "heads").mkdir(exist_ok=True)
    for method, wanted in {
        "draft:draft=draft": f"draft:draft={draft}",
        "eagle:draft=heads": "eagle:draft=heads",
        "suffix+draft:draft.draft=draft": f"suffix+draft:draft.draft={draft}",
    }.items():
        chosen = SimpleNamespace(chosen=Contender(method, 4))
        found = plan_values(ModelOptions(), chosen, given)  # type: ignore[arg-type]
        assert found == {"method": wanted, "num_draft_tokens": 4}  # no defaults
    monkeypatch.chdir(tmp_path)
    beside = Plan({"method": "draft:draft=draft"}, draft.parent)
    assert beside.given("method") == f"draft:draft={draft}"


def test_a_plan_with_special_characters_is_valid_toml(tmp_path: Path) -> None:
    values = {"target": 'odd "name"\\ with # and = and na\u00efve', "method": "draft:draft=\x7f\x1b", "same_text": True}
    Plan(values).write(tmp_path / "plan.toml", ["caf\u00e9 \x1b\x7f"])
    assert Plan.read(tmp_path / "plan.toml").values == values
    assert "caf\u00e9" in (tmp_path / "plan.toml").read_bytes().decode("utf-8")


def test_an_invalid_switch_in_a_plan_is_explained_in_toml(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("same_text = 1")
    with pytest.raises(OutriderError, match="invalid same_text 1: expected true or false"):
        Plan.read(tmp_path / "plan.toml")


def test_a_plan_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("\ufeffmax_len = 64\n", encoding="utf-8")
    assert Plan.read(tmp_path / "plan.toml").values == {"max_len": 64}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('method = "sufix"', "method: unknown method 'sufix'"),
        ('method = "draft:x"', "method: invalid method 'draft:x'"),
        ('draft = "/moved/head"', "draft: /moved/head does not exist"),
        ('target = "./moved"', "target: ./moved does not exist"),
        ('method = "eagle:draft=./moved"', "method: ./moved does not exist"),
    ],
)
def test_an_error_in_a_plan_names_the_file_and_the_key(outrider: Run, tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(line)
    for command in (["serve", file], ["export", file, "--to", "vllm"], ["bench", "serve", file]):
        code, _, err = outrider(*command)
        assert code == 2 and f"error: {file}, {words}" in err
    joined(Plan.read(file), ModelOptions(target="a/b", draft="a/b"), MethodOptions("ngram"))  # replaces the wrong value


def test_a_plan_that_is_a_device_has_its_intermediate_results_in_the_current_folder() -> None:
    assert OutputOptions(out=Path(os.devnull)).journal == OutputOptions().journal == Path(PLAN).with_suffix(".json")


def test_an_existing_plan_is_not_overwritten(outrider: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text("num_draft_tokens = 3\n")
    code, _, err = outrider("tune", "--workloads", "code")
    assert code == 2 and "--out plan.toml to replace it" in err
    for mistake, words in (["--workloads", "opera"], "unknown workload"), ([], "no traffic"), (["--batch", "x"], "--batch"):
        code, _, err = outrider("tune", *mistake)
        assert code == 2 and words in err and "plan.toml" not in err
    assert (tmp_path / "plan.toml").read_text() == "num_draft_tokens = 3\n"


@pytest.mark.parametrize("has_plan", [True, False])
@pytest.mark.parametrize("content", ["{}", json.dumps({"schema": SCHEMA})])
def test_a_file_of_others_or_an_unfinished_search_is_not_overwritten(
    outrider: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, has_plan: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if has_plan:
        (tmp_path / "config.toml").write_text("num_draft_tokens = 3\n")
    (tmp_path / "config.json").write_text(content)
    code, _, err = outrider("tune", "--workloads", "code", "--out", "config.toml")
    assert code == 2 and "config.json already exists: give --resume" in err
    assert (tmp_path / "config.json").read_text() == content
