"""The JSON document of a benchmark: its provenance, and one cell per contender and condition.

docs/bench.md defines each key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from outrider.bench.breakdown import expectation
from outrider.bench.contenders import PLAIN_CONTENDER, Contender
from outrider.bench.grid import GridPlan, Group
from outrider.bench.loops import loop_share, loop_start
from outrider.bench.measure import Run
from outrider.bench.provenance import digest, provenance
from outrider.bench.statistics import Timings, percentiles, speedup_interval
from outrider.engine.stats import PHASES

if TYPE_CHECKING:
    from outrider.runner import ModelRunner


def document(
    plan: GridPlan, groups: Sequence[Group], runner: ModelRunner, target: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the benchmark document, JSON-ready."""
    return {
        "target": target,
        **provenance(runner),
        **extra,
        "max_tokens": plan.max_tokens,
        "repeat": plan.repeat,
        "seed": plan.seed,
        "prompt_digests": {name: digest(prompts) for name, prompts in plan.workloads.items()},
        "definitions": "docs/bench.md",
        "cells": cells(groups, bool(extra.get("same_text_mode"))),
    }


def cells(groups: Sequence[Group], same_text_when_sampled: bool = False) -> list[dict[str, Any]]:
    """Return the cells of all contenders and groups: medians over repeats, ratios within a repeat."""
    return [
        _cell(group, contender, same_text_when_sampled)
        for group in groups
        if group.repeats
        for contender in sorted(group.repeats[0], key=lambda contender: not contender.is_plain)
    ]


def _cell(group: Group, contender: Contender, same_text_when_sampled: bool) -> dict[str, Any]:
    runs = [repeat[contender] for repeat in group.repeats]
    plain = [repeat[PLAIN_CONTENDER] for repeat in group.repeats]
    comparable = group.temperature == 0 or same_text_when_sampled
    texts = [text for run in runs for text in run.token_ids]
    loops = loop_share(texts)
    has_loops = loops > 0 or any(loop_share(run.token_ids) for run in plain)
    measured = {
        **_figures(runs, plain),
        "loop_share": loops,
        "tokens_before_loops": sum(map(loop_start, runs[0].token_ids)),
        "before_loops": _before_loops(runs, plain) if has_loops else None,
        **_latencies(runs),
        **_prediction(runs, plain),
        "same_text": _same_text(runs, plain) if comparable else None,
        "faults": sum(run.faults for run in runs),
        "tokens": runs[0].num_tokens,
        "prompts": len(runs[0].token_ids),
        "repeats": len(runs),
    }
    condition = {"temperature": group.temperature, "batch": group.batch, "workload": group.workload, "busy": group.busy}
    return {"method": contender.method, "k": contender.k, **condition, **rounded(measured)}


