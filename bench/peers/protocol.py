"""What driver and workers say to each other: one JSON line per request, one per answer.

A worker is one engine in one process, run by that engine's own Python, so this file imports the standard library only.
It knows no engine: a worker hands `serve` a factory and answers `generate` for one prompt at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

METHODS = ("plain", "draft", "ngram")
# auto: what the engine itself would choose; the last four are of weights only, the last two are llama.cpp's names
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "q8_0", "q4_k_m")


@dataclass(frozen=True)
class WorkerArgs:
    """How a worker is started; `method` and `k` matter only to engines that fix them at load time."""

    target: str
    draft: str | None
    dtype: str
    threads: int
    max_len: int
    cache_dir: str
    method: str
    k: int


@dataclass(frozen=True)
class Request:
    """Generate exactly `max_tokens` per prompt, batch 1, one prompt after the other, end-of-text ignored."""

    method: str = "plain"
    k: int = 0
    schedule: str = "constant"  # transformers: heuristic or dynamic too; ours: auto too
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    prompts: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """One prompt's output and its clock; the first chunk is what came out together with the prompt's pass."""

    token_ids: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int


class ChunkClock:
    """Notes when the first new tokens of a generation appear and how many they were."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first_seconds = 0.0
        self.first_tokens = 0

    def chunk(self, num_tokens: int) -> None:
        """Call it with the number of new tokens whenever some arrive."""
        if self.first_tokens == 0 and num_tokens > 0:
            self.first_seconds = time.perf_counter() - self.start
            self.first_tokens = num_tokens

    def sample(self, token_ids: list[int]) -> Sample:
        """Stop the clock."""
        seconds = time.perf_counter() - self.start
        if self.first_tokens == 0:  # an engine that does not stream: everything is the first chunk
            return Sample(token_ids, seconds, seconds, len(token_ids))
        return Sample(token_ids, seconds, self.first_seconds, self.first_tokens)


class Engine(Protocol):
    """What a worker implements."""

    def prepare(self, request: Request) -> None:
        """Load or switch whatever this method needs, before the clock starts."""

    def generate(self, prompt: list[int], request: Request) -> Sample:
        """Generate for one prompt."""

    def drop(self) -> None:
        """Free the models."""

    def meta(self) -> dict[str, Any]:
        """Versions and settings worth recording."""


def parse_args(argv: list[str] | None = None) -> WorkerArgs:
    """Read a worker's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--cache-dir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), ".cache"))
    parser.add_argument("--method", choices=METHODS, default="plain")
    parser.add_argument("--k", type=int, default=0)
    return WorkerArgs(**vars(parser.parse_args(argv)))


def serve(factory: Callable[[WorkerArgs], Engine]) -> None:
    """Answer requests from stdin on stdout until stdin closes; all library chatter goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    try:
        engine = factory(args)
    except Exception as error:  # the driver shows it as one line
        _answer(answers, {"error": _one_line(error)})
        raise SystemExit(1) from error
    _answer(answers, {"error": None})
    for line in sys.stdin:
        _answer(answers, _handle(engine, args, json.loads(line)))
    engine.drop()


def _handle(engine: Engine, args: WorkerArgs, message: dict[str, Any]) -> dict[str, Any]:
    try:
        return _run(engine, args, Request(**message))
    except Exception as error:
        return {"error": _one_line(error)}


def _run(engine: Engine, args: WorkerArgs, request: Request) -> dict[str, Any]:
    cpu_start = cpu_seconds()
    engine.prepare(request)
    samples = [engine.generate(prompt, request) for prompt in request.prompts]
    return {
        "error": None,
        "seconds": sum(sample.seconds for sample in samples),
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "first_seconds": sum(sample.first_seconds for sample in samples),
        "first_tokens": sum(sample.first_tokens for sample in samples),
        "token_ids": [sample.token_ids for sample in samples],
        "cpu_seconds": cpu_seconds() - cpu_start,
        "meta": _meta(engine, args),
    }


def _meta(engine: Engine, args: WorkerArgs) -> dict[str, Any]:
    return {"dtype": args.dtype, "threads": args.threads, "peak_rss_mb": round(peak_mb()), **engine.meta()}


def content_key(source: Path) -> str:
    """Short name of a model folder's content, for what is made of it."""
    stamp = "".join(f"{path.name}{path.stat().st_size}{path.stat().st_mtime_ns}" for path in sorted(source.iterdir()))
    return hashlib.sha256(f"{source}{stamp}".encode()).hexdigest()[:12]


def cpu_seconds() -> float:
    """Processor time of this process and of the ones that it started, those included that have ended."""
    ticks = 0
    for child in _children():
        ticks += sum(int(field) for field in (child / "stat").read_text().rpartition(")")[2].split()[11:13])
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + ticks / float(os.sysconf("SC_CLK_TCK"))


def peak_mb() -> float:
    """Peak memory of this process and of the ones that it started and that still run, in MiB.

    Not of ``getrusage``: that counts the driver's memory, from before this program replaced it in its process.
    """
    total = 0.0
    for process in (Path("/proc/self"), *_children()):
        file = process / "status"
        lines = file.read_text().splitlines() if file.exists() else []
        total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    return total


def _children() -> list[Path]:
    """The folders in /proc of this process's children; empty where there is no /proc."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return []
    found = [pid for file in tasks.glob("*/children") for pid in file.read_text().split()]
    return [Path("/proc") / pid for pid in found if (Path("/proc") / pid / "stat").exists()]


def _answer(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
