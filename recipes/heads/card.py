"""Model card of a head: method, training data, and acceptance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from recipes import table
from recipes.heads.rows import PROMPT_LEN, SEQ_LEN

WHAT = {
    "medusa": (
        "Medusa heads (Cai et al. 2024, arXiv 2401.10774): four heads of three residual blocks, each with its own output layer,"
        " on the target's last hidden state. vLLM's format.",
        "medusa",
    ),
    "eagle1": (
        "An EAGLE-1 head, which EAGLE-2 uses too (Li et al. 2024, arXiv 2401.15077 and 2406.16858): one Llama layer over the"
        " next token's embedding and the target's last feature. The authors' format.",
        "eagle:draft=<this folder>",
    ),
    "eagle3": (
        "An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one Llama layer over the next token's embedding and three fused"
        " features of the target, with an output layer of its own. The native format.",
        "eagle",
    ),
    "mtp": (
        "A multi-token-prediction head (DeepSeek-V3, arXiv 2412.19437, section 2.2): one layer of the target's kind over the"
        " next token's embedding and the target's last feature. Tensor names of Qwen's checkpoints (`mtp.*`).",
        "mtp",
    ),
    "dflash": (
        "A block drafter (DFlash, arXiv 2602.06036, with DSpark's bias by the token before, arXiv 2607.05147): two layers that"
        " draft eight tokens in one pass over three fused features of the target. z-lab's format.",
        "dflash",
    ),
}


def publish(name: str, head: Path, rows: int, machine: str, continued: bool) -> None:
    """Write ``README.md`` next to the head, and move its curve next to this recipe."""
    curve = json.loads((head / f"{name}_curve.json").read_text())
    for file in head.glob(f"{name}_curve.*"):  # no picture without matplotlib
        shutil.move(file, Path(__file__).with_name(file.name))
    measured = json.loads((head / "measured.json").read_text())
    size = (head / "model.safetensors").stat().st_size
    (head / "README.md").write_text(card(name, measured, curve[-1], rows, size, machine, continued))


def card(name: str, measured: dict[str, Any], end: dict[str, Any], rows: int, size: int, machine: str, continued: bool) -> str:
    """Return the card's text."""
    what, method = WHAT[name]
    minutes = end["seconds"] / 60
    head = "The earlier target's head was continued: it" if continued else "The head"
    parts = [
        f"# Model card: {name}",
        f"{what} It drafts for the embedded target in `../target` and for no other model: `--method {method}`. Licence and"
        " sources of the text: as the target's (`../MODEL_CARD.md`). The prompts of our measurements are not part of the"
        " text.",
        f"Made by `python -m recipes.heads one {name}`; this card too. {size / 1e6:.1f} MB, bfloat16.",
        "## Training",
        f"{rows} rows of {SEQ_LEN} tokens, written by the target after {PROMPT_LEN} tokens of training text, greedily and at"
        " temperature 1 in equal parts. Its hidden states were captured once and kept.",
        f"{head} saw {end['tokens'] / 1e6:.2f} M tokens in {end['step']} steps and {minutes:.0f} minutes on {machine}. Loss"
        f" curve: `recipes/heads/{name}_curve.png`.",
        "## Acceptance by position",
        "Measured on rows that were held out of the head's training.",
    ]
    if "accuracies" in measured:
        shares = [(row[0], sum(row[:3]), sum(row)) for row in measured["accuracies"]]
        header = (
            "head (position after the last token)",
            "likeliest token is the target's",
            "among the 3 likeliest",
            "among the 10",
        )
        parts.append(table(header, [(f"{i + 1} ({i + 2})", *map("{:.1%}".format, row)) for i, row in enumerate(shares)]))
    elif "acceptance_by_position" in measured:
        found = measured["acceptance_by_position"]
        both = enumerate(zip(found["greedy"]["by_depth"], found["sampled"]["by_depth"], strict=True), 1)
        columns = "draft, after the true tokens", "greedy", "at temperature 1"
        parts.append(table(columns, [(number, *map("{:.1%}".format, row)) for number, row in both]))
        greedy, sampled = (list(found[how]["mean_acceptance_length"].values())[-1] for how in ("greedy", "sampled"))
        parts.append(f"Mean acceptance length, greedy and at temperature 1: {greedy} and {sampled}.")
    else:
        held = measured["held_out"].values()
        parts.append("A later position counts whether or not the earlier ones were right, over the head's own drafts:")
        parts.append(table(("depth", "likeliest token is the target's"), [(i + 1, f"{x:.1%}") for i, x in enumerate(held)]))
        siblings = enumerate(measured["acceptance_by_rank"], 1)
        parts.append("At temperature 1 and depth 1, by multi-round rejection:")
        parts.append(table(("sibling", "is the one accepted"), [(number, f"{share:.1%}") for number, share in siblings]))
    return "\n\n".join(parts) + "\n"
