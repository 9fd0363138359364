"""Audit results as terminal tables, and as one self-contained HTML page without scripts or external resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from outrider.audit.certificate import VERDICTS
from outrider.audit.sampling import AS_IS
from outrider.bench.html import filled
from outrider.bench.tables import bare_table

MARKS = {
    "certified": "[green]certified[/]",
    "not certified": "[red]NOT CERTIFIED[/]",
    "lossy": "[red]LOSSY[/]",
    "void": "[yellow]VOID[/]",
}
PROVENANCE = ("command", "date", "version", "commit", "device", "dtype", "weights", "threads", "seconds")


def certificates(result: Mapping[str, Any]) -> Group:
    """Return a table with one line per audited method, if any, followed by evidence and remarks."""
    view = bare_table(f"audit of {result['target']}", (0, 1))
    for name in ("method", "verdict", "greedy", "samples", "least p", "controls"):
        view.add_column(name, no_wrap=name in ("method", "verdict"))
    for each in result["methods"]:
        greedy, found = each["greedy"], each["sampling"]
        same = greedy["prompts"] - greedy["ties"] - greedy["defects"]
        entry = f"{same}/{greedy['prompts']} equal" + (f", {greedy['ties']} ties" if greedy["ties"] else "")
        sampled = ["", "", ""]
        if found is not None:
            samples = sum(part["samples"] for part in found["parts"].values())
            values = [test["holm_p_value"] for part in found["parts"].values() for test in part["tests"]]
            caught = sum(control["caught"] for control in found["controls"])
            sampled = [f"{samples:,}", f"{min(values, default=1.0):.2g}", f"{caught} of {len(found['controls'])} caught"]
        view.add_row(escape(each["method"]), MARKS[each["verdict"]], entry, *sampled)
    notes = [
        (each["method"], text) for each in result["methods"] for text in [*each["findings"], *each["doubts"], *each["remarks"]]
    ]
    lines = [escape(f"{name}: {text}") for name, text in [*notes, *result["not_possible"].items()]]
    return Group(*([view] if result["methods"] else []), *lines)


def grid_table(result: Mapping[str, Any]) -> Table:
    """Return a table with one line per method and draft length."""
    view = bare_table(f"same text as plain decoding, {result['target']}: {grid_verdict(result)}", (0, 1))
    for name in ("method", "K", "batch", "t", "differing"):
        view.add_column(name, justify="left" if name == "method" else "right")
    for cell in result["cells"]:
        entry = f"{cell['differing']} of {cell['prompts']}"
        view.add_row(escape(cell["method"]), str(cell["k"]), str(cell["batch"]), f"{cell['temperature']:g}", entry)
    return view


def grid_verdict(result: Mapping[str, Any]) -> str:
    """Return the verdict of a same-text grid, with the reason if it is inconclusive."""
    if result["certified"]:
        return "yes, everywhere"
    notes = [f"{result['differing']:,} texts differ, {len(result['cells'])} cells done"]
    if result["faults"]:
        notes.append(f"drafting failed {result['faults']} time(s), and plain decoding continued")
    return "; ".join(notes)


def page(document: Mapping[str, Any]) -> str:
    """Return the HTML of an audit document of either kind."""
    more: dict[str, Any] = {"provenance": [(key, str(document[key])) for key in PROVENANCE if document.get(key) is not None]}
    if document["kind"] == "same-text":
        more["grid_verdict"] = grid_verdict(document)
    else:
        verdicts = {each["method"]: (each["verdict"], VERDICTS[each["verdict"]]) for each in document["methods"]}
        verdicts |= {method: ("not audited", reason) for method, reason in document["not_possible"].items()}
        more["verdicts"] = [(method, *verdict) for method, verdict in verdicts.items()]
    return filled("outrider.audit", "page.html", **document, **more, as_is=AS_IS, shown=_shown)


def _shown(value: object) -> str:
    """Format a value of a table, numbers with four digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
