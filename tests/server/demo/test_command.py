"""``outrider demo`` before it serves: errors are one line and found before a model is loaded."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path

import pytest
from tiny_folder import make_folder

from outrider.cli import main, session
from outrider.cli.demo import load_track
from outrider.cli.options import ModelOptions
from outrider.errors import OutriderError, requires


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
    command = f"{shlex.quote(sys.executable)} -m pip install -e '.[serve]'"  # for this Python, also if another pip is on PATH
    assert f"the demo requires uvicorn: run {command} in Outrider's folder" in refusal(capsys)


def test_an_import_error_without_a_name_is_not_a_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError, match="Could not import"), requires("serve", "the demo"):
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'")


def test_a_package_that_is_too_old_is_named() -> None:
    with pytest.raises(OutriderError, match="the demo requires json: run"), requires("serve", "the demo"):
        from json import a_newer_function  # type: ignore[attr-defined] # noqa: F401


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

    monkeypatch.setattr(session, "load_plain", load)
    assert refusal(capsys, "--port", "0", *options) == f"error: verifier: {verifier}"


def test_the_hub_stays_enabled_for_a_draft_that_is_loaded_after_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise OutriderError("loading the target")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(session, "check_source", lambda *_: None)
    monkeypatch.setattr(session, "_loaded", load)
    with pytest.raises(OutriderError, match="loading the target"):
        load_track(ModelOptions(target=str(make_folder(tmp_path))), "draft:draft=nobody/nothing")
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize("methods", [None, "suffix"])
def test_options_are_resolved_once_before_the_target_is_loaded(methods: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise OutriderError("loading the target")

    resolve, calls = session.resolve, []
    monkeypatch.setattr(session, "resolve", lambda *given: calls.append(given) or resolve(*given))
    monkeypatch.setattr(session, "load_plain", load)
    with pytest.raises(OutriderError, match="loading the target"):
        load_track(ModelOptions(), methods)
    assert len(calls) == 1


def test_a_wrong_draft_is_refused_before_the_target_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load_plain", lambda *_, **__: pytest.fail("the target was loaded"))
    assert "no model folder './nowhere'" in refusal(capsys, "--port", "0", "--draft", "./nowhere")
