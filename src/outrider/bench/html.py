"""Render a benchmark document as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from outrider.bench.breakdown import MEANING, PARTS
from outrider.bench.documents import Cell, at, busy_label, condition, distinct, headline, is_plain, label, loop_warnings
from outrider.bench.loops import MAX_PERIOD, MIN_REPEATS
from outrider.bench.tables import Columns, number, percent, reason, rows_of, span
from outrider.errors import how_to_install
from outrider.types import OutriderError

FACTS = ("target", "device", "dtype", "weights", "threads", "command", "date", "commit", "version", "max_tokens", "repeat")
Section = tuple[str, str, list[str], list[list[str]]]  # title, note, headings and rows of a table


def check_installed() -> None:
    """Raise ``OutriderError`` if the library for reports is missing, before measuring."""
    if find_spec("matplotlib") is None:
        raise OutriderError(f"an HTML report needs matplotlib: {how_to_install('report')}")


def page(result: Mapping[str, Any]) -> str:
    """Return the HTML report of a benchmark document. Raises ``OutriderError`` if matplotlib is missing."""
    check_installed()
    from outrider.bench.plots import plots

    whole: Sequence[Cell] = result["cells"]
    cells = [headline(cell) for cell in whole]
    return render(
        result,
        title="Outrider benchmark",
        notes=_notes(result),
        sections=[
            (_heading(temperature, cells), plots(at(cells, temperature=temperature)))
            for temperature in distinct(cells, "temperature")
        ],
        tables=[_reasons(cells), _predictions(whole), _latencies(whole), _loops(whole), _all(cells)],
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
        found.append(f"In {differing} cells some outputs differ from plain decoding's: see the last table.")
    faults = sum(cell["faults"] for cell in result["cells"])
    if faults:
        found.append(f"Proposers failed {faults} times, counted by request; those requests continued without drafts.")
    return found


def _reasons(cells: Sequence[Cell]) -> Section:
    columns = ["condition", "method", "alpha", "mean K", "c", "formula", "measured", "off by", "mostly", *PARTS]
    rows = []
    for cell in cells:
        expected, measured, parts = cell["expected_speedup"], cell["decode_speedup"], cell["difference"]
        if is_plain(cell) or not expected or not measured or not parts:
            continue
        figures = [number(cell["acceptance_rate"], 3), number(cell["mean_k"], 2), number(cell["cost_ratio"], 3)]
        figures += [number(expected, 2), number(measured, 2), f"{measured / expected - 1:+.0%}", reason(cell)]
        rows.append([condition(cell), label(cell), *figures, *(f"{parts[name]:+.2f}" for name in PARTS)])
    note = (
        "Speedup after the first token. The parts, in units of speedup, add up to measured minus formula; the largest is named "
        "if the two differ by more than a tenth."
    )
    return "Expected and measured speedup", note, columns, rows


def _latencies(cells: Sequence[Cell]) -> Section:
    kinds = {"time_to_first_token_ms": "first token", "inter_token_ms": "between tokens", "pause_ms": "between rounds"}
    columns = ["condition", "method", *(f"{name}, {at} (ms)" for name in kinds.values() for at in ("p50", "p95")), "peak MB"]
    rows = []
    for cell in cells:
        times = [number((cell[key] or {}).get(at), 2) for key in kinds for at in ("p50", "p95")]
        rows.append([condition(cell), label(cell), *times, number(cell["peak_memory_mb"], 0)])
    note = (
        "Between tokens: the pause before tokens, divided by the number that arrived together. Memory: on a CPU that of the "
        "process, with all models loaded at that time."
    )
    return "Latency and memory", note, columns, rows


def _loops(cells: Sequence[Cell]) -> Section:
    columns = ["condition", "method", "tokens in loops", "texts that end in one", "tokens before loops"]
    columns += [f"{name}, {part}" for name in ("tok/s", "speedup", "alpha") for part in ("before loops", "whole texts")]
    rows = []
    for cell in cells:
        shares = [f"{cell[name]:.0%}" for name in ("loop_share", "ends_in_loop")]
        parts = (headline(cell), cell)
        keys = {"tok_s": 1, "speedup": 2, "acceptance_rate": 3}
        figures = [number(part[name], digits) for name, digits in keys.items() for part in parts]
        rows.append([condition(cell), label(cell), *shares, str(cell["tokens_before_loops"]), *figures])
    note = (
        f"A loop: at most {MAX_PERIOD} tokens, repeated {MIN_REPEATS} times or more. Loops are easy to draft, so elsewhere "
        "speeds, acceptance and milliseconds per round are for the tokens before the first loop of each output; latencies, "
        "same text, memory and the predicted plain speed are for whole outputs."
    )
    return "Loops", note, columns, rows


def _predictions(cells: Sequence[Cell]) -> Section:
    columns: Columns = {
        "plain, predicted (tok/s)": lambda cell: number(cell["predicted_plain_tok_s"], 1),
        "plain, measured (tok/s)": lambda cell: number(cell["plain_tok_s"], 1),
        "error": lambda cell: f"{cell['prediction_error_percent']:+.1f}%",
    }
    shown = [cell for cell in cells if cell["prediction_error_percent"] is not None]
    note = (
        "Prediction of plain decoding in a request's summary, compared with its measurement in the same repeat. "
        "In-sample: the prediction is also based on the times of measured plain runs."
    )
    return "Accuracy of the predicted plain speed", note, ["condition", "method", *columns], rows_of(columns, shown)


def _all(cells: Sequence[Cell]) -> Section:
    columns: Columns = {
        "tok/s": lambda cell: number(cell["tok_s"], 1),
        "plain tok/s": lambda cell: number(cell["plain_tok_s"], 1),
        "speedup": lambda cell: number(cell["speedup"], 2),
        "95%": lambda cell: span(cell["speedup_interval"]),
        "tok/pass": lambda cell: number(cell["mean_acceptance_length"], 2),
        "alpha": lambda cell: number(cell["acceptance_rate"], 3),
        "same text": lambda cell: percent(cell["same_text"]),
        "faults": lambda cell: str(cell["faults"]),
    }
    note = "Prefill included. Intervals: bootstrap over repeats and prompts, with paired measurements."
    return "All cells", note, ["condition", "method", *columns], rows_of(columns, cells)
