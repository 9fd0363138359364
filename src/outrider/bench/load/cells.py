"""Compute one cell of results per load and mode from samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from outrider.bench.load.client import Sample
from outrider.bench.load.counters import ACCEPTED, BY_PHASE, BY_POSITION, DRAFTS, ROUNDS, Counters
from outrider.bench.load.sweep import Group, LoadRun
from outrider.bench.statistics import percentiles
from outrider.registry import PLAIN


@dataclass(frozen=True)
class Objective:
    """Latency targets of a good request, in seconds."""

    first_token: float = 2.0
    token: float = 0.2  # mean after the first chunk

    def holds(self, sample: Sample) -> bool:
        """Return whether a response met the targets."""
        first, token = sample.first_token_seconds, sample.token_seconds
        return sample.error is None and first is not None and first <= self.first_token and (token or 0.0) <= self.token


def cells(groups: Sequence[Group], objective: Objective) -> list[dict[str, Any]]:
    """Return the cells of all loads and modes, with ratios to plain decoding within a repeat if it was measured."""
    return [_cell(group, mode, objective) for group in groups for mode in group.repeats[0]]


def _cell(group: Group, mode: str, objective: Objective) -> dict[str, Any]:
    runs = [repeat[mode] for repeat in group.repeats]
    plain = [repeat[PLAIN] for repeat in group.repeats] if PLAIN in group.repeats[0] else None
    samples = [sample for run in runs for sample in run.samples]
    answered = [sample for sample in samples if sample.error is None]
    pauses = [pause for sample in answered for pause in sample.pauses]
    good = [_ratio(sum(map(objective.holds, run.samples)), run.seconds) for run in runs]
    first = _milliseconds([sample.first_token_seconds for sample in answered])
    speeds = [speed(run) for run in runs]
    ratios = [_ratio(own, speed(base)) for own, base in zip(speeds, plain, strict=True)] if plain else []
    return {
        "load": group.load.label,
        "concurrency": group.load.concurrency,
        "rate": group.load.rate,
        "mode": mode,
        "repeats": len(runs),
        "requests": len(samples),
        "failed": len(samples) - len(answered),
        "errors": sorted({sample.error for sample in samples if sample.error is not None})[:3],
        "tok_s": median(speeds),
        "repeat_tok_s": speeds,
        "speedup": median(ratios) if ratios else None,
        "repeat_speedup": ratios,
        "requests_s": median([_ratio(sum(sample.error is None for sample in run.samples), run.seconds) for run in runs]),
        "goodput_s": median(good),
        "good_share": sum(map(objective.holds, samples)) / len(samples),
        "first_token_ms": first,
        "first_token_p95_ratio": _p95_ratio(first, plain),
        "inter_token_ms": _milliseconds([s / n for s, n in pauses if n], [n for _, n in pauses if n]),
        "pause_ms": _milliseconds([s for s, _ in pauses]),
        "request_ms": _milliseconds([sample.ended - sample.started for sample in answered]),
        **_acceptance(runs),
    }


def speed(run: LoadRun) -> float:
    """Return the tokens of all responses per second."""
    return _ratio(sum(sample.num_tokens for sample in run.samples if sample.error is None), run.seconds)


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _p95_ratio(first: Mapping[str, float] | None, plain: Sequence[LoadRun] | None) -> float | None:
    if plain is None or first is None:
        return None
    base = _milliseconds([sample.first_token_seconds for run in plain for sample in run.samples if sample.error is None])
    return None if base is None else _ratio(first["p95"], base["p95"])


def _milliseconds(seconds: Iterable[float | None], weights: Sequence[float] | None = None) -> dict[str, float] | None:
    """Return p50 and p95; None without values."""
    return percentiles([1000 * each for each in seconds if each is not None], weights)


def _acceptance(runs: Sequence[LoadRun]) -> dict[str, Any]:
    """Return acceptance over all repeats, from the server's counters or else from the usage in responses."""
    counted = [run.counted for run in runs if run.counted is not None]
    total: Counters = {}
    if len(counted) == len(runs):
        total = {key: sum(each.get(key, 0.0) for each in counted) for key in dict.fromkeys(chain.from_iterable(counted))}
        drafts, accepted = (total.get((name, ""), 0.0) for name in (DRAFTS, ACCEPTED))
    else:
        drafts = float(sum(sample.num_drafts for run in runs for sample in run.samples))
        accepted = float(sum(sample.num_accepted for run in runs for sample in run.samples))
    rounds = total.get((ROUNDS, ""), 0.0)
    by_position = sorted((int(part), value) for (name, part), value in total.items() if name == BY_POSITION)
    return {
        "drafts": drafts,
        "accepted": accepted,
        "draft_acceptance_rate": accepted / drafts if drafts else None,
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "acceptance_by_position": [value / rounds for _, value in by_position] if rounds else [],
        "phase_seconds": {part: value for (name, part), value in total.items() if name == BY_PHASE},
    }


def worst(found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the smallest speedup and the largest ratio of first-token times with their cells; None without plain decoding."""
    compared = [cell for cell in found if cell["mode"] != PLAIN and cell["speedup"] is not None]
    if not compared:
        return None
    slowest = min(compared, key=lambda cell: float(cell["speedup"]))
    latest = max(compared, key=lambda cell: float(cell["first_token_p95_ratio"] or 0.0))
    return {
        "speedup": slowest["speedup"],
        "speedup_at": slowest["load"],
        "first_token_p95_ratio": latest["first_token_p95_ratio"],
        "first_token_at": latest["load"],
    }
