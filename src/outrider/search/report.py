"""Format the result of a search as a JSON document, a table, an HTML page and comments in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from outrider.bench.contenders import Contender
from outrider.bench.provenance import provenance
from outrider.bench.tables import add_row, bare_table, number, span
from outrider.registry import PLAIN
from outrider.search.search import RungResult, Search

if TYPE_CHECKING:
    from outrider.bench.plots import Plot
    from outrider.search.choice import Decision

COLUMNS = ("method", "k", "speedup", "95%", "tokens per round", "prompts", "why")
RUNG = ("rung", "contenders", "batches of prompts", "fastest", "resolved")
SHOWN, NUM_EXPLAINED = 10, 4  # candidates in the terminal's table, and explained below it; the HTML page lists all


def result(search: Search, chosen: Decision, target: str) -> dict[str, Any]:
    """Return the result of a search as JSON-ready data: the plan, the speedup of every candidate, and each rung."""
    journal, space, gap = search.journal, search.space, search.oracle_gap()
    rows = [_candidate(search, chosen, each) for each in search.candidates.values() if each.method not in search.reasons]
    rows.sort(key=lambda row: (not row["chosen"], -row["prompts"], -row["speedup"]))
    plan = next((row for row in rows if row["chosen"]), {"speedup": None, "interval": None})  # none for plain decoding
    return {
        "target": target,
        **provenance(search.llm.runner),
        "chosen": {"method": chosen.chosen.method, "k": chosen.chosen.k, "label": chosen.chosen.label},
        "speedup": plan["speedup"],
        "speedup_interval": plan["interval"],
        "reason": chosen.reason,
        "plain": chosen.others.get(PLAIN),
        "oracle_gap": None if gap is None else round(gap, 4),
        "candidates": rows,
        "rungs": [_rung(each) for each in search.rung_results],
        "not_possible": search.reasons,
        "traffic": {
            "prompts": len(search.texts),
            "prompt_tokens": sum(len(text.prompt) for text in search.texts),
            "tokens": sum(len(text.output) for text in search.texts),
            "temperatures": sorted({text.params.temperature for text in search.texts}),
        },
        "batches": list(space.batches),
        "seconds": journal.document["seconds"],
    }


def _candidate(search: Search, chosen: Decision, contender: Contender) -> dict[str, Any]:
    label = contender.label
    last = search.ranking_of(label)
    interval = last.interval(label)
    return {
        "method": contender.method,
        "k": contender.k,
        "chosen": contender == chosen.chosen,
        "speedup": round(last.speedups[label], 4),
        "interval": None if interval is None else [round(end, 4) for end in interval],
        "tau": round(fmean(search.taus[label]), 4),
        "prompts": search.num_prompts(label),
        "why": chosen.reason if contender == chosen.chosen else chosen.others.get(label, ""),
    }


def _rung(finished: RungResult) -> dict[str, Any]:
    return {
        "name": finished.name,
        "contenders": len(finished.ranking.speedups),
        "groups": finished.groups,
        "leader": finished.leader,
        "margin": round(finished.ranking.margin, 4),
        "seconds": round(finished.seconds, 1),
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return a terminal table of the best candidates."""
    view = bare_table(f"{found['target']}: speedup over plain decoding, prefill included", (0, 1, 0, 0))
    for name in COLUMNS[:-1]:
        view.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in rows(found)[:SHOWN]:
        add_row(view, row[:-1])
    return view


def not_chosen(found: Mapping[str, Any]) -> list[str]:
    """Return the reasons against the next best candidates."""
    others = [row for row in found["candidates"] if not row["chosen"]][:NUM_EXPLAINED]
    return [f"{row['method']} k={row['k']}: {row['why']}" for row in others]


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's rows: the chosen candidate first, then those that ran on the most prompts."""
    return [
        [
            each["method"],
            str(each["k"]),
            number(each["speedup"], 2),
            span(each["interval"]),
            number(each["tau"], 2),
            str(each["prompts"]),
            ("chosen: " if each["chosen"] else "") + each["why"],
        ]
        for each in found["candidates"]
    ]


def verdict(found: Mapping[str, Any]) -> str:
    """Return the chosen plan and the reason in one line."""
    if found["chosen"]["label"] == PLAIN:
        return f"the plan: {PLAIN}. {found['reason']}"
    return f"the plan: {found['chosen']['method']}, k = {found['chosen']['k']}: {found['reason']}"


def oracle(found: Mapping[str, Any]) -> list[str]:
    """Return the oracle gap as a list of one line, or an empty list if it was not measured."""
    gap = found["oracle_gap"]
    if gap is None:
        return []
    return [
        f"oracle gap: choosing the best candidate at every position would be {gap:.2f} times as fast as the best single one"
    ]


def notes(found: Mapping[str, Any]) -> list[str]:
    """Return the comment lines at the top of a plan."""
    traffic, batches = found["traffic"], ", ".join(map(str, found["batches"]))
    lines = [
        f"Found by outrider tune {found['version']} on {found['date'][:10]}, {found['device']},",
        f"from {traffic['prompts']} prompts with {traffic['tokens']} output tokens, batch size {batches}.",
        f"{found['chosen']['label']}: {found['reason']}.",
    ]
    lines += [f"Not chosen: {reason}." for reason in not_chosen(found)]
    return [*lines, "Valid for this machine and this traffic: run outrider tune again for others."]


def page(found: Mapping[str, Any]) -> str:
    """Return the report as one HTML file. Raises ``OutriderError`` if a library is missing."""
    from outrider.bench.html import render

    stages = [[name, f"{seconds:.1f}"] for name, seconds in found["seconds"].items()]
    tables: list[tuple[str, str, list[str], list[list[str]]]] = [
        ("Candidates", "Each measured in turn with plain decoding on the given number of prompts.", [*COLUMNS], rows(found)),
        ("Rungs", "Contenders, batches of prompts and the fastest contender of each rung.", [*RUNG], _rungs(found)),
        ("Time by stage", "Seconds of each stage.", ["stage", "seconds"], stages),
    ]
    if found["not_possible"]:
        impossible = [[method, why] for method, why in found["not_possible"].items()]
        tables.append(("Not available", "Methods that do not fit this target, and why.", ["method", "why"], impossible))
    return render(
        found,
        title=f"Outrider plan: {found['target']}",
        notes=[verdict(found)],
        sections=[("Speed by draft length", [_picture(found)])] if found["candidates"] else [],
        tables=tables,
        meaning={},
    )


def _rungs(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [each["name"], str(each["contenders"]), str(each["groups"]), each["leader"], f"{each['margin']:.1%}"]
        for each in found["rungs"]
    ]


def _picture(found: Mapping[str, Any]) -> Plot:
    """Plot the speedup over K, one line per method."""
    from outrider.bench.plots import Series, plot

    by_method: dict[str, dict[int | str, Any]] = {}
    for row in found["candidates"]:
        by_method.setdefault(row["method"], {})[row["k"]] = row
    series = [
        Series(
            method,
            {k: row["speedup"] for k, row in of_method.items()},
            {k: row["interval"] for k, row in of_method.items() if row["interval"]},
        )
        for method, of_method in by_method.items()
    ]
    note = "The number of measured prompts differs between points: see the table of candidates."
    labels = ("K, drafts requested per round", "speedup over plain decoding")
    return plot("Speedup over plain decoding by draft length", note, labels, series, baseline=1)
