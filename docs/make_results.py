"""Write docs/results.md, and the results table of README.md, from results/*.json. Usage: python docs/make_results.py [--check]

Every figure comes from a file, and a ratio is that of its two columns. With --check nothing is written: files that are out of
date are printed, and the exit code is 1. tests/test_results.py runs this check.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from scipy import special

from outrider.bench.documents import busy_label, headline, is_plain, label
from outrider.bench.statistics import LEVEL

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"
LEAST_REPEATS = 5  # of a single prompt, for an interval by bootstrap: of fewer it is the range of the repeats
COLUMNS = ("plain tok/s", "speculative tok/s", "ratio", "95% interval")
OURS = "outrider"
FAMILY_SINCE = "2026-11-26T19"  # date of the weights of the current embedded models
ASLEEP = ("2026-11-25", "2026-11-29T17")  # dates of comparisons in which other engines inherited OMP_WAIT_POLICY=PASSIVE
SEVERAL_HOURS = {"1b-heads": "measured again in other hours, with other ratios ([log](log/trees.md))"}
MOST_CELLS = 40  # largest grid whose workloads are shown one by one
PROVENANCE = {
    "version",
    "commit",
    "cpu",
    "device",
    "machine",
    "date",
    "command",
    "dtype",
    "threads",
    "python",
    "schema",
    "kind",
}
Document = Mapping[str, Any]
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Speeds:
    """Two speeds of one run, and the interval of their ratio."""

    base: float  # tok/s
    other: float
    interval: Sequence[float | None] | None

    def columns(self) -> list[str]:
        """Return the four entries of ``COLUMNS``. The ratio is computed from the rounded speeds."""
        base, other = (float(speed(each)) for each in (self.base, self.other))
        low, high = self.interval or (None, None)
        span = "" if low is None or high is None else f"{low:.2f} to {high:.2f}"
        return [speed(self.base), speed(self.other), f"{other / base:.2f}" if base else "", span]


def speed(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Row:
    """One line of README's table: its label, and the cell of a file that it shows."""

    what: str
    file: str
    method: str
    k: int | str
    temperature: float = 0.0
    workload: str = "humaneval"


README_ROWS = (
    Row("Qwen2.5-Coder-1.5B, `draft`", "qwen-humaneval", "draft", "auto"),
    Row("Qwen2.5-Coder-1.5B, `draft`, temperature 0.8", "qwen-humaneval", "draft", "auto", 0.8),
    Row(
        "Qwen2.5-Coder-1.5B, grammar drafts, JSON of six keys, prefill included",
        "grammar-qwen",
        "plain",
        "auto",
        workload="record",
    ),
    Row("1B, `draft`", "1b-humaneval", "draft", "auto"),
    Row("1B, `draft`, temperature 0.8", "1b-humaneval", "draft", "auto", 0.8),
    Row("1B, `mtp:bits=8`", "1b-heads", "mtp:bits=8", "auto"),
    Row("1B, `eagle:bits=8` (EAGLE-3)", "1b-heads", "eagle:bits=8", "auto"),
    Row("1B, `low-bit`", "1b-self", "low-bit", "auto"),
    Row('1B, `suffix`, `-k 15`, "edit this file", 4 prompts', "1b-repeating", "suffix", 15, workload="edit"),
)
SERVED = "serve-qwen-llamacpp"  # Qwen2.5-Coder-1.5B in llama.cpp's server and in Outrider's


def documents(folder: Path) -> dict[str, Document]:
    """Return name -> document of all result files, in the order of names."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def processor(document: Document) -> str | None:
    """Return the processor (or GPU) of a result, or None if it was not recorded."""
    for name in ("device", "cpu"):
        if document.get(name):
            return re.sub(r"^cpu: ", "", str(document[name]))
    return None


# --- tables -----------------------------------------------------------------------------------------------------------------


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(entry.replace('|', chr(92) + '|') for entry in line)} |" for line in [columns, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def bench_speeds(cell: Cell) -> Speeds:
    """Return speeds after the first token, before loops if the file has these."""
    shown = headline(cell)
    is_known = cell["prompts"] > 1 or cell["repeats"] >= LEAST_REPEATS
    return Speeds(
        shown["plain_decode_tok_s"], shown["decode_tok_s"], shown.get("decode_speedup_interval") if is_known else None
    )


def paired_interval(base: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of the mean log ratio within a round; None with fewer than two rounds, or a speed of 0."""
    if len(base) < 2 or not all((*base, *other)):
        return None
    ratios = [log(after / before) for before, after in zip(base, other, strict=True)]
    half = special.stdtrit(len(ratios) - 1, (1 + LEVEL) / 2) * stdev(ratios) / sqrt(len(ratios))
    return exp(fmean(ratios) - half), exp(fmean(ratios) + half)


