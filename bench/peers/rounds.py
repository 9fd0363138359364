"""Measurement of a group: screen every engine's settings once, then alternate the best ones over the rounds."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from client import Job, Measurement, Worker, WorkerError
from engines import OURS, EngineSpec, Setting

SETTLE_SECONDS = 0.3  # pause for the previous engine's thread pool, which spins after its last task
WARM_TOKENS, WARM_PROMPT = 16, 512  # limits of the untimed generation before a setting is measured: tokens, and prompt tokens
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Group:
    """Cells measured in turn: one method, one number of bits per weight or type of GGUF file, one prompt length."""

    method: str
    bits: int | str | None = None  # None: number formats are screened
    prompt_tokens: int | None = None  # prompt length for first-token times; None: decoding

    @property
    def label(self) -> str:
        """Label in progress messages."""
        bits = f" {self.bits} bits" if isinstance(self.bits, int) else f" {self.bits}" if self.bits else ""
        return f"{self.method}{bits}" + (f", {self.prompt_tokens} prompt tokens" if self.prompt_tokens else "")


@dataclass
class Contestant:
    """One engine, its setting in the rounds, and its results."""

    spec: EngineSpec
    setting: Setting
    screening: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[Measurement] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)  # digest of the first output, by the prompt's index
    unstable: set[int] = field(default_factory=set)  # prompts whose output changed in a later round
    error: str | None = None

    def rates(self, name: str) -> list[float] | None:
        """Return the value of each round, or None if a round has none."""
        found = [getattr(measurement, name) for measurement in self.rounds]
        return None if None in found else found

    def record(self, measurement: Measurement, prompts: list[int]) -> None:
        """Record one round over the prompts of these indices."""
        self.rounds.append(measurement)
        for index, token_ids in zip(prompts, measurement.token_ids, strict=True):
            text = digest(token_ids)
            if self.texts.setdefault(index, text) != text:
                self.unstable.add(index)


class Workers:
    """Running workers, at most one per engine. A worker is replaced only if a setting requires it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._running: dict[str, tuple[tuple[Any, ...], Worker]] = {}

    def get(self, spec: EngineSpec, setting: Setting) -> Worker:
        key: tuple[Any, ...] = (setting.dtype,)
        if spec.fixed_at_start:
            key += (setting.method, setting.k)
        found = self._running.get(spec.name)
        if found is None or found[0] != key:
            self.drop(spec.name)
            self._running[spec.name] = (key, Worker(spec, setting, self.job))
        return self._running[spec.name][1]

    def drop(self, name: str) -> None:
        """End an engine's worker, if it is running."""
        if name in self._running:
            self._running.pop(name)[1].close()

    def close(self) -> None:
        for name in list(self._running):
            self.drop(name)


