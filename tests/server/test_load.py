"""``outrider bench serve`` against real servers: one in this process, and one that the command starts and ends itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from outrider.bench.load.arrivals import Load
from outrider.bench.load.cells import Objective, cells
from outrider.bench.load.sweep import PLAIN, SPECULATIVE, Mode, Sweep, Traffic

from .served import Served


def test_tokens_and_drafts_of_a_real_server_are_counted(served: Served) -> None:
    modes = (Mode(PLAIN, served.url, {"speculative": {"k": 0}}), Mode(SPECULATIVE, served.url))
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
            assert all(sample.num_tokens == 12 and sample.num_prompt_tokens > 3 for sample in run.samples)
            assert all(sum(count for _, count in sample.pauses) < 12 for sample in run.samples)
    assert found[PLAIN]["drafts"] == 0 and found[SPECULATIVE]["drafts"] > 0
    assert 1 <= found[SPECULATIVE]["mean_acceptance_length"] <= 4
    assert found[SPECULATIVE]["phase_seconds"]["score"] > 0
    answers = [sample for run in sweep.groups[0].repeats[0].values() for sample in run.samples]
    assert sum(sample.num_drafts for sample in answers) == found[SPECULATIVE]["drafts"]


def test_usage_stands_in_every_chunk_where_it_is_asked_for(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "def add(", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", served.url + "/v1/completions", json=body | {"stream_options": options}, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-2:] == [12, 12] and len(events) > 2
    assert not events[-1]["choices"]


@pytest.mark.parametrize("ends", ["by itself", "by a signal"])
def test_the_command_starts_a_server_and_ends_it(ends: str, target: Path, tmp_path: Path) -> None:
    options = ["--target", target, "--method", "ngram", "--k", 2, "--compile", "never", "--max-len", 256, "--concurrency", 2]
    more = ["--requests", 1, "--repeat", 1 if ends == "by itself" else 1000, "--max-tokens", 8, "--workloads", "story"]
    command = [sys.executable, "-m", "outrider", "bench", "serve", *options, *more, "--num-prompts", 1, "--out", "out.json"]
    with subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        if ends == "by a signal":
            assert process.stderr is not None
            next(line for line in process.stderr if line.startswith("3/"))  # the first repeat is done
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    assert process.returncode == (0 if ends == "by itself" else 130), err
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert [cell["mode"] for cell in result["cells"]] == [PLAIN, SPECULATIVE]
    assert bool(result.get("interrupted")) == (ends == "by a signal")
    time.sleep(0.1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(result["modes"][0]["url"] + "/health", timeout=5)