def bench_table(document: Document) -> str:
    """Return a table of every method and condition; large grids combine the workloads."""
    cells = [cell for cell in document["cells"] if not is_plain(cell) and cell["decode_tok_s"]]
    many = len(cells) > MOST_CELLS
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        workload = "all" if many else str(cell["workload"])
        others = f" with {busy_label(cell['busy'])}" if cell["busy"] else ""
        key: tuple[str, ...] = (workload, f"{cell['temperature']:g}", str(cell["batch"]), label(cell) + others)
        groups.setdefault(key, []).append(cell)
    rows = []
    for key, group in groups.items():
        each = [bench_speeds(cell) for cell in group]
        pooled = Speeds(
            len(each) / sum(1 / one.base for one in each),
            len(each) / sum(1 / one.other for one in each),
            each[0].interval if len(each) == 1 else None,
        )
        shown = [headline(cell) for cell in group]
        # without drafts: null, in files of earlier versions 0
        alphas = [cell["acceptance_rate"] for cell in shown if cell["mean_k"] and cell["acceptance_rate"] is not None]
        loops = fmean(cell["loop_share"] for cell in group)
        rows.append([*key, *pooled.columns(), f"{fmean(alphas):.2f}" if alphas else "", f"{loops:.0%}"])
    return table(["workload", "temperature", "batch", "method", *COLUMNS, "alpha", "tokens in loops"], rows)


def serve_table(document: Document) -> str:
    """Return a table of each load with and without drafts, or of two engines."""
    owners = [document["servers"].get(mode, {}).get("owned_by") for mode in ("plain", "speculative")]
    columns = [f"{each} tok/s" for each in owners] if owners[0] != owners[1] else COLUMNS[:2]
    return table(["clients", *columns, *COLUMNS[2:]], [[load, *both.columns()] for load, both in served(document).items()])


def served(document: Document) -> dict[str, Speeds]:
    """Return load -> speeds of the loads that were measured in both modes."""
    loads: dict[str, dict[str, Cell]] = {}
    for cell in document["cells"]:
        loads.setdefault(cell["load"], {})[cell["mode"]] = cell
    both = {load: (modes["plain"], modes["speculative"]) for load, modes in loads.items() if len(modes) == 2}
    return {
        load: Speeds(a["tok_s"], b["tok_s"], paired_interval(a["repeat_tok_s"], b["repeat_tok_s"]))
        for load, (a, b) in both.items()
    }


def peers_table(document: Document) -> str:
    """Return a table of Outrider and each other engine by method, at the file's rate: prefill included or after the first
    token.

    If bits per weight were compared, the best cell of each engine is last, followed by the share of the memory bandwidth.
    """
    name = str(document.get("best_by", "tok_s"))
    measured = [cell for cell in document["cells"] if cell.get(name) and not cell.get("error")]
    has_bits = any(cell.get("bits") for cell in measured)
    rows = []
    for cell, own in peer_pairs(measured):
        both = Speeds(cell[name], own[name], paired_interval(cell[f"{name}_rounds"], own[f"{name}_rounds"]))
        bits = [str(cell["bits"])] if has_bits else []
        changed = [f"{changed_texts(cell)} / {changed_texts(own)}"] if has_bits else []
        rows.append([*bits, cell["method"], engine_name(cell), *both.columns(), *changed])
    if not has_bits:
        return table(["method", "other engine", "its tok/s", "Outrider's tok/s", *COLUMNS[2:]], rows)
    for method in ("plain", "any"):
        best = best_of_each([cell for cell in measured if method in (cell["method"], "any")], name)
        own = best.pop(OURS, None)
        for cell in best.values() if own is not None else ():
            what = ", ours ".join(f"{each['method']} {bits_name(each)}" for each in (cell, own))
            label = f"{'plain' if method == 'plain' else 'any method'}: {what}"
            rows.append(["best", label, engine_name(cell), *Speeds(cell[name], own[name], None).columns(), ""])
    columns = [
        "bits",
        "method",
        "other engine",
        "its tok/s",
        "Outrider's tok/s",
        *COLUMNS[2:],
        "texts changed by drafts, its / ours",
    ]
    return "\n\n".join(part for part in (table(columns, rows), bandwidth_sentence(document)) if part)


