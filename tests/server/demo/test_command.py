"""``outrider demo`` before it serves: errors are one line and found before a model is loaded."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from outrider.cli import main, session
from outrider.cli.options import ModelOptions
from outrider.errors import OutriderError


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["demo", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_an_occupied_port_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refusal(capsys, "--port", str(taken.getsockname()[1]))
    assert "cannot listen on 127.0.0.1" in said and "--port" in said


def test_missing_server_libraries_give_the_install_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "run pip install '.[serve]' in Outrider's folder" in refusal(capsys)


def test_unknown_methods_and_missing_drafts_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "unknown method 'magic'" in refusal(capsys, "--port", "0", "--method", "magic")
    assert "'plain' is the baseline" in refusal(capsys, "--port", "0", "--method", "plain")
    told = refusal(capsys, "--port", "0", "--method", "draft", "--target", str(tmp_path))
    assert "'draft' needs a draft model" in told


@pytest.mark.parametrize(("options", "verifier"), [((), "rejection"), (("--verifier", "block"), "block")])
def test_the_default_verifier_is_the_one_that_the_page_explains(
    options: tuple[str, ...], verifier: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(models: ModelOptions, *_: object, **__: object) -> None:
        raise OutriderError(f"verifier: {models.verifier}")

    monkeypatch.setattr(session, "load", load)
    assert refusal(capsys, "--port", "0", *options) == f"error: verifier: {verifier}"
