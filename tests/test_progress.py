"""Work that takes long reports what it does, from a thread of its own."""

from __future__ import annotations

import logging
import subprocess
import threading
import time

import pytest

from outrider import cpp_library, progress
from outrider.cli import console
from outrider.runner import kernels

logger = logging.getLogger("outrider.test_progress")


def test_progress_is_logged_until_the_work_ends(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PERIOD", 0.05)
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    caplog.set_level(logging.INFO, logger="outrider")
    before = threading.active_count()
    with progress.logged(logger, "digging", expected=0.1):
        time.sleep(0.4)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "digging: about 0 s" and said[-1].startswith("digging: done in")
    assert len(said) >= 4 and "longer than usual" in said[-2]
    assert {getattr(record, "is_progress", False) for record in caplog.records[1:-1]} == {True}
    assert threading.active_count() == before


def test_work_that_fails_is_not_said_to_be_done(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    caplog.set_level(logging.INFO, logger="outrider")
    with pytest.raises(ValueError, match="no"), progress.logged(logger, "digging", expected=9):
        raise ValueError("no")
    assert [record.getMessage() for record in caplog.records] == ["digging: about 9 s"]


def test_a_wait_outside_a_terminal_goes_on_saying_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PERIOD", 0.0)
    with console.waiting("loading"):
        time.sleep(2.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading ..." and len(lines) >= 2 and lines[1].startswith("loading ... ")


def test_compiling_the_kernels_reports_its_progress(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(progress, "PERIOD", 0.05)
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    caplog.set_level(logging.INFO, logger="outrider")

    def slow(*_: object) -> None:
        time.sleep(0.3)
        raise subprocess.CalledProcessError(1, "g++", stderr="no such thing")

    monkeypatch.setattr(cpp_library, "find_compiler", lambda: "g++")
    monkeypatch.setattr(cpp_library, "compile_library", slow)
    kernels.load_cpu_kernels.__wrapped__()
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("compiling Outrider's CPU kernels") and "left" in said[1] and "did not compile" in said[-1]
