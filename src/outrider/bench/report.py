"""From runs to figures: one cell for each contender and condition, a table for people and one JSON document for programs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.bench.contenders import Contender
from outrider.bench.grid import PLAIN_CONTENDER, Group, Plan
from outrider.bench.measure import PHASES, Run

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.runner import ModelRunner

DEFINITIONS = (
    "tok_s: tokens over seconds, prompts included; decode_tok_s: after the first tokens; speedup: median of the ratios to "
    "plain decoding within a repeat; ms: of a decoding round of the batch; same_text: share of texts equal to plain decoding's"
)


def cells(groups: Sequence[Group], same_text_when_sampled: bool = False) -> list[dict[str, Any]]:
    """Every contender of every group as a JSON-ready cell; medians over the repeats, ratios taken within a repeat."""
    return [
        _cell(group, contender, same_text_when_sampled)
        for group in groups
        if group.repeats
        for contender in sorted(group.repeats[0], key=lambda contender: not contender.is_plain)
    ]


def _cell(group: Group, contender: Contender, same_text_when_sampled: bool) -> dict[str, Any]:
    runs = [repeat[contender] for repeat in group.repeats]
    plain = [repeat[PLAIN_CONTENDER] for repeat in group.repeats]
    speedups = [run.tok_s / base.tok_s for run, base in zip(runs, plain, strict=True)]
    histogram: Counter[int] = sum((run.histogram for run in runs), Counter())
    total = Run(histogram=histogram, num_judged=sum(run.num_judged for run in runs))
    comparable = group.temperature == 0 or same_text_when_sampled
    return {
        "method": contender.method,
        "k": contender.k,
        "temperature": group.temperature,
        "batch": group.batch,
        "workload": group.workload,
        "tok_s": _round(median(run.tok_s for run in runs)),
        "plain_tok_s": _round(median(run.tok_s for run in plain)),
        "speedup": _round(median(speedups)),
        "speedup_range": [_round(min(speedups)), _round(max(speedups))],
        "decode_tok_s": _round(median(run.decode_tok_s for run in runs)),
        "plain_decode_tok_s": _round(median(run.decode_tok_s for run in plain)),
        "decode_speedup": _decode_speedup(runs, plain),
        "first_token_ms": _round(median(1e3 * run.first_seconds * group.batch / max(len(run.token_ids), 1) for run in runs)),
        "mean_acceptance_length": _round(total.mean_acceptance_length),
        "acceptance_rate": _round(total.acceptance_rate),
        "acceptance_histogram": {str(n): histogram[n] for n in sorted(histogram)},
        "same_text": _same_text(runs, plain) if comparable else None,
        "ms": {name: _round(median(run.ms[name] for run in runs)) for name in PHASES},
        "faults": sum(run.faults for run in runs),
        "tokens": runs[0].num_tokens,
        "prompts": len(runs[0].token_ids),
        "repeats": len(runs),
    }


def _decode_speedup(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    ratios = [run.decode_tok_s / base.decode_tok_s for run, base in zip(runs, plain, strict=True) if base.decode_tok_s]
    return _round(median(ratios)) if ratios else None


def _same_text(runs: Sequence[Run], plain: Sequence[Run]) -> float:
    """Share of the texts that are plain decoding's, token for token."""
    pairs = [(a, b) for run, base in zip(runs, plain, strict=True) for a, b in zip(run.token_ids, base.token_ids, strict=True)]
    return _round(sum(a == b for a, b in pairs) / max(len(pairs), 1))


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def document(plan: Plan, groups: Sequence[Group], runner: ModelRunner, target: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result with what is needed to repeat it."""
    import torch

    return {
        "version": __version__,
        "commit": commit(),
        "device": device_name(runner.device),
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "target": target,
        **extra,
        "command": " ".join(["outrider", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "transformers")},
        "max_tokens": plan.max_tokens,
        "repeat": plan.repeat,
        "definitions": DEFINITIONS,
        "cells": cells(groups, bool(extra.get("same_text_mode"))),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout Outrider runs from, "+" appended where files were changed; None outside of one."""
    folder = Path(__file__).parent
    try:
        asked = {
            what: subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
            ).stdout
            for what, arguments in {
                "head": ["rev-parse", "--short=12", "HEAD"],
                "changes": ["status", "--porcelain", "."],
            }.items()
        }
    except (OSError, subprocess.SubprocessError):
        return None
    return asked["head"].strip() + ("+" if asked["changes"].strip() else "")


def device_name(device: Any) -> str:
    """What a reader needs to know of the machine: ``cuda: NVIDIA H100``, ``cpu: Intel Xeon ... (2 cores)``."""
    import torch

    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{device.type}: {name} ({os.cpu_count()} cores)"


def table(result: Mapping[str, Any]) -> Table:
    """The cells as a table: one line for each contender and condition. Fits into 80 columns."""
    from rich import box
    from rich.table import Table

    view = Table(
        title=f"{result['target']} on {result['device']}, {result['dtype']}; ms of a round: draft + score + other",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        padding=0,
    )
    view.add_column("workload", overflow="fold")
    view.add_column("method", no_wrap=True)
    for name in ("tok/s", "speedup", "tok/pass", "alpha", "ms", "same"):
        view.add_column(name, justify="right", no_wrap=True)
    previous = None
    for cell in result["cells"]:
        group = condition(cell)
        if previous not in (None, group):
            view.add_section()
        contender, ms = Contender(cell["method"], cell["k"]), cell["ms"]
        view.add_row(
            group if group != previous else "",
            contender.label,
            f"{cell['tok_s']:.1f}",
            f"{cell['speedup']:.2f}",
            f"{cell['mean_acceptance_length']:.2f}",
            "" if contender.is_plain else f"{cell['acceptance_rate']:.2f}",
            f"{ms['draft']:.1f}+{ms['score']:.1f}+{ms['verify'] + ms['host']:.1f}",
            "" if contender.is_plain or cell["same_text"] is None else f"{cell['same_text']:.0%}",
        )
        previous = group
    return view


def condition(cell: Mapping[str, Any]) -> str:
    """Workload, temperature and batch as one label, leaving out greedy and 1."""
    label = str(cell["workload"])
    label += f", t={cell['temperature']:g}" if cell["temperature"] else ""
    return label + (f", batch {cell['batch']}" if cell["batch"] != 1 else "")
