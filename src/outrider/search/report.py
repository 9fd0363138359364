"""The result of a search as a document, a table, a page and the notes of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.bench.contenders import PLAIN
from outrider.bench.provenance import provenance
from outrider.bench.tables import add_row, number, span
from outrider.search.confirming import ratio
from outrider.search.search import Search

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.bench.plots import Plot
    from outrider.search.choice import Choice

FACTS = ("target", "device", "dtype", "threads", "command", "date", "commit", "version")
COLUMNS = ("method", "k", "predicted", "tokens a round", "confirmed", "95%", "why")
SHOWN, TOLD = 10, 4  # candidates in the terminal's table, and those of which it is told why they were left; the page has all


def result(search: Search, chosen: Choice, target: str) -> dict[str, Any]:
    """What was chosen and why, JSON-ready: every candidate with its predicted and confirmed speed over plain decoding's."""
    journal, question = search.journal, search.question
    rows = [_candidate(search, chosen, each.as_json(), each.contender.label) for each in search.predictions]
    rows.sort(key=lambda row: (not row["chosen"], -(row["confirmed"] or 0.0), -row["predicted"]))
    return {
        "target": target,
        **provenance(search.llm.runner),
        "chosen": {"method": chosen.chosen.method, "k": chosen.chosen.k, "label": chosen.chosen.label},
        "speedup": None if chosen.speedup is None else round(chosen.speedup.value, 4),
        "speedup_interval": None if chosen.speedup is None or chosen.speedup.interval is None else chosen.speedup.interval,
        "reason": chosen.reason,
        "plain": chosen.others.get(PLAIN),
        "candidates": rows,
        "not_possible": search.reasons,
        "traffic": {
            "prompts": len(search.texts),
            "prompt_tokens": sum(len(text.prompt) for text in search.texts),
            "tokens": sum(len(text.output) for text in search.texts),
            "temperatures": sorted({text.params.temperature for text in search.texts}),
        },
        "batches": list(question.batches),
        "seconds": journal.document["seconds"],
    }


def _candidate(search: Search, chosen: Choice, prediction: dict[str, Any], label: str) -> dict[str, Any]:
    """Its last heat counts as its confirmation."""
    heat = search.measured.get(label)
    found = None if heat is None else ratio(heat, label, PLAIN)
    return {
        "method": prediction["method"],
        "k": prediction["k"],
        "chosen": label == chosen.chosen.label,
        "predicted": round(prediction["speedup"], 4),
        "predicted_by_batch": {batch: round(value, 4) for batch, value in prediction["by_batch"].items()},
        "tau": round(prediction["tau"], 4),
        "confirmed": None if found is None else round(found.value, 4),
        "confirmed_interval": None if found is None or found.interval is None else [round(end, 4) for end in found.interval],
        "why": chosen.reason if label == chosen.chosen.label else chosen.others.get(label, ""),
    }


def table(found: Mapping[str, Any]) -> Table:
    """The candidates that came closest, for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = f"{found['target']}: speed over plain decoding, prompts included"
    view = Table(title=Text(title), title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS[:-1]:
        view.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in rows(found)[:SHOWN]:
        add_row(view, row[:-1])
    return view


def left_behind(found: Mapping[str, Any]) -> list[str]:
    """Why the next best were not chosen."""
    others = [row for row in found["candidates"] if not row["chosen"]][:TOLD]
    return [f"{row['method']} k={row['k']}: {row['why']}" for row in others]


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A line of text for each candidate, the chosen one first."""
    return [
        [
            each["method"],
            str(each["k"]),
            number(each["predicted"], 2),
            number(each["tau"], 2),
            number(each["confirmed"], 2),
            span(each["confirmed_interval"]),
            ("chosen: " if each["chosen"] else "") + each["why"],
        ]
        for each in found["candidates"]
    ]


def verdict(found: Mapping[str, Any]) -> str:
    """One line."""
    if found["chosen"]["label"] == PLAIN:
        return f"the plan: {PLAIN}. {found['reason']}"
    return f"the plan: {found['chosen']['method']}, k = {found['chosen']['k']}: {found['reason']}"


def notes(found: Mapping[str, Any]) -> list[str]:
    """What stands above the values of the plan."""
    traffic, batches = found["traffic"], ", ".join(map(str, found["batches"]))
    lines = [
        f"Found by outrider tune {found['version']} on {found['date'][:10]}, {found['device']},",
        f"from {traffic['prompts']} prompts with {traffic['tokens']} tokens of answers, {batches} at a time.",
        f"{found['chosen']['label']}: {found['reason']}.",
    ]
    lines += [f"Left behind: {said}." for said in left_behind(found)]
    return [*lines, "Measured on one machine with one traffic: on another, tune again."]


def page(found: Mapping[str, Any]) -> str:
    """The whole report as one HTML file. Raises ``OutriderError`` where a library of it is missing."""
    from outrider.bench.html import render

    stages = [[name, f"{seconds:.1f}"] for name, seconds in found["seconds"].items()]
    tables: list[tuple[str, str, list[str], list[list[str]]]] = [
        (
            "Candidates",
            "Predicted: from replay and prices. Confirmed: measured in turn with plain decoding.",
            [*COLUMNS],
            rows(found),
        ),
        ("Where the time went", "Seconds of each stage.", ["stage", "seconds"], stages),
    ]
    if found["not_possible"]:
        impossible = [[method, why] for method, why in found["not_possible"].items()]
        tables.append(("Not possible here", "Methods that this target cannot have, and why.", ["method", "why"], impossible))
    return render(
        title=f"Outrider plan: {found['target']}",
        facts=[(name, found[name]) for name in FACTS if found.get(name) is not None],
        notes=[verdict(found)] if not found.get("interrupted") else [verdict(found), "The search was interrupted."],
        sections=[("Speed by draft length", [_picture(found)])] if found["candidates"] else [],
        tables=tables,
        meaning={},
    )


def _picture(found: Mapping[str, Any]) -> Plot:
    """Predicted speeds as lines over K, confirmed ones as points."""
    from outrider.bench.plots import COLOURS, INK, Plot, legend, svg_of

    title = "Speed over plain decoding by draft length"
    methods = list(dict.fromkeys(row["method"] for row in found["candidates"]))

    def draw(axes: Any) -> None:
        for index, method in enumerate(methods):
            colour = COLOURS[index % len(COLOURS)]
            mine = sorted((row for row in found["candidates"] if row["method"] == method and row["k"] != "auto"), key=_length)
            axes.plot([row["k"] for row in mine], [row["predicted"] for row in mine], color=colour, label=method)
            sure = [row for row in mine if row["confirmed"]]
            axes.plot([row["k"] for row in sure], [row["confirmed"] for row in sure], "o", color=colour)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set(xlabel="K, drafts asked for in a round", ylabel="times plain decoding's speed")
        axes.set_ylim(bottom=0)
        legend(axes)

    lines = tuple(tuple(row[:6]) for row in rows(found))
    note = "Lines: predicted; points: confirmed. Lengths that adapt (auto) stand in the table only."
    return Plot(title, svg_of(title, draw), note, COLUMNS[:6], lines)


def _length(row: Mapping[str, Any]) -> int:
    return int(row["k"])


def stages(seconds: Mapping[str, float]) -> str:
    """Where the time went, in one line."""
    parts: Sequence[str] = [f"{name} {each:.0f} s" for name, each in seconds.items()]
    return ", ".join(parts)
