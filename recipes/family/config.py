"""Model sizes and training plans, one preset per class of machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.train.options import LayerSkip
from outrider.train.plan import SEED as SEED
from outrider.train.plan import TrainingPlan

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT)
TOKEN_IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # of END


def documents_of(text: str) -> list[str]:
    """Return the documents of a text, which are separated by lines that contain only the end marker."""
    parts = re.split(rf"^{re.escape(END)}$", text, flags=re.MULTILINE)
    return [part.strip("\n") for part in parts if part.strip()]


@dataclass(frozen=True)
class Shape:
    """Size of one Llama. Other settings (head_dim 64, tied embeddings, RoPE) are the same for all."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


@dataclass(frozen=True)
class DraftText:
    """Training text of the draft (DistillSpec, Zhou et al. 2024)."""

    generated_rows: int  # number of sequences written by the target
    prompt_tokens: int = 96
    new_tokens: int = 160
    generation_batch: int = 256
    generated_share: float = 0.6  # share of each batch; the rest is corpus text
    greedy_share: float = 0.5  # share of the generated rows; the others are sampled at temperature 1
    plain_share: float = 0.03  # share of the run with plain next-token loss first
    layers: tuple[int, ...] = (0, 2)  # target layers that initialise the draft


@dataclass(frozen=True)
class Growth:
    """Settings of a randomly initialised target, besides LayerSkip's.

    With ``grow_at`` only every second layer is trained until that share of the run. The others start as the identity (zero
    output projections), so training needs half the work and adding them changes no output.
    """

    exit_share: float = 1.0  # share of rows in the exit loss
    from_scratch: bool = True  # dropout grows over the run
    grow_at: float = 0.0


@dataclass(frozen=True)
class AgainstLoops:
    """Settings of training against the model's own loops."""

    rows: int = 16  # rows continued per step
    prompt_tokens: int = 64  # tokens per row
    new_tokens: int = 160
    every: int = 4  # steps between two such losses
    weight: float = 1.0  # weight of the unlikelihood relative to the text loss


@dataclass(frozen=True)
class Preset:
    """Sizes, budgets and amount of tokenised text for one class of machine."""

    vocab: int
    target: Shape
    draft: Shape
    target_plan: TrainingPlan
    further_plan: TrainingPlan  # continues a finished target; ends close to the rates at which loops_plan begins
    loops_plan: TrainingPlan
    draft_plan: TrainingPlan
    layer_skip: LayerSkip
    growth: Growth
    source_megabytes: float  # maximum text per source
    distillation: DraftText
    max_positions: int = 1024
    against_loops: AgainstLoops = field(default_factory=AgainstLoops)


CPU = Preset(
    vocab=6144,
    target=Shape(hidden=256, layers=14, heads=4, kv_heads=2, intermediate=768),
    draft=Shape(hidden=192, layers=2, heads=3, kv_heads=1, intermediate=512),
    # the learning rates fall to a quarter here, and from there to zero in training against loops
    target_plan=TrainingPlan(150_000_000, 8192, ((0.88, 256), (0.97, 512), (1.0, 1024)), end=0.25),
    further_plan=TrainingPlan(
        35_000_000, 8192, ((0.92, 256), (0.98, 512), (1.0, 1024)), muon_lr=0.01, adam_lr=0.002, decay=1.0, end=0.5
    ),
    loops_plan=TrainingPlan(4_000_000, 8192, ((1.0, 512),), muon_lr=0.005, adam_lr=0.001, warmup=0.02, decay=1.0),
    draft_plan=TrainingPlan(20_000_000, 4096, ((1.0, 256),), minutes=40, muon_lr=0.01, adam_lr=0.0025, warmup=0.02),
    layer_skip=LayerSkip(exit_scale=0.5),
    growth=Growth(exit_share=0.25, grow_at=0.55),
    source_megabytes=40,
    distillation=DraftText(3072),
)

PRESETS = {
    "cpu": CPU,
    "gpu": replace(  # the same models with the plans of the shipped target: 4 minutes of an H100
        CPU,
        further_plan=TrainingPlan(
            76_500_000,
            32_768,
            ((0.9, 256), (0.97, 512), (1.0, 1024)),
            muon_lr=0.02,
            adam_lr=0.004,
            decay=0.9,
            end=0.15,
            seed=81,
        ),
        loops_plan=TrainingPlan(
            14_300_000, 32_768, ((1.0, 512),), muon_lr=0.004, adam_lr=0.0008, warmup=0.02, decay=1.0, seed=82
        ),
        against_loops=AgainstLoops(rows=64),
    ),
    "tiny": Preset(  # for tests: takes seconds on any machine
        vocab=320,
        target=Shape(hidden=64, layers=3, heads=1, kv_heads=1, intermediate=96),
        draft=Shape(hidden=64, layers=1, heads=1, kv_heads=1, intermediate=96),
        target_plan=TrainingPlan(20_000, 256, ((0.5, 32), (1.0, 64))),
        further_plan=TrainingPlan(10_000, 256, ((0.5, 32), (1.0, 64)), decay=1.0, end=0.1),
        loops_plan=TrainingPlan(5_000, 256, ((1.0, 64),), muon_lr=0.002, adam_lr=0.0004),
        draft_plan=TrainingPlan(10_000, 256, ((1.0, 32),)),
        layer_skip=LayerSkip(exit_scale=0.2),
        growth=Growth(exit_share=0.5),
        source_megabytes=1,
        distillation=DraftText(8, 8, 24, 4, layers=(0,)),
        max_positions=256,
        against_loops=AgainstLoops(4, 16, 32),
    ),
}
