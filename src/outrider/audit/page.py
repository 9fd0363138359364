"""Audit report as one self-contained HTML page without scripts or external resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.audit.certificate import VERDICTS
from outrider.audit.sampling import AS_IS
from outrider.audit.tables import grid_verdict
from outrider.bench.html import filled

PROVENANCE = ("command", "date", "version", "commit", "device", "dtype", "weights", "threads", "seconds")


def page(document: Mapping[str, Any]) -> str:
    """Return the HTML of an audit document of either kind."""
    more: dict[str, Any] = {"provenance": [(key, str(document[key])) for key in PROVENANCE if document.get(key) is not None]}
    if document["kind"] == "same-text":
        more["grid_verdict"] = grid_verdict(document)
    else:
        verdicts = {each["method"]: (each["verdict"], VERDICTS[each["verdict"]]) for each in document["methods"]}
        verdicts |= {method: ("not audited", reason) for method, reason in document["not_possible"].items()}
        more["verdicts"] = [(method, *verdict) for method, verdict in verdicts.items()]
    return filled("outrider.audit", "page.html", {**document, **more, "as_is": AS_IS, "shown": _shown})


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
