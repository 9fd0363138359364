"""Scripts in bench/: invalid input ends them immediately, and no measurement is lost."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outrider import Completion
from outrider.engine.stats import GenerationStats

SCRIPTS = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    """Import a script as a module: ``script("soak")``."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("audit_check", ["--audits", "0"], "invalid number '0': expected an integer of at least 1"),
        ("grammar_check", ["--answers", "none"], "invalid number 'none': expected an integer of at least 1"),
        ("audit_check", ["--out", "file/x.json"], "cannot write --out"),
        ("tune_check", ["--out", "file/x.json"], "cannot write --out"),
        ("inflate", ["nowhere", "out"], "nowhere is not a model folder"),
        ("faults", ["--only", "typo"], "no fault begins with 'typo'"),
        ("faults", ["--only", "disk", "--page", "page.md"], "give it without --only"),
        ("weights_check", ["--text", "file", "--max-tokens", "1"], "invalid --max-tokens 1: expected at least 2"),
        ("weights_check", ["--text", "file", "--other", "none.gguf"], "invalid --other none.gguf: expected a folder or a GGUF"),
        ("weights_check", ["--text", "file"], "file is empty: expected a text"),
    ],
)
def test_invalid_input_ends_a_check_before_it_runs(
    script, name: str, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    assert ended.value.code and message in f"{ended.value.code} {capsys.readouterr().err}"


def test_a_result_that_cannot_be_written_is_still_printed(script, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert script("outcome").finish({"holds": False, "seconds": 3600}, tmp_path) == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == {"holds": False, "seconds": 3600} and "cannot write" in err


def test_a_check_without_methods_does_not_hold(script) -> None:  # type: ignore[no-untyped-def]
    good, holds = {"invalid": 0, "forbidden_drafts": 0}, script("grammar_check").holds
    assert holds({"plain": good, "medusa": {"skipped": "no heads"}})
    assert not holds({"magic": {"skipped": "unknown method"}})
    assert not holds({"plain": good | {"invalid": 1}}) and not holds({"ngram": good | {"forbidden_drafts": 1}})


def test_an_answer_counts_its_own_tokens_and_those_of_its_grammar(script) -> None:  # type: ignore[no-untyped-def]
    def answer(tokens: int, forced: int, drafts: int, histogram: dict[int, int]) -> Completion:
        stats = GenerationStats(histogram, num_grammar_tokens=forced, num_drafts=drafts)
        return Completion("a", text="", token_ids=[0] * tokens, finish_reason="stop", stats=stats)

    found = script("grammar_check").figures([answer(12, 5, 6, {3: 1, 0: 3}), answer(20, 8, 4, {2: 1})])
    assert found == {
        "draft_acceptance_rate": 0.5, "tokens_per_answer": 16, "rounds_per_answer": 2.5, "forced_per_answer": 6.5
    }  # fmt: skip


def test_a_fault_that_cannot_be_injected_keeps_the_others(script) -> None:  # type: ignore[no-untyped-def]
    def some_fault(place: object) -> str:
        """A promise."""
        raise FileNotFoundError("no such file")

    row = script("faults").measure(some_fault)
    assert row == {
        "fault": "some fault", "promise": "A promise.", "seen": "FileNotFoundError: no such file", "verdict": "BROKEN"
    }  # fmt: skip


def test_faults_need_control_groups_of_version_1(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    faults = script("faults")
    monkeypatch.setitem(faults.NEED_GROUPS, faults.memory_group_at_load, tmp_path / "none")
    monkeypatch.setattr(faults.os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["faults.py", "--only", "memory group"])
    with pytest.raises(SystemExit, match="memory group at load: expected control groups of version 1"):
        faults.main()