def first_token_table(document: Document) -> str:
    """Return a table of first-token times, and Outrider's speedup."""
    rows = []
    for cell, own in peer_pairs([cell for cell in document["cells"] if cell.get("first_s") and not cell["error"]]):
        both = Speeds(own["first_s"], cell["first_s"], paired_interval(own["first_s_rounds"], cell["first_s_rounds"]))
        rows.append([str(cell["bits"]), str(cell["prompt_tokens"]), engine_name(cell), *both.columns()])
    return table(["bits", "prompt tokens", "other engine", "Outrider's s", "its s", *COLUMNS[2:]], rows)


def peer_pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Return every cell of another engine with Outrider's of the same method, bits and prompt length."""
    conditions = ("method", "bits", "prompt_tokens")
    ours = {tuple(cell.get(name) for name in conditions): cell for cell in cells if cell["engine"] == OURS}
    pairs = [(cell, ours.get(tuple(cell.get(name) for name in conditions))) for cell in cells if cell["engine"] != OURS]
    return [(cell, own) for cell, own in pairs if own is not None]


def best_of_each(cells: Sequence[Cell], rate: str) -> dict[str, Cell]:
    """Return every engine's fastest cell."""
    best: dict[str, Cell] = {}
    for cell in cells:
        if cell["engine"] not in best or cell[rate] > best[cell["engine"]][rate]:
            best[cell["engine"]] = cell
    return best


def engine_name(cell: Cell) -> str:
    return f"{cell['engine']} {cell['meta'].get('dtype', '')}".strip()


def bits_name(cell: Cell) -> str:
    """Return a cell's bits per weight, or the type of its GGUF file."""
    return f"{cell['bits']} bits" if isinstance(cell["bits"], int) else str(cell["bits"])


def changed_texts(cell: Cell) -> str:
    return f"{cell['changed_texts']} of {cell['compared_texts']}" if "changed_texts" in cell else "-"


def bandwidth_sentence(document: Document) -> str:
    """Return a sentence on the share of the copy bandwidth used to read the weights per token, or "" if it was not measured."""
    shares = [f"{cell['engine']} {cell['copy_share']:.0%}" for cell in document["cells"] if "copy_share" in cell]
    if not shares:
        return ""
    copy = median(each["copy_gb_s"] for each in document["bandwidth"])
    plain = f"One row of 16-bit plain decoding reads its weights at this share of it: {', '.join(shares)}."
    return f"Copying memory in the same run: {copy:.1f} GB/s, bytes read and written. {plain}"


def grammar_table(document: Document) -> str:
    """Return a table of each method without and with grammar drafts, and of the best of both."""
    rows = []
    for form, found in document["forms"].items():
        lanes = found["lanes"]
        best = f"best: {found['best_without']}, {found['best_with'].removeprefix('grammar+')} with"
        others = {name: f"grammar+{name}" for name in lanes if f"grammar+{name}" in lanes}
        pairs = [(name, name, other, lanes[other]["gain_interval"]) for name, other in others.items()]
        pairs.append((best, found["best_without"], found["best_with"], found["gain_interval"]))
        for name, base, other, interval in pairs:
            speeds = Speeds(lanes[base]["tok_s"], lanes[other]["tok_s"], interval)
            rounds = " / ".join(f"{lanes[each]['rounds_per_answer']:.1f}" for each in (base, other))
            rows.append([form, name, *speeds.columns(), rounds])
    columns = ["form", "method", "without tok/s", "with tok/s", *COLUMNS[2:], "passes per answer"]
    return table(columns, rows)


def facts_table(document: Document) -> str:
    """Return a table of a check's values."""
    shown = {name: value for name, value in document.items() if name not in PROVENANCE and value not in (None, {})}
    return table(["", ""], [[name.replace("_", " "), fact(value)] for name, value in shown.items()])


