"""``outrider bench serve`` with real servers: one in this process, and one started and ended by the command."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.bench.load import own_server
from outrider.bench.load.arrivals import Load
from outrider.bench.load.cells import Objective, cells
from outrider.bench.load.sweep import Mode, Sweep, Traffic
from outrider.cli import main
from outrider.engine.plan import Plan
from outrider.registry import PLAIN, SPECULATIVE
from outrider.types import OutriderError

from .served import Served


def test_tokens_and_drafts_of_a_real_server_are_counted(served: Served) -> None:
    modes = (Mode(PLAIN, served.url, {"speculative": {"num_draft_tokens": 0}}), Mode(SPECULATIVE, served.url))
    traffic = Traffic(["def add(", "The ship"], requests_per_client=2, max_tokens=12, repeat=1)
    sweep = Sweep(modes, [Load(concurrency=2)], traffic)
    asyncio.run(sweep.run())
    found = {cell["mode"]: cell for cell in cells(sweep.groups, Objective())}
    assert sweep.servers[PLAIN]["id"] == "outrider"
    for cell in found.values():
        assert (cell["requests"], cell["failed"]) == (4, 0)
        assert cell["tok_s"] > 0 and cell["first_token_ms"]["p50"] > 0
    for runs in sweep.groups[0].repeats:
        for run in runs.values():
            assert all(sample.num_tokens == 12 for sample in run.samples)
            assert all(sum(count for _, count in sample.pauses) < 12 for sample in run.samples)
    assert found[PLAIN]["drafts"] == 0 and found[SPECULATIVE]["drafts"] > 0
    assert 1 <= found[SPECULATIVE]["mean_acceptance_length"] <= 4
    assert found[SPECULATIVE]["phase_seconds"]["score"] > 0
    answers = [sample for run in sweep.groups[0].repeats[0].values() for sample in run.samples]
    assert sum(sample.num_drafts for sample in answers) == found[SPECULATIVE]["drafts"]


def test_usage_is_in_every_chunk_on_request(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "def add(", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", served.url + "/v1/completions", json=body | {"stream_options": options}, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-2:] == [12, 12] and len(events) > 2
    assert not events[-1]["choices"]


def command(target: Path, repeat: int) -> list[str]:
    options = "--method ngram -k 2 --compile never --max-len 256 --concurrency 2 --requests 1 --max-tokens 8"
    more = "--workloads story --num-prompts 1 --out out.json"
    return ["bench", "serve", "--target", str(target), "--repeat", str(repeat), *options.split(), *more.split()]


def check_document(out: str, folder: Path, is_interrupted: bool) -> None:
    """Check that the last line is the document of both modes, and that the measured server has ended."""
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((folder / "out.json").read_text())
    assert [cell["mode"] for cell in result["cells"]] == [PLAIN, SPECULATIVE]
    assert bool(result.get("interrupted")) == is_interrupted
    time.sleep(0.1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(result["modes"][0]["url"] + "/health", timeout=5)


def test_the_command_starts_a_server_and_ends_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command(target, repeat=1)) == 0
    check_document(capsys.readouterr().out, tmp_path, is_interrupted=False)


@pytest.mark.parametrize(
    ("options", "compiles", "passed"),
    [([], "always", []), (["--compile", "never"], "never", []), (["--no-self-check"], "always", ["--no-self-check"])],
)
def test_compilation_is_not_measured(
    options: list[str],
    compiles: str,
    passed: list[str],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = []

    def start(arguments: list[str]) -> Any:
        assert arguments[1:] == passed
        plans.append(Plan.read(Path(arguments[0])))
        raise OutriderError("enough")

    monkeypatch.setattr(own_server, "own_server", start)
    assert main(["bench", "serve", "--target", str(target), *options]) == 2
    assert plans[0].given("compile") == compiles and plans[0].given("target") == str(target)
    assert "enough" in capsys.readouterr().err


def test_a_signal_ends_the_command_and_its_server(target: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "outrider", *command(target, repeat=1000)]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        counts = (re.match(r"(\d+)/", line) for line in process.stderr)
        next(count for count in counts if count is not None and int(count[1]) >= 3)  # the first repeat is done
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    check_document(out, tmp_path, is_interrupted=True)