class Screen:
    """Finds an engine's best setting for a method: first the number format at a medium K, then K."""

    def __init__(self, workers: Workers, prompts: list[list[int]], ks: list[int], dtypes: dict[str, str], rate: str) -> None:
        self.workers, self.prompts, self.ks, self.dtypes, self.rate = workers, prompts, ks, dtypes, rate

    def best(self, spec: EngineSpec, group: Group, progress: Progress) -> Contestant:
        """Choose the setting; ``error`` is set if none could be run."""
        method = group.method
        contestant = Contestant(spec, Setting(method, ""))
        dtypes, ks = self._formats(spec, group), self.ks
        if group.bits and spec.name == OURS:
            ks = []  # it chooses K while it runs
        middle = [self.ks[len(self.ks) // 2]]
        first = [setting for dtype in dtypes for setting in spec.settings(method, dtype, middle)[:1]]
        rates: dict[Setting, float] = {}
        if len(first) > 1:
            self._try(first, contestant, rates, progress)
            if not rates:
                return contestant
            dtypes = (max(rates, key=rates.__getitem__).dtype,)
        rest = [setting for setting in spec.settings(method, dtypes[0], ks) if setting not in rates]
        if rates or len(rest) > 1:
            self._try(rest, contestant, rates, progress)
        if rates:
            contestant.setting, contestant.error = max(rates, key=rates.__getitem__), None
        elif rest and contestant.error is None:
            contestant.setting = rest[0]
        return contestant

    def _formats(self, spec: EngineSpec, group: Group) -> tuple[str, ...]:
        is_fixed = group.bits is None and spec.name in self.dtypes
        return (self.dtypes[spec.name],) if is_fixed else spec.formats(group.bits)

    def _try(self, settings: list[Setting], contestant: Contestant, rates: dict[Setting, float], progress: Progress) -> None:
        spec, seed = contestant.spec, self.workers.job.seed
        for setting in settings:
            progress(f"{spec.name} {setting.method} {setting.label} {setting.dtype}")
            row: dict[str, Any] = {"dtype": setting.dtype, "k": setting.k, "schedule": setting.schedule}
            try:
                worker = self.workers.get(spec, setting)
                worker.measure(setting, self.prompts[:1], seed, WARM_TOKENS)
                measured = worker.measure(setting, self.prompts, seed)
                rates[setting] = getattr(measured, self.rate) or 0.0
                row |= {"tok_s": measured.tok_s, "decode_tok_s": measured.decode_tok_s}
                row["other_cpu"] = measured.other_cpu
            except WorkerError as error:
                contestant.error = row["error"] = str(error)
                self.workers.drop(spec.name)
            contestant.screening.append(row)


def deal(num_prompts: int, per_round: int, repeat: int) -> list[list[int]]:
    """Return the prompt indices of every round: the next ``per_round`` each time, starting again after the last."""
    return [[(number * per_round + i) % num_prompts for i in range(per_round)] for number in range(repeat)]


def alternate(
    contestants: list[Contestant], workers: Workers, prompts: list[list[int]], rounds: list[list[int]], progress: Progress
) -> None:
    """Run rounds, each in a random order. An engine that fails is dropped with its error; the others continue.

    ``rounds``: prompt indices of each round.
    """
    running = [contestant for contestant in contestants if contestant.error is None]
    seed = workers.job.seed
    for contestant in running:
        progress(f"{contestant.spec.name} {contestant.setting.method}: loading")
        _measure(contestant, workers, [prompts[rounds[0][0]][:WARM_PROMPT]], seed, WARM_TOKENS)
    for number, indexes in enumerate(rounds):
        # An engine's time may depend on the one before it, which a rotation would keep.
        for contestant in random.Random(number).sample(running, len(running)):
            if contestant.error is None:
                progress(f"{contestant.spec.name} {contestant.setting.method}: round {number + 1} of {len(rounds)}")
                time.sleep(SETTLE_SECONDS)
                measured = _measure(contestant, workers, [prompts[i] for i in indexes], seed + number)
                if measured is not None:
                    contestant.record(measured, indexes)


def _measure(
    contestant: Contestant, workers: Workers, prompts: list[list[int]], seed: int, max_tokens: int | None = None
) -> Measurement | None:
    try:
        return workers.get(contestant.spec, contestant.setting).measure(contestant.setting, prompts, seed, max_tokens)
    except WorkerError as error:
        contestant.error = str(error)
        workers.drop(contestant.spec.name)
        return None


def cell(contestant: Contestant, reference: Contestant | None, group: Group) -> dict[str, Any]:
    """Return one engine's cell of the result; `reference` is Outrider, None if it did not run."""
    setting = contestant.setting
    result: dict[str, Any] = {
        "engine": contestant.spec.name,
        "method": group.method,
        "bits": group.bits,
        "prompt_tokens": group.prompt_tokens,
        "k": setting.k,
        "schedule": setting.schedule,
        "error": contestant.error,
        "screening": contestant.screening,
    }
    if not contestant.rounds:
        return result
    names = ("first_s",) if group.prompt_tokens else ("tok_s", "decode_tok_s", "first_s")
    for name in names:
        rates = contestant.rates(name)
        if rates is not None:
            result[name], result[f"{name}_rounds"] = statistics.median(rates), rates
    result["other_cpu"] = statistics.median(measurement.other_cpu for measurement in contestant.rounds)
    result["meta"] = contestant.rounds[-1].meta
    result["texts"] = {str(index): text for index, text in sorted(contestant.texts.items())}
    result["unstable"] = len(contestant.unstable)
    if reference is not None and contestant is not reference:
        result |= _ratios(reference, contestant, names)
    return result


RATIOS = {"tok_s": "ratio", "decode_tok_s": "decode_ratio", "first_s": "first_ratio"}


def _ratios(ours: Contestant, peer: Contestant, names: tuple[str, ...]) -> dict[str, Any]:
    """Return Outrider's speed / the peer's, paired by round; for first-token times, the peer's / Outrider's."""
    result: dict[str, Any] = {}
    for name in names:
        mine, theirs = ours.rates(name), peer.rates(name)
        if mine is None or theirs is None:
            continue
        pairs = [own / other for own, other in zip(mine, theirs, strict=False)]
        if name == "first_s":
            pairs = [1 / pair for pair in pairs]
        result[RATIOS[name]] = statistics.median(pairs)
        result[f"{RATIOS[name]}_range"] = [min(pairs), max(pairs)]
    return result


def digest(token_ids: list[int]) -> str:
    """Return a short hash of an output."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:12]


def compare_texts(cells: list[dict[str, Any]]) -> None:
    """Add to every cell the outputs that equal Outrider's and, with drafts, the number changed by drafting."""
    found = [cell for cell in cells if "texts" in cell]
    ours = {_condition(cell): cell["texts"] for cell in found if cell["engine"] == OURS}
    plain = {(cell["engine"], cell["bits"]): cell for cell in found if cell["method"] == "plain" and not cell["prompt_tokens"]}
    for cell in found:
        same, both = _same(cell["texts"], ours.get(_condition(cell), {}))
        if both:
            cell["same_text"] = same / both
        alone = plain.get((cell["engine"], cell["bits"]))
        if cell["method"] == "plain" or alone is None or cell["meta"]["dtype"] != alone["meta"]["dtype"]:
            continue  # another number format is another model
        same, both = _same(cell["texts"], alone["texts"])
        cell["changed_texts"], cell["compared_texts"] = both - same, both


def _condition(cell: dict[str, Any]) -> tuple[Any, ...]:
    return (cell["method"], cell["bits"], cell["prompt_tokens"])


def _same(one: dict[str, str], other: dict[str, str]) -> tuple[int, int]:
    """Return the number of equal outputs, and the number of prompts that both have."""
    both = one.keys() & other.keys()
    return sum(one[index] == other[index] for index in both), len(both)