def fact(value: Any) -> str:
    """Return a value for a table: numbers by name, verdicts by method or counted; the number of entries of other lists."""
    if isinstance(value, dict) and not any(isinstance(each, (list, dict)) for each in value.values()):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list) and value and all(isinstance(each, dict) and "verdict" in each for each in value):
        if all("method" in each for each in value):
            return ", ".join(f"{each['method']} {each['verdict']}" for each in value)
        return ", ".join(f"{count} {verdict}" for verdict, count in Counter(each["verdict"] for each in value).items())
    if isinstance(value, (list, dict)):
        return f"{len(value)} in the file" if value else "none"
    return str(value)


EARLIER = (
    "# Measured with earlier weights\n\nMeasured before the embedded models were trained further; the sizes are the same."
    " Greedy output of the earlier weights loops more, and loops are easy to draft: expect smaller speedups. Plain speeds at 1B"
    " are still valid. Nothing newer covers busy neighbours (`1b-busy.json`), parallel drafts (`1b-parallel.json`), and, at 1B"
    " on matrix units, sampled text and intervals of the draft's speedup (`1b-humaneval-amx.json`; newer greedy speeds are in"
    " `peers-1b-bits-amx.json`)."
)
TOPICS = {
    "Methods": "Tokens per second after the first token; before loops if the file records loops.",
    "Serving": "Tokens of all answers per second over the whole run, prefill included.",
    "Other engines": "Both engines alternate in one run; after the first token, or prefill included, as stated.",
    "First tokens of other engines": "Seconds from a request to its first token; the engines alternate in one run.",
    "Structured output": "Each method without and with drafts from the grammar; tokens per second, prefill included.",
    "Checks": "Values reported by the checks.",
}
OF_ENGINES = ("Other engines", "First tokens of other engines")


def topic(document: Document) -> str:
    if document.get("kind") == "serve":
        return "Serving"
    if "forms" in document:
        return "Structured output"
    cells = document.get("cells")
    if isinstance(cells, list) and cells and "engine" in cells[0]:
        return "First tokens of other engines" if cells[0].get("prompt_tokens") else "Other engines"
    if isinstance(cells, list) and cells and "decode_tok_s" in cells[0]:
        return "Methods"
    return "Checks"


MAKERS = {
    "Methods": bench_table,
    "Serving": serve_table,
    "Other engines": peers_table,
    "First tokens of other engines": first_token_table,
    "Structured output": grammar_table,
    "Checks": facts_table,
}


def section(name: str, document: Document) -> str:
    """Return the section of one file: its origin and its table."""
    where = [processor(document) or "processor not recorded", f"commit {document.get('commit', 'not recorded')}"]
    where += [str(document[key]) for key in ("dtype", "date") if document.get(key)]
    kind = topic(document)
    if kind == "Other engines":
        where.append("after the first token" if document.get("best_by") == "decode_tok_s" else "prompt included")
    if kind in OF_ENGINES and document.get("busy"):
        where.append(f"with {busy_label(document['busy'])}")
    if kind in OF_ENGINES and ASLEEP[0] <= str(document.get("date") or "") < ASLEEP[1]:
        where.append("llama.cpp was slowed down by a setting that it inherited ([log](log/peers.md))")
    where += [SEVERAL_HOURS[name]] if name in SEVERAL_HOURS else []
    command = f"\n\n`{document['command']}`" if document.get("command") else ""
    return f"### {name}.json\n\n{'; '.join(where)}{command}\n\n{MAKERS[kind](document)}\n"


def uses_earlier_weights(document: Document) -> bool:
    """Return whether speeds were measured with earlier weights of the embedded models."""
    return topic(document) in ("Methods", "Serving", "Other engines") and str(document.get("date") or "") < FAMILY_SINCE


