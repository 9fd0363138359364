"""Training runs of heads: text to rows, rows to features, features to a head, head to a checkpoint.

Every stage resumes after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from outrider.heads import block_formats, eagle_formats, mtp_formats
from outrider.heads import medusa as medusa_heads
from outrider.heads.eagle import default_hidden_states
from outrider.heads.feature_head import RolloutHead
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.linear import structural_copy
from outrider.train import plots, shapes
from outrider.train.block_loss import BlockLoss, by_draft
from outrider.train.capture import FeatureCache, capture, check_captured
from outrider.train.claims import claim, digest, fingerprint
from outrider.train.medusa import MedusaLoss
from outrider.train.plan import SEED, Plan
from outrider.train.precision import run_dtype
from outrider.train.progress import reporting
from outrider.train.rollout_loss import RolloutLoss
from outrider.train.soft_entropy import SoftEntropy, compiled, soft_entropy
from outrider.train.text import RowOrder, held_out, regenerate, token_rows
from outrider.train.trainer import Loss, Trainer
from outrider.types import OutriderError

Measure = Callable[[bool], tuple[dict[str, Any], Any]]  # whether training has ended -> values for the curve, all measurements
NAME_OF_MTP, NAME_OF_BLOCK = "mtp", "dflash"  # subfolders of the work folder


@dataclass(frozen=True)
class Source:
    """Source of the training text."""

    paths: tuple[Path, ...] = ()
    seq_len: int = 256
    max_tokens: int = 1_000_000  # maximum tokens of text, and of features on disk
    regenerate: bool = False  # replace all but the first prompt_len tokens of each row by the target's continuation
    prompt_len: int = 64
    temperature: float = 0.0  # temperature of the continuation


@dataclass(frozen=True)
class HeadPlan:
    """Training length and learning rates of a head or a model."""

    minutes: float | None = None
    epochs: float = 4.0
    batch_tokens: int = 4096
    muon_lr: float = 0.01
    adam_lr: float = 0.001
    seed: int = SEED
    compiled: bool = False  # compile losses and a model's layers: takes a minute and pays on longer runs

    def plan(self, rows: RowOrder) -> Plan:
        """Return the plan of the training loop. Batches consist of whole rows."""
        tokens = int(self.epochs * rows.num_training * rows.seq_len)
        if tokens < 1 or self.batch_tokens < 1:
            raise OutriderError("invalid epochs or batch tokens: expected values above 0")
        return Plan(
            tokens,
            self.batch_tokens,
            ((1.0, rows.seq_len),),
            self.minutes,
            muon_lr=self.muon_lr,
            adam_lr=self.adam_lr,
            warmup=0.02,
            eval_every_s=120.0,
            save_every_s=30.0,
            seed=self.seed,
        )

    @property
    def entropy(self) -> SoftEntropy:
        """Return the vocabulary-wide loss, compiled if requested: most of a step's work besides matrix products."""
        return compiled() if self.compiled else soft_entropy


