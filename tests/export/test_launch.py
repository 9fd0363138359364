"""``outrider serve --engine vllm``: started program, folder, options, and replacement of this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_folder import make_folder

from outrider.cli import main

FAKE = """#!{python}
import json, os, signal, sys
def end(number, frame):
    print("signal", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
said = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "path": os.environ.get("PYTHONPATH"), "pid": os.getpid()}}
print(json.dumps(said), flush=True)
signal.pause()
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Write a program that stands in for vLLM or for the Python of its environment."""

    def fake(name: str) -> Path:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(FAKE.format(python=sys.executable))
        file.chmod(0o755)
        return file

    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a target, a plan, and programs that are first on PATH."""
    make_folder(tmp_path / "target")
    (tmp_path / "plan.toml").write_text('target = "target"\nmethod = "suffix"\nnum_draft_tokens = 5\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    said: dict[str, Any] = json.loads(line)
    return said


@pytest.fixture
def told_by(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return the output of the program that ``serve`` starts. It runs as a child, because it would replace this process."""

    def told_by(*arguments: object) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def execute(program: str, command: list[str], environment: dict[str, str]) -> None:
            with subprocess.Popen(command, executable=program, env=environment, stdout=subprocess.PIPE, text=True) as process:
                found.append(told(process))
                process.kill()
            raise SystemExit  # as exec, which does not return

        with monkeypatch.context() as patch:
            patch.setattr(os, "execvpe", execute)
            patch.chdir(folder)
            with pytest.raises(SystemExit):
                main(["serve", "--engine", "vllm", *map(str, arguments)])
        return found[0]

    return told_by


def test_the_plan_runs_with_options_and_signals_passed_on(fake: Any, folder: Path) -> None:
    options = ["plan.toml", "--port", "9001", "--name", "mine", "--max-batch", "3"]
    passed_on = ["--", "--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"]
    command = [sys.executable, "-m", "outrider", "serve", "--engine", "vllm", *options]
    command += ["--engine-python", str(fake("python-of-vllm")), *passed_on]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = told(process)
    assert said["argv"][:3] == ["-m", "vllm.entrypoints.openai.api_server", "--config"]
    config = Path(said["argv"][3])
    assert config.is_absolute() and config.name == "vllm.yaml"
    assert said["argv"][4:8] == ["--port", "9001", "--served-model-name", "mine"]
    assert said["argv"][8:] == passed_on[1:]
    assert said["cwd"] == str(folder)  # so that relative paths after -- are the user's
    assert said["pid"] == process.pid  # the started process itself, not a child
    settings = yaml.safe_load(config.read_text())
    assert settings["max-num-seqs"] == 3 and settings["additional-config"] == {"outrider": {"method": "suffix"}}
    assert os.listdir(said["path"].split(":")[0]) == ["outrider"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert out == f"signal {signal.SIGTERM.value}\n" and process.returncode == 7


def test_without_a_python_the_program_on_the_path_is_run(fake: Any, told_by: Any) -> None:
    fake("vllm")
    argv = told_by("--method", "ngram", "--", "--seed", 3)["argv"]
    assert argv[:2] == ["serve", "--config"] and argv[3:] == ["--seed", "3"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["plan.toml", "--engine-python", "/nowhere/python"], "no program /nowhere/python here: install vLLM"),
        (["plan.toml", "--api-keys", "keys.txt"], "--api-keys is an option of Outrider's own server"),
        (["plan.toml", "--stream-interval", "0"], "--stream-interval is an option of Outrider's own server"),
        (["--method", "early-exit", "--engine-python", "{there}"], "vLLM cannot draft"),
        (["--engine", "sglang", "plan.toml"], "outrider export"),
        (["plan.toml"], "--engine-python"),
    ],
)
def test_usage_errors_are_one_line(
    options: list[str], says: str, fake: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = fake("there")
    assert main(["serve", "--engine", "vllm", *[option.format(there=there) for option in options]]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_keys_of_the_environment_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEYS", "one")
    assert main(["serve", "--engine", "vllm", "plan.toml"]) == 2
    assert "OUTRIDER_API_KEYS is an option of Outrider's own server: unset it" in capsys.readouterr().err


def test_engine_options_require_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--", "--seed", "3"]) == 2
    assert "requires --engine" in capsys.readouterr().err


def test_the_engines_python_may_be_named_as_on_the_path(fake: Any, told_by: Any) -> None:
    fake("python-of-vllm")
    assert told_by("plan.toml", "--engine-python", "python-of-vllm")["argv"][:2] == ["-m", "vllm.entrypoints.openai.api_server"]