def page(found: Mapping[str, Document]) -> str:
    """Return docs/results.md."""
    parts = [
        "# Results",
        "Generated by `python docs/make_results.py` from `results/*.json`; a test checks that it is up to date. A ratio is "
        "that of the two columns before it; its 95% interval is of the ratios within a repeat: by bootstrap over repeats "
        "and prompts ([how](bench.md#what-the-figures-mean)), for servers and other engines by Student's t over repeats. "
        "Commands have the options of their commits.",
    ]
    for is_earlier in (False, True):
        parts += [EARLIER] if is_earlier else []
        for kind, meaning in TOPICS.items():
            chosen = {name: document for name, document in found.items() if topic(document) == kind}
            sections = [section(name, each) for name, each in chosen.items() if uses_earlier_weights(each) == is_earlier]
            parts += [f"## {kind}{', earlier weights' if is_earlier else ''}", meaning, *sections] if sections else []
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def readme_table(found: Mapping[str, Document], rows: Sequence[Row] = README_ROWS) -> str:
    """Return the table of README. Raises ``ValueError`` if rows have no cell or come from several machines."""
    machines = {processor(found[row.file]) for row in rows}
    if len(machines) != 1 or None in machines:
        raise ValueError(f"the table of README has rows of several machines: {machines}")
    lines = [[row.what, *speeds_of(found[row.file], row).columns()] for row in rows]
    return f"{table(['model, method', *COLUMNS], lines)}\n\nProcessor: {machines.pop()}."


def served_sentence(document: Document) -> str:
    """Return the sentence of README that compares the servers of two engines at one and at four clients."""
    one, four = (speeds.other / speeds.base for speeds in served(document).values())
    return (
        f"With the Qwen models `outrider serve` generates {one:.2f} times the tokens per second of llama.cpp's server with one "
        f"client, {four:.2f} times with four, where Outrider's drafts gain nothing. llama.cpp runs without drafts: they slow "
        "it down."
    )


def speeds_of(document: Document, row: Row) -> Speeds:
    """Return the speeds of a row: of a method against plain decoding, or with grammar drafts against without."""
    if topic(document) != "Structured output":
        return bench_speeds(cell_of(document, row))
    lanes = document["forms"][row.workload]["lanes"]
    with_drafts = lanes[f"grammar+{row.method}"]
    return Speeds(lanes[row.method]["tok_s"], with_drafts["tok_s"], with_drafts["gain_interval"])


def cell_of(document: Document, row: Row) -> Cell:
    """Return the cell of a row. Raises ``ValueError`` unless there is exactly one."""
    wanted = {"method": row.method, "k": row.k, "temperature": row.temperature, "workload": row.workload, "batch": 1}
    cells: list[Cell] = [cell for cell in document["cells"] if all(cell[name] == value for name, value in wanted.items())]
    if len(cells) != 1:
        raise ValueError(f"{row.file}.json has {len(cells)} cells for {row.what!r}")
    return cells[0]


def with_block(text: str, block: str) -> str:
    """Return ``text`` with the block between the markers replaced. Raises ``ValueError`` unless each marker occurs once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected {BEGIN} and {END}, once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


# --- checks -----------------------------------------------------------------------------------------------------------------


def wrong_ratios(text: str) -> list[str]:
    """Return the table rows whose ratio differs from that of the two columns before it, to the digits shown."""
    wrong, columns = [], list[str]()
    for line in text.splitlines():
        entries = [entry.strip() for entry in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if "ratio" in entries:
            columns = entries
        elif not entries:
            columns = []
        elif columns and not set(line) <= set("|- "):
            at = columns.index("ratio")
            base, other, ratio = entries[at - 2 : at + 1]
            if ratio and abs(float(other) / float(base) - float(ratio)) > 0.00501:
                wrong.append(line)
    return wrong


def stray_figures(text: str) -> list[str]:
    """Return the lines outside of code and generated blocks that contain a speed or a speedup."""
    text = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    speeds = r"(?<![\w.`])\d+(?:\.\d+)?x\b|\d\s*(?:tok/s|tokens/s|tokens (?:a|per) second)"
    ratios = r"(?:\d times|twice) (?:as fast|faster|slower|plain|the (?:speed|tokens per))|\d\.\d+ instead of \d"
    figure = re.compile(f"{speeds}|{ratios}")
    return [line for line in text.splitlines() if figure.search(line)]


def main(check: bool) -> int:
    """Write both pages; with ``check``, print those that are out of date and return 1."""
    found = documents(ROOT / "results")
    readme = ROOT / "README.md"
    made = {
        ROOT / "docs" / "results.md": page(found),
        readme: with_block(readme.read_text(encoding="utf-8"), f"{readme_table(found)} {served_sentence(found[SERVED])}"),
    }
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python docs/make_results.py")
        return int(bool(stale))
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
