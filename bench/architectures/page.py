"""Write docs/models.md: which architectures run, which are refused, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import transformers

from architectures import compare, tiny

HEAD = """# Models

Architectures of transformers {version} that run in Outrider (torch {torch}; supported: transformers {range}). Written by
`make sweep`, which builds a tiny model with random weights of every architecture that can process text alone ({layers} layers,
hidden size {hidden}, windows of {window} tokens). The greedy output of every method is compared with that of transformers'
`generate`, for prompts of {lengths} tokens in one batch. "same" means that all {new} tokens of every prompt are equal; brackets
hold accepted drafts / all drafts. Float32, on a CPU; real checkpoints are not tested here.

An unsupported model is refused with a one-line error and exit code 2, before its weights are read. Each time a model is loaded,
a few tokens over Outrider's cache are compared with its own forward pass without a cache; `self_check=False` skips this.

| | language models | multimodal models |
|---|---|---|
{summary}
"""
VERDICTS = {
    "runs": "run: same output with every method",
    "refused": "refused",
    "wrong": "different output",
    "fails": "fail in transformers' own code, as a tiny model",
    "not built": "not built: transformers refuses the tiny config, or needs a package that is not installed",
}


def page(results: Sequence[compare.Result]) -> str:
    """Return the page as Markdown."""
    multimodal = set(tiny.architectures()) - set(tiny.language_models())
    plain = [each for each in results if each.name not in multimodal and each.name not in tiny.VARIANTS]
    wrapped = [each for each in results if each.name in multimodal]
    counts, others = Counter(each.verdict for each in plain), Counter(each.verdict for each in wrapped)
    summary = "\n".join(
        f"| {text} | {counts[verdict]} | {others[verdict]} |"
        for verdict, text in VERDICTS.items()
        if counts[verdict] + others[verdict]
    )
    head = HEAD.format(
        version=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        range=supported_range(),
        layers=tiny.LAYERS,
        hidden=tiny.HIDDEN,
        window=tiny.WINDOW,
        lengths=", ".join(map(str, compare.LENGTHS)),
        new=compare.NEW_TOKENS,
        summary=summary,
    )
    parts = [
        head,
        "## Language models that run\n\n" + runs_table(each for each in plain if each.verdict == "runs"),
        "## Variants\n\n" + runs_table(each for each in results if each.name in tiny.VARIANTS),
        "## Multimodal models, for their text\n\nLoaded from their folders, without the parts for images and sound.\n\n"
        + runs_table(each for each in wrapped if each.verdict == "runs"),
        "## Refused, with reasons\n\n" + reasons_table(each for each in [*plain, *wrapped] if each.verdict != "runs"),
    ]
    return "\n".join(parts)


def supported_range() -> str:
    """Return the range of transformers versions that Outrider requires."""
    from importlib.metadata import requires

    found = next(each for each in requires("outrider") or [] if re.match(r"transformers\b", each))
    return found.removeprefix("transformers")


def runs_table(results: Iterable[compare.Result]) -> str:
    """Return a table with one row per architecture and one column per method."""
    lines = ["| architecture | " + " | ".join(compare.METHODS) + " |", "|---" * (1 + len(compare.METHODS)) + "|"]
    notes: dict[str, int] = {}
    for each in results:
        cells = [each.name]
        for method in compare.METHODS:
            cell = each.cells.get(method, each.verdict)
            if cell.startswith("refused: "):
                reason = re.sub(
                    r"\b[A-Z]\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)\b",
                    "it",
                    cell.removeprefix("refused: "),
                )
                cell = f"refused [{notes.setdefault(reason, len(notes) + 1)}]"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    foot = [f"[{number}] {reason}" for reason, number in notes.items()]
    return "\n".join([*lines, *([""] if foot else []), *(f"{line}\n" for line in foot)]) + "\n"


def reasons_table(results: Iterable[compare.Result]) -> str:
    """Return a table with one row per architecture: verdict and reason."""
    lines = ["| architecture | | reason |", "|---|---|---|"]
    for each in sorted(results, key=lambda each: (list(VERDICTS).index(each.verdict), each.name)):
        reason = each.reason.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {each.name} | {each.verdict} | {reason[:240]} |")
    return "\n".join(lines) + "\n"
