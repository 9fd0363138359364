"""Render a benchmark document as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from outrider.bench.breakdown import MEANING
from outrider.bench.documents import Cell, at, busy_label, distinct, loop_warnings
from outrider.bench.tables import MORE, Section, matrices, sections
from outrider.errors import requires

FACTS = ("target", "device", "dtype", "weights", "threads", "command", "date", "commit", "version", "max_tokens", "repeat")


def page(result: Mapping[str, Any]) -> str:
    """Return the HTML report of a benchmark document. Raises ``OutriderError`` if matplotlib is missing."""
    with requires("report", "an HTML report"):
        from outrider.bench.plots import plots

    shown = sections(result)
    cells = shown[0].cells
    note = "The parts of measured minus formula, in units of speedup; latency of whole outputs."
    shown.append(Section("More figures", note, MORE, cells))
    speeds, *rest = [(each.title, each.note, ["condition", "method", *each.columns], each.rows) for each in shown]
    by_workload = [("Workloads by methods", each.note, ["workload", *each.methods], each.rows) for each in matrices(cells)]
    return render(
        result,
        title="Outrider benchmark",
        notes=_notes(result),
        sections=[
            (_heading(temperature, cells), plots(at(cells, temperature=temperature)))
            for temperature in distinct(cells, "temperature")
        ],
        tables=[speeds, *by_workload, *rest],
        meaning=MEANING,
    )


def render(result: Mapping[str, Any], **parts: Any) -> str:
    """Fill the page's template with a document's facts, and with title, notes, plots, tables and definitions."""
    facts = [(name, result[name]) for name in FACTS if result.get(name) is not None]
    return filled("outrider.bench", "report.html", facts=facts, **parts)


def filled(package: str, name: str, **parts: Any) -> str:
    """Fill a package's template of a page. Needs jinja2, which torch requires."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files(package).joinpath(name).read_text(encoding="utf-8")
    return environment.from_string(source).render(parts)


def _heading(temperature: float, cells: Sequence[Cell]) -> str:
    batch, busy = distinct(cells, "batch")[0], cells[0]["busy"]
    title = ("Greedy" if temperature == 0 else f"Temperature {temperature:g}") + f", batch {batch}"
    return title + (f", {busy_label(busy)}" if busy else "")


def _notes(result: Mapping[str, Any]) -> list[str]:
    found = []
    if result.get("interrupted"):
        found.append("The benchmark was interrupted; it contains the finished measurements.")
    inflated = result.get("inflated")
    if inflated:
        found.append(f"The target is a small model inflated to the cost of a {inflated['size']} one.")
    found += [f"{warning}." for warning in loop_warnings(result["cells"])]
    differing = sum(cell["same_text"] not in (None, 1) for cell in result["cells"])
    if differing:
        found.append(f"In {differing} cells some outputs differ from plain decoding's: see the column 'same'.")
    faults = sum(cell["faults"] for cell in result["cells"])
    if faults:
        found.append(f"Proposers failed {faults} times, counted by request; those requests continued without drafts.")
    return found
