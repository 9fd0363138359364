"""The driver's side of a worker: start, request, stop, and report every failure in one line."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import EngineSpec, Setting
from protocol import WorkerArgs


class WorkerError(Exception):
    """An engine failed; the message is one line."""


@dataclass(frozen=True)
class Job:
    """Settings shared by all workers of a comparison."""

    target: Path
    draft: Path | None
    venvs: Path
    cache_dir: Path
    threads: int
    max_len: int
    max_tokens: int
    temperature: float
    seed: int
    timeout: float  # seconds per answer, including loading and compiling


@dataclass(frozen=True)
class Measurement:
    """One answer of a worker."""

    tok_s: float  # all tokens / total time, prefill included
    decode_tok_s: float | None  # tokens after the first chunk / time after it; None with a single chunk
    first_s: float  # seconds from the request to the first chunk, mean over the prompts
    token_ids: list[list[int]]
    other_cpu: float  # share of the machine used by other processes; above a few percent, ratios are unreliable
    meta: dict[str, Any]


class BusyClock:
    """Measure the share of the machine used by processes other than the measured one, since construction (Linux only)."""

    def __init__(self) -> None:
        self.start, self.busy = time.perf_counter(), _busy_seconds()

    def others(self, own_cpu_seconds: float) -> float:
        available = (time.perf_counter() - self.start) * (os.cpu_count() or 1)
        return max(0.0, (_busy_seconds() - self.busy - own_cpu_seconds) / available)


def _busy_seconds() -> float:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / float(os.sysconf("SC_CLK_TCK"))


class Worker:
    """One running engine."""

    def __init__(self, spec: EngineSpec, setting: Setting, job: Job) -> None:
        self.spec, self.job = spec, job
        python = spec.python(job.venvs)
        if not python.exists():
            raise WorkerError(f"{spec.name}: no environment at {python.parent.parent}; run install.py first")
        job.cache_dir.mkdir(parents=True, exist_ok=True)
        self.log = job.cache_dir / f"{spec.name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), str(spec.script()), _arguments(setting, job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=spec.environment(job.venvs),
            )
        try:
            self._answer()
        except WorkerError:
            self.close()
            raise

    def measure(self, setting: Setting, prompts: list[list[int]], seed: int, max_tokens: int | None = None) -> Measurement:
        """Run all prompts once. The worker loads what the setting needs before its clock starts."""
        wanted = min(max_tokens or self.job.max_tokens, self.job.max_tokens)
        request = {
            "method": setting.method,
            "k": setting.k,
            "schedule": setting.schedule,
            "max_tokens": wanted,
            "temperature": self.job.temperature,
            "seed": seed,
            "prompts": prompts,
        }
        clock = BusyClock()
        answer = self._ask(request)
        other_cpu = clock.others(answer.get("cpu_seconds", 0.0))
        short = [len(ids) for ids in answer["token_ids"] if len(ids) != wanted]
        if short:
            raise WorkerError(f"{self.spec.name}: emitted {short[0]} tokens instead of {wanted}")
        rest = answer["tokens"] - answer["first_tokens"]
        rest_seconds = answer["seconds"] - answer["first_seconds"]
        return Measurement(
            tok_s=answer["tokens"] / answer["seconds"],
            decode_tok_s=rest / rest_seconds if rest and rest_seconds > 0 else None,
            first_s=answer["first_seconds"] / len(prompts),
            token_ids=answer["token_ids"],
            other_cpu=other_cpu,
            meta=answer["meta"],
        )

    def close(self) -> None:
        """End the process, which frees its memory."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._death()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        watchdog = threading.Timer(self.job.timeout, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise WorkerError(self._death())
        answer: dict[str, Any] = json.loads(line)
        if answer["error"]:
            raise WorkerError(f"{self.spec.name}: {answer['error']}")
        return answer

    def _death(self) -> str:
        code = self.process.wait()
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        why = "killed (time limit or out of memory)" if code == -9 else (lines or ["no message"])[-1][:300]
        return f"{self.spec.name}: worker ended with code {code}: {why}"


def _arguments(setting: Setting, job: Job) -> str:
    draft = None if job.draft is None else str(job.draft)
    model = str(job.target), draft, setting.dtype
    return json.dumps(asdict(WorkerArgs(*model, job.threads, job.max_len, str(job.cache_dir), setting.method, setting.k)))
