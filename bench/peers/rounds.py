"""How a method is measured: screen every engine's settings once, then alternate the best ones, round after round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from client import Job, Measurement, Worker, WorkerError
from engines import OURS, EngineSpec, Setting

SETTLE_SECONDS = 0.3  # thread pools spin for a while after their last task: let the previous engine's come to rest
Progress = Callable[[str], None]


@dataclass
class Contestant:
    """One engine with the setting it runs the rounds in, and what it did in them."""

    spec: EngineSpec
    setting: Setting
    screening: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[Measurement] = field(default_factory=list)
    error: str | None = None

    def rates(self, name: str) -> list[float]:
        return [getattr(measurement, name) for measurement in self.rounds]


class Screen:
    """Finds an engine's best setting for a method: the number format first, at a middle K, then K."""

    def __init__(self, job: Job, prompts: list[list[int]], ks: list[int], dtypes: dict[str, str], rate: str) -> None:
        self.job, self.prompts, self.ks, self.dtypes, self.rate = job, prompts, ks, dtypes, rate

    def best(self, spec: EngineSpec, method: str, progress: Progress) -> Contestant:
        contestant = Contestant(spec, Setting(method, ""))
        dtypes = (self.dtypes[spec.name],) if spec.name in self.dtypes else spec.dtypes
        middle = [self.ks[len(self.ks) // 2]]
        first = [setting for dtype in dtypes for setting in spec.settings(method, dtype, middle)[:1]]
        rates: dict[Setting, float] = {}
        if len(first) > 1:
            self._try(first, contestant, rates, progress)
            if not rates:
                return contestant
            dtypes = (max(rates, key=rates.__getitem__).dtype,)
        rest = [setting for setting in spec.settings(method, dtypes[0], self.ks) if setting not in rates]
        if rates or len(rest) > 1:
            self._try(rest, contestant, rates, progress)
        if rates:
            contestant.setting, contestant.error = max(rates, key=rates.__getitem__), None
        elif rest and contestant.error is None:
            contestant.setting = rest[0]
        return contestant

    def _try(self, settings: list[Setting], contestant: Contestant, rates: dict[Setting, float], progress: Progress) -> None:
        spec = contestant.spec
        pool = Pool(self.job)
        for setting in settings:
            progress(f"{spec.name} {setting.method} {setting.label} {setting.dtype}")
            row: dict[str, Any] = {"dtype": setting.dtype, "k": setting.k, "schedule": setting.schedule}
            try:
                worker = pool.worker(spec, setting)
                worker.measure(setting, self.prompts[:1], self.job.seed)
                measured = worker.measure(setting, self.prompts, self.job.seed)
                rates[setting] = getattr(measured, self.rate)
                row |= {"tok_s": measured.tok_s, "decode_tok_s": measured.decode_tok_s}
                row["other_cpu"] = measured.other_cpu
            except WorkerError as error:
                contestant.error = row["error"] = str(error)
                pool.close()
            contestant.screening.append(row)
        pool.close()


class Pool:
    """At most one worker of an engine at a time: a new one is started only where the setting needs it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.current: Worker | None = None
        self.key: tuple[Any, ...] = ()

    def worker(self, spec: EngineSpec, setting: Setting) -> Worker:
        key: tuple[Any, ...] = (spec.name, setting.dtype)
        if spec.fixed_at_start:
            key += (setting.method, setting.k)
        if self.current is None or key != self.key:
            self.close()
            self.current, self.key = Worker(spec, setting, self.job), key
        return self.current

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
        self.current, self.key = None, ()


def alternate(contestants: list[Contestant], job: Job, prompts: list[list[int]], repeat: int, progress: Progress) -> None:
    """Rounds of A B C, A B C, ...; an engine that fails drops out with its error and the others go on."""
    workers: dict[str, Worker] = {}
    running = [contestant for contestant in contestants if contestant.error is None]
    try:
        for contestant in running:
            name = contestant.spec.name
            progress(f"{name} {contestant.setting.method}: loading")
            try:
                workers[name] = Worker(contestant.spec, contestant.setting, job)
                workers[name].measure(contestant.setting, prompts[:1], job.seed)
            except WorkerError as error:
                contestant.error = str(error)
        for number in range(repeat):
            for contestant in running:
                if contestant.error is None:
                    progress(f"{contestant.spec.name} {contestant.setting.method}: round {number + 1} of {repeat}")
                    time.sleep(SETTLE_SECONDS)
                    _measure_round(contestant, workers[contestant.spec.name], prompts, job.seed + number)
    finally:
        for worker in workers.values():
            worker.close()


def _measure_round(contestant: Contestant, worker: Worker, prompts: list[list[int]], seed: int) -> None:
    try:
        contestant.rounds.append(worker.measure(contestant.setting, prompts, seed))
    except WorkerError as error:
        contestant.error = str(error)


def cell(contestant: Contestant, reference: Contestant | None) -> dict[str, Any]:
    """One engine's line of the result; `reference` is ours, or the first engine where ours does not take part."""
    setting = contestant.setting
    result: dict[str, Any] = {
        "engine": contestant.spec.name,
        "method": setting.method,
        "k": setting.k,
        "schedule": setting.schedule,
        "error": contestant.error,
        "screening": contestant.screening,
    }
    if not contestant.rounds:
        return result
    for name in ("tok_s", "decode_tok_s"):
        rates = contestant.rates(name)
        result[name] = statistics.median(rates)
        result[f"{name}_rounds"] = rates
    result["other_cpu"] = statistics.median(contestant.rates("other_cpu"))
    result["meta"] = contestant.rounds[-1].meta
    if reference is not None and reference.rounds:
        result["same_text"] = _share_identical(contestant, reference)
        if reference.spec.name == OURS and contestant is not reference:
            result |= _ratios(reference, contestant)
    return result


def _ratios(ours: Contestant, peer: Contestant) -> dict[str, Any]:
    """Ours over the peer's, paired round by round."""
    result: dict[str, Any] = {}
    for name, label in (("tok_s", "ratio"), ("decode_tok_s", "decode_ratio")):
        pairs = [mine / theirs for mine, theirs in zip(ours.rates(name), peer.rates(name), strict=False)]
        result[label] = statistics.median(pairs)
        result[f"{label}_range"] = [min(pairs), max(pairs)]
    return result


def _share_identical(one: Contestant, other: Contestant) -> float:
    pairs = list(zip(one.rounds[0].token_ids, other.rounds[0].token_ids, strict=True))
    return sum(left == right for left, right in pairs) / len(pairs)
