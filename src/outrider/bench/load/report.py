"""JSON document and table of a load test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from outrider.bench.load.cells import Objective, cells, worst
from outrider.bench.load.sweep import Sweep
from outrider.bench.provenance import origin, without_password
from outrider.bench.tables import fill, number, table_of


def document(sweep: Sweep, objective: Objective, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements with their provenance, JSON-ready."""
    traffic, found = sweep.traffic, cells(sweep.groups, objective)
    return {
        "kind": "serve",
        **origin(),
        **extra,
        "modes": [{"mode": mode.name, "url": without_password(mode.url), "more": dict(mode.more)} for mode in sweep.modes],
        "servers": sweep.servers,
        "max_tokens": traffic.max_tokens,
        "temperature": traffic.temperature,
        "prompts": len(traffic.prompts),
        "turns": traffic.turns,
        "shared_prefix_characters": len(traffic.shared_prefix),
        "repeat": traffic.repeat,
        "rest_s": traffic.rest,
        "seed": traffic.seed,
        "objective_ms": {"first_token": 1000 * objective.first_token, "token": 1000 * objective.token},
        "definitions": "docs/bench.md",
        "worst": worst(found),
        "cells": found,
    }


def table(result: Mapping[str, Any]) -> Table:
    """Return a table for a terminal with 80 columns; failures are shown only if there are any."""
    limits, cells = result["objective_ms"], result["cells"]
    title = (
        "load: concurrent clients, or arrivals; ms p50/p95; good: requests per second with the first token in "
        f"{limits['first_token']:g} ms and {limits['token']:g} ms per token"
    )
    has_failed = any(cell["failed"] for cell in cells)
    columns = ("tok/s", "x", "first", "between", "good", "tau", "rate", *(("fail",) if has_failed else ()))
    view = table_of(title, *columns, keys=("load", "mode"))
    fill(view, (_row(cell)[: 2 + len(columns)] for cell in cells))
    return view


def _row(cell: Mapping[str, Any]) -> list[str]:
    return [
        str(cell["concurrency"] or cell["load"]),
        cell["mode"],
        number(cell["tok_s"], 1 if cell["tok_s"] < 1000 else 0),
        number(cell["speedup"], 2),
        _pair(cell["first_token_ms"]),
        _pair(cell["inter_token_ms"]),
        number(cell["goodput_s"], 2),
        number(cell["mean_acceptance_length"], 2),
        number(cell["draft_acceptance_rate"], 2),
        str(cell["failed"] or ""),
    ]


def _pair(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{_short(value['p50'])}/{_short(value['p95'])}"


def _short(milliseconds: float) -> str:
    """Format milliseconds in at most five characters."""
    return f"{milliseconds:.0f}" if milliseconds < 99_999 else f"{milliseconds / 1000:.0f}s"


def verdict(result: Mapping[str, Any]) -> str:
    """Return a one-line summary of the worst cell."""
    found = result["worst"]
    if found is None:
        return "no plain baseline: for a server other than Outrider's give --plain-url"
    latest = found["first_token_p95_ratio"]
    first = "" if latest is None else f"; first token p95 at most {latest:.2f}x plain's, at {found['first_token_at']}"
    return f"smallest speedup {found['speedup']:.2f}x, at {found['speedup_at']}{first}"
