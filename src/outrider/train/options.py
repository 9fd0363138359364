"""Options of training, declared once for Python and for ``outrider train``. Imports no torch, so that the help is fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from outrider.errors import OutriderError
from outrider.options import CheckedOptions, boolean, choice, declared, int_choice, number, option, several, text, whole
from outrider.train.plan import SEED

MEASURED = "measured.json"  # in an output folder; marks it as one
WHAT, TEXT, LENGTH = "What", "Text", "How long"  # headings of the help
FOLDER = text("a folder or a hub id")
CONTINUE = "Continue this head, a folder or hub id, instead of a new one; its sizes stay."
LAYERS = several(whole(0), "a list of whole numbers from 0 on (2,7,11)")
DIVERGENCES = ("kl", "tv")
NEW_RATES = {"muon_lr": 0.01, "adam_lr": 0.001}  # default learning rates
CONTINUED_RATES = {"muon_lr": 0.002, "adam_lr": 0.0001}  # of an existing model
MASK_RATES = {"muon_lr": 0.006, "adam_lr": 0.0015}  # of an existing model that must learn to read mask tokens


def _default_rates(name: str) -> str:
    """Return the default learning rates, for the help."""
    continued = f"{CONTINUED_RATES[name]}, or {MASK_RATES[name]} with --parallel"
    return f"(default: {NEW_RATES[name]}; to continue an existing model {continued})"


@dataclass(frozen=True)
class Source(CheckedOptions):
    """Source of the training text."""

    panel: ClassVar[str] = TEXT
    paths: tuple[Path, ...] = ()
    seq_len: int = option(whole(2), 256, "Tokens per row.")
    max_tokens: int = option(whole(1), 1_000_000, "Maximum number of text tokens to use, and of their features on disk.")
    regenerate: bool = option(boolean(), False, "Replace each row by the target's continuation of its beginning.")
    prompt_len: int = option(whole(1), 64, "Tokens at the beginning of each row that --regenerate and --on-policy keep.")
    temperature: float = option(number(0), 0.0, "With --regenerate: temperature; 0 is greedy.")


@dataclass(frozen=True)
class HeadPlan(CheckedOptions):
    """Training length and learning rates of a head or a model."""

    panel: ClassVar[str] = LENGTH
    minutes: float | None = option(
        number(above=0),
        None,
        "Minutes of training; the learning rate decays to 1% of its value by then (default: by --epochs).",
    )
    epochs: float = option(number(above=0), 4.0, "Maximum passes over the text.")
    batch_tokens: int = option(whole(1), 4096, "Tokens per step, at least one row; fewer need less memory.")
    muon_lr: float | None = option(number(above=0), None, f"Learning rate of the layers' matrices {_default_rates('muon_lr')}.")
    adam_lr: float | None = option(number(above=0), None, f"Learning rate of other weights {_default_rates('adam_lr')}.")
    compile: bool = option(boolean(), False, "Compile the training step; takes a minute and pays on longer runs.")
    seed: int = SEED

    def with_rates(self, rates: Mapping[str, float]) -> HeadPlan:
        """Return the plan with these learning rates where none is given."""
        missing: dict[str, Any] = {name: rate for name, rate in rates.items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True)
class MedusaRun(CheckedOptions):
    """Medusa heads to train."""

    heads: int = option(whole(1), 4, "Number of heads, the longest draft.")
    layers: int = option(whole(1), 1, "Residual blocks per head.")
    draft_vocab: int | None = option(
        whole(2), None, "Draft only this many of the most frequent tokens: smaller heads, faster training (default: all)."
    )
    start: str | None = option(FOLDER, None, CONTINUE)


@dataclass(frozen=True)
class EagleRun(CheckedOptions):
    """Variant of the EAGLE head to train."""

    generation: int = option(int_choice(1, 3), 3, "1 (EAGLE-1 and EAGLE-2, which share their weights) or 3.")
    steps: int | None = option(whole(1), None, "Depths trained per step (default: 5; EAGLE-1: 1).")
    hidden_states: tuple[int, ...] | None = option(
        LAYERS, None, "Three hidden states for EAGLE-3, numbered as in transformers (default: 2, n/2, n-3)."
    )
    draft_vocab: int | None = option(
        whole(2), None, "EAGLE-3: draft only this many of the most frequent tokens (default: all)."
    )
    format: tuple[str, ...] = option(
        several(choice("native", "speculators"), "native, speculators or both"),
        ("native",),
        "native, speculators, or both separated by a comma: the second goes to OUT-FORMAT (default: native).",
    )
    start: str | None = option(FOLDER, None, CONTINUE)

    def folders(self, out: Path) -> list[Path]:
        """Return a folder per format: OUT, then OUT-FORMAT."""
        return [out, *(out.with_name(f"{out.name}-{form}") for form in self.format[1:])]

    def __post_init__(self) -> None:
        """Raise ``OutriderError`` for options that exclude each other."""
        super().__post_init__()
        if self.generation == 1 and "speculators" in self.format:
            raise OutriderError("EAGLE-1 heads support the native format only")
        states = self.hidden_states
        if self.generation == 3 and states is not None and (len(states), len({*states})) != (3, 3):
            raise OutriderError(f"invalid hidden states {states}: EAGLE-3 reads three different ones, such as 2,7,11")


@dataclass(frozen=True)
class MtpRun(CheckedOptions):
    """How to train an MTP head."""

    steps: int = option(whole(1), 3, "Depths trained per step.")
    start: str | None = option(FOLDER, None, f"{CONTINUE} It may be the target's own.")
    format: str = option(
        choice("qwen", "deepseek", "mimo"), "qwen", "Tensor names: qwen (mtp.*), deepseek (of a further layer) or mimo."
    )


@dataclass(frozen=True)
class BlockRun(CheckedOptions):
    """The block drafter to train."""

    block_size: int = option(whole(2), 16, "Tokens of a block, the last committed one included: one more than drafts.")
    layers: int | None = option(whole(1), None, "Layers of the head (default: a seventh of the target's, 2 to 5).")
    hidden_states: tuple[int, ...] | None = option(
        several(whole(1), "a list of whole numbers from 1 on (2,7,11)"),
        None,
        "Hidden states of the target that it reads, numbered as in transformers (default: as many as layers, evenly spaced).",
    )
    markov_rank: int = option(
        whole(0),
        0,
        "DSpark: rank of a bias on the logits by the token before, such as 256; a block then has one draft more; 0: none.",
    )
    selector_rank: int = option(
        whole(0),
        0,
        "DFlash 2: rank of a path selector over the 16 likeliest tokens of each draft, such as 256; adds short convolutions to"
        " the layers; 0: none.",
    )
    start: str | None = option(FOLDER, None, CONTINUE)

    def __post_init__(self) -> None:
        """Raise ``OutriderError`` for both ranks."""
        super().__post_init__()
        if self.markov_rank and self.selector_rank:
            raise OutriderError("Markov rank and selector rank exclude each other: a head is DSpark's or DFlash 2's")


@dataclass(frozen=True)
class DraftShape(CheckedOptions):
    """Size of a draft; None values are derived from the target."""

    layers: int | None = option(whole(1), None, "Layers of the draft (default: an eighth of the target's, at least two).")
    width: int | None = option(whole(1), None, "Hidden size of the draft (default: the target's).")
    from_layers: tuple[int, ...] | None = option(
        LAYERS, None, "Indices of the target layers that initialise it (default: evenly spaced)."
    )


@dataclass(frozen=True)
class Distillation(CheckedOptions):
    """Distillation settings."""

    loss: str = option(choice(*DIVERGENCES), "kl", "kl (forward KL) or tv (total variation, the rejection rate when sampling).")
    on_policy: float = option(
        number(0, 1), 0.0, "Share of a step's rows that the draft generates itself after their first --prompt-len tokens."
    )
    prompt_len: int = Source.prompt_len

    def __post_init__(self) -> None:
        super().__post_init__()
        declared(Source)["prompt_len"].read("prompt_len", self.prompt_len)


@dataclass(frozen=True)
class Parallel(CheckedOptions):
    """Drafts per pass to train a draft for, with mask tokens, and the share of chains that reaches each depth."""

    parallel: int | None = option(whole(2), None, "Train the draft to make this many drafts per pass, with mask tokens (PARD).")
    keep: float = option(number(above=0, at_most=1), 0.7, "With --parallel: share of chains kept from each depth to the next.")
    keep_least: float = option(number(above=0, at_most=1), 0.2, "With --parallel: minimum share of the chains at any depth.")

    @property
    def depths(self) -> int:
        """Return the drafts per pass; the first one needs no mask token."""
        return self.parallel or 1


@dataclass(frozen=True)
class LayerSkip(CheckedOptions):
    """Settings of layer dropout, early-exit loss, and exits per step."""

    max_drop: float = option(number(0, 0.99), 0.1, "Layer dropout of the last layer.")  # p_max
    exit_scale: float = option(number(0), 1.0, "Weight of early exits relative to the last layer.")  # e_scale of equation 6
    rotation: int | None = option(whole(1), None, "A step trains every R-th exit, in turn (default: one exit).")  # C_rot,R
