"""Slow operations report their progress from a separate thread."""

from __future__ import annotations

import io
import logging
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from outrider import progress
from outrider.cli import console
from outrider.native import build

Records = Callable[[logging.Logger], "list[logging.LogRecord]"]
logger = logging.getLogger("outrider.test_progress")


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Collect all log messages, independent of what other tests did to logging."""

    def of(said_by: logging.Logger) -> list[logging.LogRecord]:
        found: list[logging.LogRecord] = []

        def note(record: logging.LogRecord) -> None:
            found.append(record)

        monkeypatch.setattr(said_by, "handle", note)
        monkeypatch.setattr(said_by, "isEnabledFor", lambda level: True)
        return found

    return of


def test_progress_is_logged_until_the_work_ends(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PERIOD", 0.05)
    found, before = records(logger), threading.active_count()
    with progress.logged(logger, "digging", expected=0.1):
        time.sleep(0.4)
    said = [record.getMessage() for record in found]
    assert said[0] == "digging: about 0 s" and said[-1].startswith("digging: done in")
    assert len(said) >= 4 and "longer than usual" in said[-2]
    assert {getattr(record, "is_progress", False) for record in found[1:-1]} == {True}
    assert threading.active_count() == before


def test_an_interrupt_while_the_reporter_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, threading.active_count()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), progress.reported_every(60, lambda _: None):
        pass
    assert threading.active_count() == before


def test_failed_work_is_not_reported_as_done(records: Records) -> None:
    found = records(logger)
    with pytest.raises(ValueError, match="no"), progress.logged(logger, "digging", expected=9):
        raise ValueError("no")
    assert [record.getMessage() for record in found] == ["digging: about 9 s"]


def test_progress_continues_outside_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PERIOD", 0.0)
    with console.waiting("loading"):
        time.sleep(2.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading ..." and len(lines) >= 2 and lines[1].startswith("loading ... ")


def test_compiling_a_library_reports_its_progress(records: Records, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(progress, "PERIOD", 0.05)
    found = records(build.logger)

    def slow(*_: object, **__: object) -> None:
        time.sleep(0.3)
        raise subprocess.CalledProcessError(1, "g++", stderr="no such thing")

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(subprocess.CalledProcessError):
        build.library(["g++"])
    said = [record.getMessage() for record in found]
    assert said[0].startswith("compiling the CPU kernels") and "left" in said[1] and len(said) >= 3


def test_a_terminal_shows_the_remaining_time_of_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = [0.0], io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120)
    monkeypatch.setattr(progress, "console", lambda: terminal)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress.shown("draft") as report:
        for step in range(1, 8):
            now[0] += 40
            report(0.1 * step, 1.0, f"step {step}")
    assert "0:02:00 left  draft: step 7" in shown.getvalue() and "70.0%" in shown.getvalue()


def test_progress_in_a_log_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress.shown() as report:
        for seconds, done, what in (
            (0, 0, "compiling"),
            (60, 0, "[a]"),
            (61, 1, "b"),
            (70, 2, "b"),
            (71, 3, "b"),
            (80, 0, "c"),
        ):
            now[0] = seconds
            report(done, 4, what)
    lines = ["0/4 compiling", "0/4 [a]", "2/4 0:00:18 left b", "0/4 c"]
    assert capsys.readouterr().err.splitlines() == lines  # what precedes the first step, and other work, predict nothing
