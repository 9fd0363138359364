"""Protocol between driver and workers: one JSON line per request and per answer.

A worker is one engine in one process, run by that engine's Python, so this file imports only the standard library. It is
independent of engines: a worker passes a factory to `serve` and implements `generate` for one prompt at a time.
"""

from __future__ import annotations

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
# auto: the engine's own choice, or as in the GGUF file; the last four apply to weights only, the last two are llama.cpp's names
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "q8_0", "q4_k_m")


@dataclass(frozen=True)
class WorkerArgs:
    """The only argument of a worker, as JSON; `method` and `k` matter only to engines that fix them at load time."""

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
    """Generate exactly `max_tokens` per prompt at batch 1, one prompt after another, ignoring end-of-text."""

    method: str = "plain"
    k: int = 0
    schedule: str = "constant"  # transformers also has heuristic and dynamic; Outrider also has auto
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    prompts: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """Output and times of one prompt. The first chunk is what was emitted by the prefill pass."""

    token_ids: list[int]
    seconds: float
    first_seconds: float
    first_tokens: int


class ChunkClock:
    """Records when the first new tokens of a generation appear, and how many they are."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first_seconds = 0.0
        self.first_tokens = 0

    def chunk(self, num_tokens: int) -> None:
        """Record the arrival of this many new tokens."""
        if self.first_tokens == 0 and num_tokens > 0:
            self.first_seconds = time.perf_counter() - self.start
            self.first_tokens = num_tokens

    def sample(self, token_ids: list[int]) -> Sample:
        """Stop the clock."""
        seconds = time.perf_counter() - self.start
        if self.first_tokens == 0:  # an engine that does not stream: all tokens are the first chunk
            return Sample(token_ids, seconds, seconds, len(token_ids))
        return Sample(token_ids, seconds, self.first_seconds, self.first_tokens)


class Engine(Protocol):
    """Interface of a worker."""

    def prepare(self, request: Request) -> None:
        """Load or switch what this method needs, before the clock starts."""

    def generate(self, prompt: list[int], request: Request) -> Sample:
        """Generate for one prompt."""

    def drop(self) -> None:
        """Free the models."""

    def meta(self) -> dict[str, Any]:
        """Return versions and settings to record."""


def serve(factory: Callable[[WorkerArgs], Engine]) -> None:
    """Answer requests from stdin on stdout until stdin closes; output of libraries goes to stderr.

    The driver has checked that ``WorkerArgs.draft`` is given if a method needs it.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    args = WorkerArgs(**json.loads(sys.argv[1]))
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    try:
        engine = factory(args)
    except Exception as error:  # the driver reports it in one line
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
    """Return a short hash of a model folder's content, the key of files derived from it."""
    stamp = "".join(f"{path.name}{path.stat().st_size}{path.stat().st_mtime_ns}" for path in sorted(source.iterdir()))
    return hashlib.sha256(f"{source}{stamp}".encode()).hexdigest()[:12]


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children, including ended ones."""
    ticks = 0
    for child in _children():
        ticks += sum(int(field) for field in _text(child / "stat").rpartition(")")[2].split()[11:13])
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + ticks / float(os.sysconf("SC_CLK_TCK"))


def peak_mb() -> float:
    """Return the peak memory of this process and of its running children, in MiB.

    ``getrusage`` is not used, because it includes the driver's memory before this program replaced it in the process.
    """
    total = 0.0
    for process in (Path("/proc/self"), *_children()):
        lines = _text(process / "status").splitlines()
        total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    return total


def _children() -> list[Path]:
    """Return the /proc folders of this process's children; empty without /proc."""
    files = Path("/proc/self/task").glob("*/children")
    return [Path("/proc") / pid for file in files for pid in _text(file).split()]


def _text(file: Path) -> str:
    """Return the content of a file of /proc, empty if the process or thread has ended or there is no /proc."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _answer(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
