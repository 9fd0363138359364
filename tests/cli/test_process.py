"""The command as a separate process, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.cli import app


def run(*args: object, stdin: str | None = "", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider", *map(str, args)],
        input=stdin, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
    )  # fmt: skip


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["generate", "--help"], ["bench", "--help"], ["chat", "-h"]])
def test_help_imports_no_heavy_libraries(args: list[str]) -> None:
    program = (
        "import sys; from outrider.cli import main; code = main(sys.argv[1:])\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy', 'safetensors') if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_triton_finds_no_frozen_objects_at_exit() -> None:
    """Otherwise its bindings report dozens of leaked objects after the answer."""
    program = (
        "import gc, sys; from outrider.cli import main\n"
        "sys.modules['triton'] = sys; gc.freeze(); main(['--version']); sys.exit(gc.get_freeze_count() > 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


def test_no_arguments_shows_the_help() -> None:
    done = run()
    assert "generate" in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_generate_writes_text_to_stdout_and_the_rest_to_stderr(target: Path, draft: Path) -> None:
    done = run("generate", "--target", target, "--draft", draft, "--compile", "never", "--max-tokens", 12, "def add(")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "tok/s" not in done.stdout
    assert "12 tokens" in done.stderr and "Loading weights" not in done.stderr


def test_an_error_is_one_line_and_code_2(tmp_path: Path) -> None:
    done = run("generate", "--target", tmp_path / "missing", "hi")
    assert done.returncode == 2 and done.stdout == ""
    *before, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert all(line.startswith("starting ...") for line in before)  # a busy machine imports for seconds, and says how many


@pytest.mark.parametrize("command", ["generate", "compare", "bench", "audit", "doctor", "tune --workloads code"])
def test_a_command_says_that_it_imports_torch(tmp_path: Path, command: str) -> None:
    """Importing takes seconds; ``compare``, the first command of a newcomer, was silent for them."""
    first, *_ = run(*command.split(), "--target", tmp_path / "missing").stderr.splitlines()
    assert first == "starting ..."


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "--temperature", "hot"],
        ["bench", "--busy", "-1"],
        ["bench", "-k", "few"],
        ["bench", "--workloads", "opera"],
        ["bench", "--prompts", "missing.jsonl", "--html", "x.html"],
        ["bench", "--inflate", "1b", "--target", "missing"],
        ["audit", "--batch", "0"],
        ["audit", "--prompts", "missing.jsonl"],
        ["tune", "--workloads", "code", "--batch", "x"],
        ["tune", "--workloads", "code", "--report", "x.txt"],
        ["tune", "--workloads", "code", "--top-p", "0"],
        ["tune", "--workloads", "opera"],
        ["tune", "--traffic", "missing.jsonl"],
    ],
)
def test_a_bad_argument_is_reported_before_torch_is_imported(args: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; from outrider.cli import main; code = main(sys.argv[1:])\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("cache", ["/proc/nowhere", "a file"])
def test_commands_work_without_a_cache_folder(target: Path, tmp_path: Path, cache: str) -> None:
    (tmp_path / "a file").write_text("")
    compiler = tmp_path / "cc"  # compiling the kernels would take half a minute
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho no library > "$2"\n')
    compiler.chmod(0o755)
    where = {"OUTRIDER_CACHE": str(tmp_path / cache), "CXX": str(compiler)}
    done = run("generate", "--target", target, "--compile", "never", "--max-tokens", 4, "hi", **where)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("the cache folder cannot be used") == 1 and "Traceback" not in said
    assert "set OUTRIDER_CACHE to use another one" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_while_loading_print_one_word(target: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "generate", "--target", str(target), "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background test run ignores Ctrl-C
    )  # fmt: skip
    time.sleep(5)  # now it waits for standard input; on a busy machine it may need a second Ctrl-C
    for _ in range(12):
        process.send_signal(number)
        try:
            process.wait(timeout=5)  # another signal during the exit would kill it
            break
        except subprocess.TimeoutExpired:
            continue
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and err.strip().endswith("interrupted")


def test_a_closed_pipe_ends_the_command_silently(target: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "generate", "--target", str(target), "--method", "plain", "--compile", "never",
         "--max-tokens", "60", "hi"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stream:
        err = stream.read()
    assert process.wait(timeout=60) == 1  # 0 would mean that `audit` certified the method
    assert "Traceback" not in err and "Exception ignored" not in err


def test_a_closed_standard_output_is_no_error(target: Path) -> None:
    program = f'exec "{sys.executable}" -m outrider generate --target "{target}" --method plain --max-tokens 3 hi >&-'
    done = subprocess.run(["sh", "-c", program], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "3 tokens" in done.stderr


def test_a_closed_standard_input_is_an_empty_one() -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -m outrider generate <&-'], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == "error: the prompt is empty"


def test_a_second_ctrl_c_does_not_interrupt_the_message_of_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    explain = app.explain

    def impatient(error: BaseException) -> tuple[str, int]:
        os.kill(os.getpid(), signal.SIGINT)
        return explain(error)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(app, "build_app", interrupted)
    monkeypatch.setattr(app, "explain", impatient)
    assert app.main([]) == app.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n" and signal.getsignal(signal.SIGINT) is before
