"""Provenance in results: command line without secrets, and processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bench import provenance
from outrider.bench.provenance import command, commit, cpu_name, origin


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["/usr/bin/outrider", "bench", "-k", "4"], "outrider bench -k 4"),
        (["/lib/outrider/__main__.py", "tune"], "outrider tune"),  # python -m outrider
        (["bench/soak.py", "--minutes", "3"], "python bench/soak.py --minutes 3"),
        (["/elsewhere/check.py"], "python check.py"),  # paths of the machine are dropped
        (["outrider", "generate", "a b"], "outrider generate 'a b'"),
        (["outrider", "bench", "serve", "--concurrency", ""], "outrider bench serve --concurrency ''"),
        (
            ["outrider", "bench", "serve", "--api-key", "sk-1", "-k", "2"],
            "outrider bench serve --api-key hidden -k 2",
        ),
        (["outrider", "bench", "serve", "--api-key=sk-1"], "outrider bench serve --api-key=hidden"),
        (
            ["outrider", "bench", "serve", "--url=http://bob:pass@host:8000"],
            "outrider bench serve --url=http://hidden@host:8000",
        ),
    ],
)
def test_a_result_records_the_command_line(argv: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert command() == told


def test_a_script_is_named_by_its_relative_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench" / "tune_check.py"), "--repeat", "2"])
    assert command() == "python bench/tune_check.py --repeat 2"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("model name\t: Xeon: a\nflags\t\t: fpu avx2 amx_bf16 avx512f\n", "Xeon: a (8 cores; avx2 avx512f amx_bf16)"),
        ("BogoMIPS : 50\nFeatures : fp asimd sve\n", "a64 (8 cores; asimd sve)"),  # Arm
        (None, "a64 (8 cores)"),  # macOS
    ],
)
def test_a_processor_is_named_with_its_instruction_sets(lines: str | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> str:
        if lines is None:
            raise FileNotFoundError(path)
        return lines

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "a64")
    assert cpu_name() == told


def test_a_commit_with_uncommitted_changes_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    code = [tmp_path / "src" / "outrider" / "engine.py", tmp_path / "bench" / "peers" / "compare.py", tmp_path / "README.md"]
    for file in code:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    package = code[0].parent / "bench"
    package.mkdir()
    (package / "provenance.py").write_text("")
    git("init")
    git("add", "-A")
    git("commit", "-m", "all")
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    marked = []
    for file in code:
        file.write_text("changed")
        marked.append((commit() or "").endswith("+"))
        git("checkout", ".")
    assert marked == [True, True, False] and not (commit() or "+").endswith("+")


def test_every_result_records_its_provenance() -> None:
    """Version, commit, machine, command and date, as README states."""
    found = origin()
    assert {"version", "commit", "cpu", "command", "date", "versions"} == set(found)
    assert all(found.values()) or found["commit"] is None  # there is no commit outside a checkout


def test_a_package_inside_another_project_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / ".venv" / "outrider" / "bench"
    package.mkdir(parents=True)
    (package / "provenance.py").write_text("")
    (tmp_path / "own.py").write_text("")
    for words in (["init"], ["add", "own.py"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    assert commit() is None
