"""The document of a load test, and its table."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.bench.load.cells import Objective, cells, worst
from outrider.bench.load.sweep import Sweep
from outrider.bench.tables import number

if TYPE_CHECKING:
    from rich.table import Table

DEFINITIONS = (
    "tok_s: tokens of all answers over the seconds from the first request to the last token, median of the repeats; speedup: "
    "median of the ratios to plain within a repeat; first_token_ms: from the request to its first token; inter_token_ms: over "
    "tokens, the pause before them divided by how many came together; goodput_s: requests a second that kept the objective; "
    "mean_acceptance_length: 1 + accepted / rounds with drafts, as vLLM has it; all keys: docs/bench.md"
)


def document(sweep: Sweep, objective: Objective, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured, and what is needed to repeat it."""
    from outrider.bench.provenance import commit

    traffic, found = sweep.traffic, cells(sweep.groups, objective)
    return {
        "kind": "serve",
        "version": __version__,
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **extra,
        "command": " ".join(["outrider", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "modes": [{"mode": mode.name, "url": mode.url, "more": dict(mode.more)} for mode in sweep.modes],
        "servers": sweep.servers,
        "max_tokens": traffic.max_tokens,
        "temperature": traffic.temperature,
        "prompts": len(traffic.prompts),
        "shared_prefix_characters": len(traffic.shared_prefix),
        "repeat": traffic.repeat,
        "seed": traffic.seed,
        "objective_ms": {"first_token": 1000 * objective.first_token, "token": 1000 * objective.token},
        "definitions": DEFINITIONS,
        "worst": worst(found),
        "cells": found,
    }


def table(result: Mapping[str, Any]) -> Table:
    """For a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    limits = result["objective_ms"]
    title = (
        f"ms p50/p95; good: requests a second with the first token in {limits['first_token']:g} ms and "
        f"{limits['token']:g} ms a token"
    )
    view = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    view.add_column("load", no_wrap=True)
    view.add_column("mode", no_wrap=True)
    for name in ("tok/s", "x", "first token", "between", "good", "tau", "rate", "failed"):
        view.add_column(name, justify="right", no_wrap=True)
    previous = None
    for cell in result["cells"]:
        if previous not in (None, cell["load"]):
            view.add_section()
        view.add_row(cell["load"] if cell["load"] != previous else "", *_row(cell))
        previous = cell["load"]
    return view


def _row(cell: Mapping[str, Any]) -> list[str]:
    return [
        cell["mode"],
        number(cell["tok_s"], 1),
        number(cell["speedup"], 2),
        _pair(cell["first_token_ms"]),
        _pair(cell["inter_token_ms"]),
        number(cell["goodput_s"], 2),
        number(cell["mean_acceptance_length"], 2),
        number(cell["draft_acceptance_rate"], 2),
        str(cell["failed"] or ""),
    ]


def _pair(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{value['p50']:.0f}/{value['p95']:.0f}"


def verdict(result: Mapping[str, Any]) -> str:
    """The worst cell in one line."""
    found = result["worst"]
    if found is None:
        return "no plain decoding to compare with: an Outrider server takes it per request, for another give --plain-url"
    latest = found["first_token_p95_ratio"]
    first = "" if latest is None else f"; first token p95 at most {latest:.2f}x plain's, at {found['first_token_at']}"
    return f"least speedup {found['speedup']:.2f}x, at {found['speedup_at']}{first}"
