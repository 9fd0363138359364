"""Generate the model card from measurements. What people found is in the notes of the command line only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from outrider.cli.options import READABLE_TEMPERATURE, READABLE_TOP_P
from outrider.train.plan import TrainingPlan
from recipes import table

from . import corpus
from .config import Preset
from .report import SAMPLE_TOKENS

HEAD = """# Model card: the embedded family

Two small Llama models with one tokenizer, a *target* and a *draft*, for Python code and plain English. They exist so that
Outrider can be tried, tested and measured offline in seconds. Made by `recipes/family/`; this card was written by the same
command.
"""

LOOPS = ("texts_that_end_in_a_loop", "tokens_in_loops")
RUNS = ("target", "loops", "draft")  # with a curve each
CURVES = "../../../recipes/family"  # from the card's folder
PARTS = 10  # of a run, whose mean losses are shown
PARSING = """A continuation ends at its first end token or after {tokens} tokens. The body is everything before the first
non-empty line that starts at column 0; if there is none, the limit cut the text, and the unfinished last line is dropped,
together with the header of a block that has no line yet. It counts if prompt plus body is accepted by `ast.parse` and the
body is not blank. Parsing says nothing about sense: see the samples."""


def architecture(preset: Preset, parameters: dict[str, int]) -> list[str]:
    """Return the sizes of both models."""
    rows = [
        (name, f"{parameters[name] / 1e6:.2f} M", own.hidden, own.layers, f"{own.heads} / {own.kv_heads}", own.intermediate)
        for name, own in (("target", preset.target), ("draft", preset.draft))
    ]
    return [
        "## Architecture",
        table(("model", "parameters", "hidden", "layers", "heads / KV heads", "intermediate"), rows),
        f"`LlamaForCausalLM`, head size 64, tied embeddings, RoPE theta 10000, {preset.max_positions} positions, weights "
        f"in bfloat16. Byte-level BPE, {preset.vocab} tokens: digits are single, runs of spaces and of newlines are tokens "
        "of their own, all 256 bytes are in the alphabet.",
    ]


def sources(tokens: dict[str, int]) -> list[str]:
    """Return the sources of the text."""
    rows = [(s.name, s.origin, s.licence, f"{tokens[s.name] / 1e6:.2f} M", f"{s.weight:.0%}") for s in corpus.SOURCES]
    return [
        "## Text",
        table(("source", "origin", "licence", "tokens at hand", "share of the rows"), rows),
        "About half a percent of each source, whole documents chosen by hash, is held out; functions cut from held-out "
        "files are held out with them. GSM8K's calculator marks are removed, half of its problems and an eighth of the "
        "documented functions are framed with the chat tokens. The prompts of our measurements are not part of the text.",
    ]


def training(name: str, plan: TrainingPlan, curve: list[dict[str, Any]]) -> str:
    """Return the settings and the end of one training run."""
    last = curve[-1]
    return (
        f"- **{name}**: {last['step']} steps, {last['tokens'] / 1e6:.2f} M tokens, "
        f"{last['seconds'] / 60:.0f} min of the run's clock; Muon {plan.muon_lr} for hidden matrices, "
        f"AdamW {plan.adam_lr} for embeddings and norms, linear decay over the last {plan.decay:.0%}, seed {plan.seed}."
    )


def learning(curve: list[dict[str, Any]]) -> list[str]:
    """Return the target's loss against tokens."""
    edges = [part * len(curve) // PARTS for part in range(PARTS + 1)]
    parts = [curve[first:last] for first, last in pairwise(edges) if first < last]
    losses = [fmean(point["loss"] for point in part) for part in parts]
    return [
        "## Loss against tokens",
        table(
            ("million tokens", *(f"{part[-1]['tokens'] / 1e6:.0f}" for part in parts)),
            [("nats per token", *(f"{loss:.2f}" for loss in losses))],
        ),
        f"Of the target's run: means over {len(parts)} parts of it, of training text and with layer dropout. The learning rate "
        "decays, and rows may become longer, so that the loss falls for other reasons than tokens, too.",
        "\n".join(f"![{name}: training loss by tokens, and held-out text]({CURVES}/{name}_curve.png)" for name in RUNS),
    ]


def bits(found: dict[str, dict[str, float]]) -> list[str]:
    """Return the validation table."""
    rows = [(name, f"{value:.3f}", f"{found['draft'][name]:.3f}") for name, value in found["target"].items()]
    note = (
        "`total` weighs the sources of the first edition as that did, so that editions can be compared. "
        "Measured on the exported weights."
    )
    return ["## Bits per byte on held-out documents", table(("source", "target", "draft"), rows), note]


def speculation(report: dict[str, Any]) -> list[str]:
    """Return acceptance and early-exit measurements."""
    found = report["held_out_functions"]
    exits = [f"{value:.3f}" for value in found["exit_agreement"]]
    lengths = ", ".join(f"K = {k}: {value:.2f}" for k, value in found["mean_acceptance_length"].items())
    return [
        "## Speculation",
        f"On the target's own greedy text after {found['prompts']} held-out function signatures "
        f"({found['positions']} positions), the draft's greedy token equals the target's at "
        f"**{found['draft_agreement']:.1%}** of the positions; on the greedy "
        f"continuations of our fifty signatures at {report['own_signatures']['draft_agreement']:.1%}. "
        f"Mean acceptance length of greedy speculation on that text: {lengths}.",
        "Agreement of each early exit (the model's own norm and head after that number of layers) with the full target:",
        table(("layers", *range(1, len(exits) + 1)), [("agreement", *exits)]),
        "Layers that were left out while the model, or the one that it continues, grew and that learned little after that show "
        "as pairs of equal numbers.",
    ]


def loops(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return loop shares before and after training against loops."""
    rows = [
        (when, *(f"{each[how][what]:.0%}" for how in ("greedy", "sampled") for what in LOOPS)) for when, each in found.items()
    ]
    after = found["after"]
    return [
        "## Loops",
        f"Texts of at most {after['new_tokens']} tokens after {after['prompts']} prompts (our signatures, and openings of "
        "held-out documents): the share that ends in a loop, and the share of their tokens that are in loops, before and "
        "after training against loops (unlikelihood; Welleck et al. 2020). "
        f"Sampled: temperature {READABLE_TEMPERATURE}, top-p {READABLE_TOP_P}.",
        table(("", "greedy: texts", "tokens", "sampled: texts", "tokens"), rows),
    ]


def block(prompt: str, text: str, language: str) -> str:
    """Format one sample: prompt and continuation as one block."""
    return f"````{language}\n{prompt}{text.rstrip()}\n````"


def sample_sections(report: dict[str, Any], tokens: int, reading: str) -> list[str]:
    """Return ten unselected samples of each kind, and how they were read."""
    own = report["own_signatures"]
    code = [f"Parses: {'yes' if parsed else 'no'}\n\n{block(prompt, text, 'python')}" for prompt, text, parsed in own["code"]]
    english = [block(f"[{prompt}]", text, "text") for prompt, text in report["english"]]
    return [
        "## Samples, uncurated",
        f"**{own['parse_share']:.0%}** of the greedy continuations of our fifty signatures "
        "(`recipes/family/samples.py`) parse as Python. " + PARSING.format(tokens=tokens),
        "### Code: every fifth of the fifty signatures, greedy; the prompt is signature and docstring",
        *code,
        f"### English: temperature {READABLE_TEMPERATURE}, top-p {READABLE_TOP_P}, seed {report['seed']}, 80 tokens; "
        "prompts in brackets",
        *english,
        *([reading] if reading else []),
    ]


@dataclass(frozen=True)
class Notes:
    """What the measurements do not contain."""

    hardware: str
    abilities: str = ""  # paragraphs on what the models can and cannot do
    training: str = ""  # paragraph about this run
    reading: str = ""  # paragraph about how the samples were read, and what was found


def render(preset: Preset, report: dict[str, Any], curves: dict[str, list[dict[str, Any]]], notes: Notes) -> str:
    """Return the complete card."""
    continued, settings = report["continued"], preset.distillation
    plans = {
        "target": preset.further_plan if "target" in continued else preset.target_plan,
        "loops": preset.loops_plan,
        "draft": preset.draft_plan,
    }
    titles = {name: f"{name}, continued" if name in continued else name for name in RUNS} | {"loops": "target, against loops"}
    growth = (
        f"It grows: until {preset.growth.grow_at:.0%} of the run only every second layer is trained, the others are the "
        "identity. "
    )
    parts = [
        HEAD.rstrip(),
        *([f"## What they can and cannot do\n\n{notes.abilities}"] if notes.abilities else []),
        *architecture(preset, report["parameters"]),
        *sources(report["tokens"]),
        "## Training",
        f"Trained on {notes.hardware}:",
        "\n".join(training(titles[name], plans[name], curves[name]) for name in RUNS),
        f"The target is trained with LayerSkip (Elhoushi et al. 2024): layer dropout up to {preset.layer_skip.max_drop} "
        "at the last layer, an early-exit loss at one layer a step in rotation. "
        f"{'' if 'target' in continued else growth}The draft is distilled (forward KL on the target's logits; DistillSpec, "
        f"Zhou et al. 2024) after {settings.plain_share:.0%} of plain training; {settings.generated_share:.0%} of its rows "
        "were written by the target after training prefixes, half greedily and half at temperature 1.",
        *([notes.training] if notes.training else []),
        *learning(curves["target"]),
        *bits(report["bpb"]),
        *loops(report["loops"]),
        *speculation(report),
        *sample_sections(report, SAMPLE_TOKENS, notes.reading),
    ]
    return "\n\n".join(parts) + "\n"