def _figures(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Return speed, acceptance, the formula's expectation, and milliseconds by phase."""
    return {**_speeds(runs, plain), **_acceptance(runs), **_expectation(runs, plain), "ms": _ms(runs)}


def _before_loops(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any] | None:
    """Return the results of ``_figures`` for the tokens before the first loop of each output.

    Batches without such tokens in any of the runs are left out, so that all runs cover the same prompts. None without batches.
    """
    cut = [run.batches_before_loops() for run in [*runs, *plain]]
    kept = [together for together in zip(*cut, strict=True) if all(batch.num_tokens for batch in together)]
    if not kept:
        return None
    parts = [Run(batches=list(batches)) for batches in zip(*kept, strict=True)]
    return _figures(parts[: len(runs)], parts[len(runs) :])


def _speeds(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    speedups = [run.tok_s / base.tok_s if base.tok_s else 0.0 for run, base in zip(runs, plain, strict=True)]
    return {
        "tok_s": median(run.tok_s for run in runs),
        "plain_tok_s": median(run.tok_s for run in plain),
        "speedup": median(speedups),
        "speedup_interval": speedup_interval(_timings(runs), _timings(plain)),
        "repeat_tok_s": [run.tok_s for run in runs],
        "repeat_speedup": speedups,
        "decode_tok_s": median(run.decode_tok_s for run in runs),
        "plain_decode_tok_s": median(run.decode_tok_s for run in plain),
        "decode_speedup": _decode_speedup(runs, plain),
        "decode_speedup_interval": speedup_interval(_timings(runs, True), _timings(plain, True)),
    }


def _timings(runs: Sequence[Run], decoding: bool = False) -> Timings:
    """Return tokens and seconds by repeat and batch; ``decoding``: after the first tokens."""
    part = 1 if decoding else 0
    tokens = [[batch.num_tokens - part * batch.first_tokens for batch in run.batches] for run in runs]
    seconds = [[batch.seconds - part * batch.first_seconds for batch in run.batches] for run in runs]
    return Timings.of(tokens, seconds)


def _decode_speedup(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    ratios = [run.decode_tok_s / base.decode_tok_s for run, base in zip(runs, plain, strict=True) if base.decode_tok_s]
    return median(ratios) if ratios else None


def _acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """Return acceptance counts over all repeats."""
    total = _added(runs)
    stats, by_position = total.stats, total.acceptance_counts()
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": {str(n): rounds for n, rounds in sorted(stats.acceptance_histogram.items())},
        "acceptance_by_position": [accepted / stats.num_rounds for accepted, _ in by_position],
        "conditional_acceptance": [accepted / reached for accepted, reached in by_position],
    }


def _added(runs: Sequence[Run]) -> Run:
    """Return a run with the batches of all of these."""
    return Run(batches=[batch for run in runs for batch in run.batches])


def _expectation(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Return the formula's decoding speedup and the contribution of each part of a round."""
    total = _added(runs)
    stats, longest = total.stats, [(round_.times.draft, round_.most_proposed) for round_ in total.rounds]
    steps = [seconds / depth for seconds, depth in longest if depth]
    k, step_ms = stats.num_draft_steps / max(stats.num_steps, 1), 1e3 * median(steps) if steps else 0.0
    tau, alpha = stats.mean_acceptance_length, stats.acceptance_rate
    return {"mean_k": k, **expectation(_ms(runs), _ms(plain), tau, alpha, k, step_ms, _decode_speedup(runs, plain))}


def _latencies(runs: Sequence[Run]) -> dict[str, Any]:
    pauses = [pause for run in runs for pause in run.pauses]
    firsts = [1e3 * seconds for run in runs for each in run.batches for seconds in each.waits]
    return {
        "time_to_first_token_ms": percentiles(firsts),
        "inter_token_ms": percentiles([1e3 * seconds / n for seconds, n in pauses], [float(n) for _, n in pauses]),
        "pause_ms": percentiles([1e3 * seconds for seconds, _ in pauses]),
    }


def _prediction(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Return the engine's prediction of plain decoding and its error in the same repeat."""
    pairs = [(run.predicted_plain_tok_s, base.tok_s) for run, base in zip(runs, plain, strict=True)]
    known = [(predicted, measured) for predicted, measured in pairs if predicted is not None and measured]
    errors = [100 * (predicted / measured - 1) for predicted, measured in known]
    return {
        "predicted_plain_tok_s": median(predicted for predicted, _ in known) if known else None,
        "prediction_error_percent": median(errors) if errors else None,
    }


def _ms(runs: Sequence[Run]) -> dict[str, float]:
    found = [run.ms for run in runs]
    return {name: median(ms[name] for ms in found) for name in PHASES}


def _same_text(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    """Return the share of outputs equal to plain decoding's, token for token."""
    pairs = [(a, b) for run, base in zip(runs, plain, strict=True) for a, b in zip(run.token_ids, base.token_ids, strict=True)]
    return sum(a == b for a, b in pairs) / max(len(pairs), 1)


def rounded(value: Any) -> Any:
    """Return JSON-ready data with all floats rounded to four significant digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