@dataclass
class Workspace:
    """What the training runs of one target share: the target, its text and features, and the work folder."""

    target: ModelRunner | PreTrainedModel  # heads read a runner's features; a model is trained, or teaches a draft
    tokenizer: PreTrainedTokenizerBase | None
    work: Path  # rows, features, checkpoints
    source: Source = field(default_factory=Source)
    rows: Tensor | None = None  # [R, S] instead of a source

    @property
    def seq_len(self) -> int:
        """Return the tokens per row, known before any text is read."""
        return self.source.seq_len if self.rows is None else self.rows.shape[1]

    @property
    def model(self) -> PreTrainedModel:
        """Return the target's model."""
        return self.target if isinstance(self.target, PreTrainedModel) else self.target.model

    @property
    def runner(self) -> ModelRunner:
        """Return the target's runner; for a model in training a new one, with weights in the checkpoint's dtype."""
        if isinstance(self.target, ModelRunner):
            return self.target
        served = structural_copy(self.target)
        for parameter in served.parameters():
            parameter.data = parameter.to(checkpoint_dtype(served))
        return ModelRunner.load(served, RunnerConfig(max_batch=16))

    def claim(self, name: str, **options: Any) -> None:
        """Record the identity of a part of the work folder. Raises ``OutriderError`` if it belongs to another run."""
        text = digest(self.training_rows())
        claim(self.work / name / "run.json", {"target": fingerprint(self.model), "text": text, **options})

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the products of a part of the work folder."""
        return run_dtype(self.work / name, self.model.device)

    def features(self, layers: Sequence[int]) -> FeatureCache:
        """Return the cache of these hidden states; create or complete it if necessary."""
        rows = self.training_rows()
        with reporting("features") as report:
            return capture(self.runner, rows, sorted(set(layers)), self.work / "features", report)

    def training_rows(self) -> Tensor:
        """Return rows of tokens [R, S], as given or regenerated by the target."""
        if self.rows is None:
            if self.tokenizer is None:
                raise OutriderError("the target has no tokenizer: text cannot be encoded")
            source = self.source
            self.rows = token_rows(source.paths, self.tokenizer, source.seq_len, source.max_tokens)
            if source.regenerate:
                with reporting("text") as report:
                    self.rows = regenerate(
                        self.runner, self.rows, source.prompt_len, source.temperature, SEED, self.work / "text", report
                    )
        return self.rows


@dataclass(frozen=True)
class MedusaRun:
    """Medusa heads to train."""

    heads: int = 4
    layers: int = 1  # residual blocks per head
    start: str | None = None  # heads to continue, which determine both numbers; None: new ones


def train_medusa(workspace: Workspace, out: Path, how: HeadPlan, kind: MedusaRun = MedusaRun()) -> bool:
    """Train heads and write them in vLLM's format with their measured accuracies. Return False if interrupted.

    Raises ``OutriderError`` for invalid settings before any text is generated or read.
    """
    runner = workspace.runner
    torch.manual_seed(how.seed)
    if kind.start is None:
        heads = shapes.new_medusa(runner, kind.heads, kind.layers)
    else:
        heads = medusa_heads.load(kind.start, runner.vocab_size)[0].requires_grad_(True)
    medusa_heads.check_fit(heads.to(runner.device), runner)
    shape = heads.shape
    if shape.mapped:
        raise OutriderError(f"{kind.start} drafts a part of the vocabulary: only heads for all tokens can be continued")
    if workspace.seq_len < shape.num_heads + 3:
        raise OutriderError(f"rows of {workspace.seq_len} tokens are too short for {shape.num_heads} heads")
    check_captured(runner, [runner.num_layers], workspace.seq_len)
    workspace.claim("medusa", heads=shape.num_heads, layers=shape.num_layers, start=kind.start)
    cache = workspace.features([runner.num_layers])
    output = shapes.output_layer(runner)
    loss = MedusaLoss(heads, output, cache, runner.num_layers, dtype=workspace.dtype("medusa"), entropy=how.entropy)

    def measure(final: bool) -> tuple[dict[str, Any], medusa_heads.Accuracies]:
        found = loss.measure()
        return {f"held_{head}": row[0] for head, row in enumerate(found, 1)}, found

    accuracies = run_job(workspace, "medusa", heads, cache, loss, how, measure)
    if accuracies is None:
        return False
    medusa_heads.export(heads.to(checkpoint_dtype(runner.model)), out, runner.vocab_size, accuracies)
    finish(workspace, "medusa", out, {"accuracies": accuracies})
    return True


@dataclass(frozen=True)
class EagleRun:
    """Variant of the EAGLE head to train."""

    generation: int = 3  # 1 (EAGLE-1 and EAGLE-2, which share their weights) or 3
    steps: int | None = None  # depths per step; None: 5 for EAGLE-3, 1 for EAGLE-1
    layers: tuple[int, ...] | None = None  # hidden states of EAGLE-3; None: low, middle and high
    draft_vocab: int | None = None  # EAGLE-3: number of most frequent tokens; None: all
    formats: tuple[str, ...] = ("native",)
    start: str | None = None  # head to continue, which determines generation, layers and draft_vocab; None: a new one

    def __post_init__(self) -> None:
        """Raise ``OutriderError`` for an invalid generation, format or number of hidden states."""
        if self.generation not in (1, 3):
            raise OutriderError(f"invalid generation {self.generation}: expected 1 (EAGLE-1 and EAGLE-2) or 3")
        unknown = [each for each in self.formats if each not in eagle_formats.FORMATS]
        if unknown:
            raise OutriderError(f"invalid format {unknown[0]!r}: expected {', '.join(eagle_formats.FORMATS)}")
        if self.generation == 1 and "speculators" in self.formats:
            raise OutriderError("EAGLE-1 heads support the native format only")
        if self.generation == 3 and self.layers is not None and len(self.layers) != 3:
            raise OutriderError(f"invalid hidden states {self.layers}: EAGLE-3 reads three, such as 2,7,11")

    def settled(self, runner: ModelRunner, seq_len: int) -> tuple[tuple[int, ...], int, int | None]:
        """Return hidden states, steps and draft vocabulary for a target and this row length.

        Raises ``OutriderError`` for invalid layers, or rows that are too short.
        """
        steps = (1 if self.generation == 1 else 5) if self.steps is None else self.steps
        vocab = None if self.generation == 1 else self.draft_vocab
        layers: tuple[int, ...] = (runner.num_layers,)
        if self.generation == 3:
            layers = self.layers or default_hidden_states(runner.num_layers)
        check_steps(runner, layers, steps, seq_len)
        if vocab is not None and not 1 <= vocab <= runner.vocab_size:
            raise OutriderError(f"invalid draft vocabulary of {vocab} tokens: the target has {runner.vocab_size}")
        return layers, steps, vocab


def train_eagle(workspace: Workspace, out: Path, how: HeadPlan, kind: EagleRun = EagleRun()) -> bool:
    """Train a head and write it in the requested formats, the first to ``out`` itself. Return False if interrupted.

    Raises ``OutriderError`` like ``EagleRun.settled`` and ``eagle_formats.load``, before any text is generated or read.
    """
    runner, head = workspace.runner, None
    if kind.start is not None:
        head = eagle_formats.load(kind.start, runner, runner.model)
        head, generation = shapes.trainable(head, runner), head.shape.generation
        kind = replace(kind, generation=generation, layers=head.hidden_states if generation == 3 else None)
    layers, steps, vocab = kind.settled(runner, workspace.seq_len)
    name = f"eagle{kind.generation}"
    workspace.claim(name, layers=layers, steps=steps, **{"draft vocabulary": vocab}, start=kind.start)
    draft_ids = None
    if vocab is not None:
        rows = workspace.training_rows()
        draft_ids = shapes.frequent_tokens(rows[: -held_out(len(rows))], runner.vocab_size, vocab)
    cache = workspace.features([*layers, runner.num_layers])
    torch.manual_seed(how.seed)
    if head is None:
        head = shapes.new_eagle(runner, kind.generation, layers, draft_ids)
    found = _train_rollout(workspace, name, head, cache, how, steps)
    if found is None:
        return False
    for index, form in enumerate(kind.formats):
        folder = out if index == 0 else out.with_name(f"{out.name}-{form}")
        eagle_formats.export(head, folder, form, runner.name, found["acceptance_by_rank"])
    finish(workspace, name, out, found)
    return True


@dataclass(frozen=True)
class MtpRun:
    """How to train an MTP head."""

    steps: int = 3  # depths per step
    start: str | None = None  # the head to continue, such as the one in the target's folder; None: a new one
    layout: str = "qwen"  # names of the tensors

    def __post_init__(self) -> None:
        """Raise ``OutriderError`` for an unknown layout."""
        if self.layout not in mtp_formats.LAYOUTS:
            raise OutriderError(f"unknown layout {self.layout!r}: expected {', '.join(mtp_formats.LAYOUTS)}")


def train_mtp(workspace: Workspace, out: Path, how: HeadPlan, kind: MtpRun = MtpRun()) -> bool:
    """Train an MTP head, new or continued, and write it to ``out``. Return False if interrupted.

    Raises ``OutriderError`` like ``check_steps`` and ``mtp_formats.load``, before any text is generated or read.
    """
    runner = workspace.runner
    check_steps(runner, [runner.num_layers], kind.steps, workspace.seq_len)
    torch.manual_seed(how.seed)
    head = shapes.new_mtp(runner) if kind.start is None else shapes.trainable(mtp_formats.load(kind.start, runner), runner)
    workspace.claim(NAME_OF_MTP, steps=kind.steps, start=kind.start)
    cache = workspace.features([runner.num_layers])
    found = _train_rollout(workspace, NAME_OF_MTP, head, cache, how, kind.steps)
    if found is None:
        return False
    mtp_formats.export(head, out, kind.layout, found["acceptance_by_rank"])
    finish(workspace, NAME_OF_MTP, out, found)
    return True


@dataclass(frozen=True)
class BlockRun:
    """The block drafter to train."""

    block_size: int = 16  # tokens of a block, the last committed one included
    layers: int | None = None  # of the head; None: a seventh of the target's, 2 to 5
    hidden_states: tuple[int, ...] | None = None  # of the target; None: as many as layers, evenly spaced
    markov_rank: int = 0  # above 0: DSpark's bias by the token before, of this rank
    selector_rank: int = 0  # above 0: DFlash 2's convolutions, and its path selector of this rank
    start: str | None = None  # head to continue, which determines all of these; None: a new one

    def __post_init__(self) -> None:
        """Raise ``OutriderError`` for an invalid block size, rank, number of layers or hidden state."""
        ranks = (("Markov rank", self.markov_rank, 0), ("selector rank", self.selector_rank, 0))
        layers = () if self.layers is None else (("number of layers", self.layers, 1),)
        for name, number, least in (("block size", self.block_size, 2), *ranks, *layers):
            if number < least:
                raise OutriderError(f"invalid {name} {number}: expected at least {least}")
        if self.markov_rank and self.selector_rank:
            raise OutriderError("Markov rank and selector rank exclude each other: a head is DSpark's or DFlash 2's")
        if self.hidden_states is not None and min(self.hidden_states) < 1:
            raise OutriderError(
                f"invalid hidden states {self.hidden_states}: this head reads outputs of layers: expected at least 1"
            )

    def settled(self, runner: ModelRunner, seq_len: int) -> shapes.BlockSizes:
        """Return the sizes for a target and this row length.

        Raises ``OutriderError`` for invalid hidden states, or rows that are too short.
        """
        if seq_len < self.block_size + 2:
            raise OutriderError(f"rows of {seq_len} tokens are too short for blocks of {self.block_size}")
        layers = self.layers or max(2, min(5, runner.num_layers // 7))
        states = self.hidden_states or tuple(sorted(set(block_formats.default_hidden_states(runner.num_layers, layers))))
        check_captured(runner, states, seq_len)
        return shapes.BlockSizes(states, layers, self.block_size, self.markov_rank, self.selector_rank)


def train_block(workspace: Workspace, out: Path, how: HeadPlan, kind: BlockRun = BlockRun()) -> bool:
    """Train a block drafter and write it to ``out`` with its acceptance by position. Return False if interrupted.

    Raises ``OutriderError`` like ``BlockRun.settled`` and ``block_formats.load``, before any text is generated or read.
    """
    runner, head = workspace.runner, None
    if kind.start is not None:
        head = shapes.trainable(block_formats.load(kind.start, runner, runner.model), runner)
        shape = head.shape
        kind = BlockRun(
            shape.block_size, len(head.layers), shape.hidden_states, shape.markov_rank, shape.selector_rank, kind.start
        )
    sizes = kind.settled(runner, workspace.seq_len)
    workspace.claim(NAME_OF_BLOCK, **asdict(sizes), start=kind.start)
    cache = workspace.features([*sizes.hidden_states, runner.num_layers])
    torch.manual_seed(how.seed)
    if head is None:
        head = shapes.new_block(runner, sizes, shapes.mask_token(workspace.training_rows(), runner))
    if how.compiled:
        for module in head.modules():
            if isinstance(module, Qwen3MLP):
                module.compile(dynamic=False)
    loss = BlockLoss(head, cache, runner.num_layers, seed=how.seed, dtype=workspace.dtype(NAME_OF_BLOCK), entropy=how.entropy)

    def measure(final: bool) -> tuple[dict[str, Any], dict[str, list[float]]]:
        found = loss.measure()
        return by_draft("held", found["greedy"]), found

    found = run_job(workspace, NAME_OF_BLOCK, head, cache, loss, how, measure)
    if found is None:
        return False
    block_formats.export(head.to(checkpoint_dtype(runner.model)), out, runner.num_layers, found["sampled"])
    finish(workspace, NAME_OF_BLOCK, out, {"acceptance_by_position": found})
    return True


def check_steps(runner: ModelRunner, layers: Sequence[int], steps: int, seq_len: int) -> None:
    """Raise ``OutriderError`` for invalid hidden states or steps, and for rows too short for that many steps, or too long."""
    if steps < 1:
        raise OutriderError(f"invalid number of steps {steps}: expected at least 1")
    if seq_len < steps + 2:
        raise OutriderError(f"rows of {seq_len} tokens are too short for {steps} steps")
    check_captured(runner, layers, seq_len)


def _train_rollout(
    workspace: Workspace, name: str, head: RolloutHead, cache: FeatureCache, how: HeadPlan, steps: int
) -> dict[str, Any] | None:
    """Train a head over this many depths and convert it to its target's dtype. Return what was measured.

    None if interrupted.
    """
    if how.compiled:
        for layer in head.layers:
            layer.compile(dynamic=False)
    last = workspace.runner.num_layers
    loss = RolloutLoss(head, cache, last, steps, seed=how.seed, dtype=workspace.dtype(name), entropy=how.entropy)

    def measure(final: bool) -> tuple[dict[str, float], dict[str, float]]:
        found = loss.evaluate()
        return found, found

    found = run_job(workspace, name, head, cache, loss, how, measure)
    if found is None:
        return None
    ranks = loss.sibling_acceptance()
    head.to(checkpoint_dtype(workspace.model))
    return {"held_out": found, "acceptance_by_rank": ranks}


def run_job(
    workspace: Workspace, name: str, model: nn.Module, rows: RowOrder, loss: Loss, how: HeadPlan, measure: Measure
) -> Any:
    """Train ``model`` in this part of the work folder, resuming if interrupted.

    Return what the final measurement found; None if interrupted.
    """
    last: list[Any] = []

    def evaluate(final: bool) -> dict[str, Any]:
        values, found = measure(final)
        last[:] = [found]
        return values

    finished = Trainer(name, model, rows, loss, how.plan(rows), workspace.work / name, evaluate).run()
    model.eval().requires_grad_(False)
    if not finished:
        return None
    return last[0] if last else measure(True)[1]  # a resumed run may already have ended


def checkpoint_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the target's checkpoint."""
    named = getattr(model.config, "dtype", None)
    return named if isinstance(named, torch.dtype) and named.is_floating_point else torch.float32


def finish(workspace: Workspace, name: str, out: Path, found: dict[str, Any]) -> None:
    """Write the curve and the measurements to the output folder."""
    plots.draw(name, workspace.work / name, out)
    (out / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
