"""What a comparison leaves behind: a table for people and one JSON document for programs."""

from __future__ import annotations

from typing import Any

from engines import OURS
from rich.table import Table


def table(cells: list[dict[str, Any]]) -> Table:
    """Every engine of every method, with ours over theirs."""
    view = Table(title="Tokens per second, medians of alternating rounds (decode: without the prompt's pass)")
    view.add_column("method")
    view.add_column("engine")
    view.add_column("dtype")
    view.add_column("K", justify="right")
    for name in ("tok/s", "decode", "ours / it", "decode: ours / it", "same text", "others' CPU", "peak MB"):
        view.add_column(name, justify="right")
    previous = None
    for entry in cells:
        if previous not in (None, entry["method"]):
            view.add_section()
        previous = entry["method"]
        view.add_row(*_row(entry))
    return view


def _row(entry: dict[str, Any]) -> list[str]:
    if "tok_s" not in entry:
        return [entry["method"], entry["engine"], "", "", entry["error"] or "not measured"]
    schedule = "" if entry["schedule"] == "constant" else f"{entry['schedule']} "
    return [
        entry["method"],
        f"[bold]{OURS}[/bold]" if entry["engine"] == OURS else entry["engine"],
        entry["meta"]["dtype"],
        "-" if entry["method"] == "plain" else f"{schedule}{entry['k']}",
        f"{entry['tok_s']:.1f}",
        f"{entry['decode_tok_s']:.1f}",
        f"{entry['ratio']:.2f}x" if "ratio" in entry else "",
        f"{entry['decode_ratio']:.2f}x" if "decode_ratio" in entry else "",
        f"{entry['same_text']:.0%}" if "same_text" in entry else "",
        f"{entry['other_cpu']:.0%}",
        str(entry["meta"]["peak_rss_mb"]),
    ]
