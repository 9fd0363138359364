"""vLLM runs exported plans and accepts as many drafts as Outrider. Run with scripts/test -m vllm where vLLM is installed.

vLLM pins its own torch: give the Python of its environment in VLLM_PYTHON. Each case starts a server, which takes some minutes
on a CPU: VLLM_PYTHON=... scripts/test -m vllm -k "serving and draft" runs one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider import LLM, SamplingParams, ScriptedProposer
from outrider.bench.load.counters import ACCEPTED, DRAFTS, ROUNDS, parse
from outrider.bench.workloads import as_text, builtin
from outrider.engine.plan import Plan
from outrider.export.deployment import read_deployment
from outrider.export.engine import write
from outrider.export.vllm import Vllm
from outrider.types import Context

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed")]

K, MAX_LEN, MAX_TOKENS = 4, 512, 64
START_SECONDS = 900.0
WITHIN = 0.05
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_USE_AOT_COMPILE": "0",  # 0.32 cannot load its saved code on a CPU
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PROMPTS = [as_text(prompt) for kind in ("code", "edit", "json", "story") for prompt in builtin(kind, 6)]


@contextmanager
def serving(plan: Path, *options: str) -> Iterator[str]:
    """Run ``outrider serve --engine vllm``, yield its address when it answers, and stop it with a signal."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = plan.with_suffix(".log")
    command = [sys.executable, "-m", "outrider", "serve", "--engine", "vllm", str(plan), "--engine-python", str(PYTHON)]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options], env={**os.environ, **ENVIRONMENT}, stdout=out, stderr=out
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                if httpx.get(url + "/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def counted_by_vllm(plan: Path, *options: str) -> list[float]:
    """Send prompts with OpenAI's client and return vLLM's rounds with drafts, drafts and accepted drafts."""
    with serving(plan, *options) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=600)
        assert [model.id for model in client.models.list()] == ["outrider"]
        for prompt in PROMPTS:
            answer = client.completions.create(
                model="outrider", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None and answer.usage.completion_tokens == MAX_TOKENS
        counters = parse(httpx.get(url + "/metrics", timeout=60).text)
        return [counters[name, ""] for name in (ROUNDS, DRAFTS, ACCEPTED)]


def counted_by_outrider(**options: Any) -> list[float]:
    """Generate for the same prompts, one by one, in this process, and return the counters."""
    llm = LLM(dtype="float32", max_len=MAX_LEN, num_draft_tokens=K, compile="never", **options)
    for prompt in PROMPTS:
        llm.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    stats = llm.engine.stats
    return [stats.num_drafted_rounds, stats.num_drafts, stats.num_accepted]


def compare(theirs: list[float], ours: list[float]) -> None:
    """Compare tokens per round with drafts, and the share of accepted drafts."""
    assert theirs[0] and ours[0]
    lengths = [1 + accepted / rounds for rounds, _, accepted in (theirs, ours)]
    rates = [accepted / drafts for _, drafts, accepted in (theirs, ours)]
    assert lengths[0] == pytest.approx(lengths[1], rel=WITHIN), (theirs, ours)
    assert rates[0] == pytest.approx(rates[1], rel=WITHIN), (theirs, ours)


def plan_of(folder: Path, **values: Any) -> Path:
    file = folder / "plan.toml"
    Plan(
        {
            "num_draft_tokens": K,
            "max_len": MAX_LEN,
            "max_batch": 4,
            "dtype": "float32",
            "kv_memory": 1,
            "compile": "never",
            **values,
        }
    ).write(file)
    return file


READ = {  # method -> vLLM's name, and other values that it reads
    "plain": (None, {}),
    "draft": ("draft_model", {"rule": "block"}),
    "ngram:min_n=1:max_n=3": ("ngram", {"window": [1, 3]}),
    "eagle": ("eagle3", {}),
    "medusa": ("medusa", {}),
    "suffix+ngram": ("custom_class", {"additional": {"outrider": {"method": "suffix+ngram"}}}),
}


def test_vllm_loads_every_exported_plan(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(len(READ))]
    for method, folder in zip(READ, folders, strict=True):
        values = {
            "num_draft_tokens": K,
            "max_len": MAX_LEN,
            "max_batch": 4,
            "kv_memory": 1,
            "verifier": "block",
            "method": method,
        }
        write(Vllm(), read_deployment(Plan(values)), folder, False)
    script = Path(__file__).with_name("vllm_read.py")
    environment = {**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": ""}
    command = [str(PYTHON), str(script), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(READ)
    for (name, more), read in zip(READ.values(), lines, strict=True):
        general = {"max_len": MAX_LEN, "max_batch": 4, "host": "127.0.0.1", "kv_memory": 1 << 30, "method": name}
        assert read == read | general | more | ({} if name is None else {"k": K})


@pytest.mark.parametrize("method", ["draft", f"eagle:top_k=1:max_nodes={K}", "suffix", "suffix+ngram"])
def test_serving_in_vllm_accepts_what_outrider_accepts(method: str, tmp_path: Path) -> None:
    from outrider.family import drafts

    compare(counted_by_vllm(plan_of(tmp_path, method=method)), counted_by_outrider(method=method, drafts=drafts()))


def test_serving_ngrams_with_outriders_own_code_accepts_what_outrider_accepts(tmp_path: Path) -> None:
    theirs = counted_by_vllm(plan_of(tmp_path, method="ngram"), "--own-code")
    compare(theirs, counted_by_outrider(method="ngram"))


def test_serving_vllms_own_ngrams_have_the_plans_window(tmp_path: Path) -> None:
    """vLLM continues the earliest match of the longest n-gram up to the end of the text; Outrider uses the same rule here."""
    theirs = counted_by_vllm(plan_of(tmp_path, method="ngram:min_n=2:max_n=4"))

    def earliest(context: Context, k: int) -> list[Sequence[int]]:
        return [
            first_match(request.token_ids, 2, 4)[: min(k, limit)]
            for request, limit in zip(context.requests, context.limits, strict=True)
        ]

    compare(theirs, counted_by_outrider(proposer=ScriptedProposer.of_chains(earliest)))


def first_match(tokens: Sequence[int], min_n: int, max_n: int) -> Sequence[int]:
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        end = list(tokens[-n:])
        for start in range(len(tokens) - n):
            if list(tokens[start : start + n]) == end:
                return tokens[start + n :]
    return []
