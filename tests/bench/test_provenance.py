"""The command that stands in a result: what was typed, whoever runs it, and no key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.bench.provenance import command


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["/usr/bin/outrider", "bench", "--k", "4"], "outrider bench --k 4"),
        (["/lib/outrider/__main__.py", "tune"], "outrider tune"),  # python -m outrider
        (["bench/soak.py", "--minutes", "3"], "python bench/soak.py --minutes 3"),
        (["/elsewhere/check.py"], "python check.py"),  # no folder of one machine
        (["outrider", "generate", "a b"], "outrider generate 'a b'"),
        (["outrider", "bench", "serve", "--concurrency", ""], "outrider bench serve --concurrency ''"),
        (["outrider", "bench", "serve", "--api-key", "sk-1", "--k", "2"], "outrider bench serve --api-key hidden --k 2"),
        (["outrider", "bench", "serve", "--api-key=sk-1"], "outrider bench serve --api-key=hidden"),
    ],
)
def test_a_result_says_what_was_typed(argv: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert command() == told


def test_a_script_is_named_by_its_path_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench" / "tune_check.py"), "--repeat", "2"])
    assert command() == "python bench/tune_check.py --repeat 2"
