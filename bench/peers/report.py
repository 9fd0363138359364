"""Tables and the JSON document of a comparison."""

from __future__ import annotations

import statistics
from typing import Any

from engines import OURS
from rich.markup import escape
from rich.table import Table

from outrider.bench.documents import busy_label


def tables(document: dict[str, Any]) -> list[Table]:
    """Return every table for which the document has cells."""
    cells = document["cells"]
    found = []
    if any(entry["prompt_tokens"] for entry in cells):
        found.append(first_token_table(cells))
    if any(not entry["prompt_tokens"] for entry in cells):
        found.append(table(cells))
    if any(entry["bits"] and not entry["prompt_tokens"] for entry in cells):
        found.append(equal_bits_table(cells, document["best_by"]))
    if any("weights_gb_s" in entry for entry in cells):
        found.append(bandwidth_table(cells, document["bandwidth"]))
    if busy := document.get("busy"):
        for view in found:
            view.title = f"{view.title}, with {busy_label(busy)}"
    return found


def table(cells: list[dict[str, Any]]) -> Table:
    """Return the table of all engines and methods, with the ratio of Outrider to each."""
    view = Table(title="Tokens per second, medians of alternating rounds (decode: without prefill)")
    for name in ("method", "engine", "dtype"):
        view.add_column(name)
    for name in ("K", "tok/s", "decode", "ours / it", "decode: ours / it", "same text", "changed", "others' CPU", "peak MB"):
        view.add_column(name, justify="right")
    previous = None
    for entry in cells:
        if entry["prompt_tokens"]:
            continue
        key = (entry["method"], entry["bits"])
        if previous not in (None, key):
            view.add_section()
        previous = key
        view.add_row(*_row(entry))
    return view


def _row(entry: dict[str, Any]) -> list[str]:
    if "tok_s" not in entry:
        return [entry["method"], entry["engine"], "", "", _reason(entry)]
    schedule = "" if entry["schedule"] == "constant" else f"{entry['schedule']} "
    return [
        entry["method"],
        f"[bold]{OURS}[/bold]" if entry["engine"] == OURS else entry["engine"],
        entry["meta"]["dtype"],
        "-" if entry["method"] == "plain" else f"{schedule}{entry['k']}",
        f"{entry['tok_s']:.1f}",
        f"{entry['decode_tok_s']:.1f}" if "decode_tok_s" in entry else "",
        f"{entry['ratio']:.2f}x" if "ratio" in entry else "",
        f"{entry['decode_ratio']:.2f}x" if "decode_ratio" in entry else "",
        f"{entry['same_text']:.0%}" if "same_text" in entry else "",
        f"{entry['changed_texts']}/{entry['compared_texts']}" if "changed_texts" in entry else "",
        f"{entry['other_cpu']:.0%}",
        str(entry["meta"]["peak_rss_mb"]),
    ]


def _reason(entry: dict[str, Any]) -> str:
    """Return why a cell has no measurements."""
    return escape(entry["error"] or "not measured")


def equal_bits_table(cells: list[dict[str, Any]], rate: str) -> Table:
    """Return a table with one row per method and bits, one column per engine, and the best of each engine in the last rows."""
    measured = [entry for entry in cells if entry["bits"] and rate in entry and not entry["error"]]
    engines = list(dict.fromkeys(entry["engine"] for entry in measured))
    what = "after the first token" if rate == "decode_tok_s" else "prefill included"
    view = Table(title=f"At equal bits, and the best of each: tokens per second {what}")
    for name in ("bits", "method", *engines, *(f"ours / {name}" for name in engines if name != OURS)):
        view.add_column(name, justify="left" if name == "method" else "right")
    rows = dict.fromkeys((entry["bits"], entry["method"]) for entry in measured)
    for bits, method in rows:
        found = {entry["engine"]: entry for entry in measured if (entry["bits"], entry["method"]) == (bits, method)}
        view.add_row(str(bits), method, *_speeds(found, engines, rate))
    view.add_section()
    for name, methods in (("plain", {"plain"}), ("any method", {method for _, method in rows})):
        found = best_of_each([entry for entry in measured if entry["method"] in methods], rate)
        view.add_row("best", name, *_speeds(found, engines, rate))
    return view


def best_of_each(cells: list[dict[str, Any]], rate: str) -> dict[str, dict[str, Any]]:
    """Return every engine's fastest cell."""
    best: dict[str, dict[str, Any]] = {}
    for entry in cells:
        if rate in entry and (entry["engine"] not in best or entry[rate] > best[entry["engine"]][rate]):
            best[entry["engine"]] = entry
    return best


def _speeds(found: dict[str, dict[str, Any]], engines: list[str], rate: str) -> list[str]:
    ours = found.get(OURS)
    speeds = [f"{found[name][rate]:.1f}" if name in found else "" for name in engines]
    others = [found.get(name) for name in engines if name != OURS]
    return speeds + [f"{ours[rate] / other[rate]:.2f}x" if ours and other else "" for other in others]


def first_token_table(cells: list[dict[str, Any]]) -> Table:
    """Return a table of first-token times, one row per number of bits and prompt length."""
    measured = [entry for entry in cells if entry["prompt_tokens"] and "first_s" in entry]
    engines = list(dict.fromkeys(entry["engine"] for entry in measured))
    view = Table(title="Milliseconds to the first token, medians of alternating rounds")
    for name in ("bits", "prompt tokens", *engines, *(f"{name} / ours" for name in engines if name != OURS)):
        view.add_column(name, justify="right")
    for bits, length in dict.fromkeys((entry["bits"], entry["prompt_tokens"]) for entry in measured):
        found = {entry["engine"]: entry for entry in measured if (entry["bits"], entry["prompt_tokens"]) == (bits, length)}
        times = [f"{1000 * found[name]['first_s']:.0f}" if name in found else "" for name in engines]
        peers = [found.get(name, {}) for name in engines if name != OURS]
        ratios = [f"{peer['first_ratio']:.2f}x" if "first_ratio" in peer else "" for peer in peers]
        view.add_row(str(bits), str(length), *times, *ratios)
    for entry in cells:
        if entry["prompt_tokens"] and "first_s" not in entry:
            view.add_row(str(entry["bits"]), str(entry["prompt_tokens"]), f"{entry['engine']}: {_reason(entry)}")
    return view


def bandwidth_table(cells: list[dict[str, Any]], measured: list[dict[str, float]]) -> Table:
    """Return a table of memory bandwidth and the share that 16-bit plain decoding uses to read its weights."""
    copy, read = (statistics.median(each[name] for each in measured) for name in ("copy_gb_s", "read_gb_s"))
    view = Table(title=f"Memory bandwidth: copy {copy:.1f} GB/s (read and written), read {read:.1f} GB/s")
    for name in ("16-bit plain decoding", "weights, GB/s", "share of copy", "share of read"):
        view.add_column(name, justify="left" if name.startswith("16") else "right")
    for entry in cells:
        if "weights_gb_s" in entry:
            shares = (f"{entry['copy_share']:.0%}", f"{entry['read_share']:.0%}")
            view.add_row(entry["engine"], f"{entry['weights_gb_s']:.1f}", *shares)
    return view
