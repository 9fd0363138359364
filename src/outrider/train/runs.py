"""Training runs of heads: text to rows, rows to features, features to a head, head to a checkpoint.

Every stage resumes after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.files import write_whole
from outrider.heads import block_formats, eagle_formats, mtp_formats
from outrider.heads import medusa as medusa_heads
from outrider.heads.block import BlockHead
from outrider.heads.eagle import EagleHead, default_hidden_states
from outrider.heads.feature_head import FeatureHead
from outrider.memory import require_disk
from outrider.progress import shown
from outrider.runner import ModelRunner, RunnerConfig, loading
from outrider.runner.linear import structural_copy
from outrider.train import plots, shapes
from outrider.train.block_loss import BlockLoss
from outrider.train.capture import FeatureCache, capture, check_captured, missing_bytes
from outrider.train.claims import advise_to_resume, check_or_record_identity, digest, exclusive, fingerprint
from outrider.train.head_loss import HeadLoss
from outrider.train.medusa import MedusaLoss
from outrider.train.options import MEASURED, NEW_RATES, BlockRun, EagleRun, HeadPlan, MedusaRun, MtpRun, Source
from outrider.train.plan import SEED, TrainingPlan
from outrider.train.precision import arithmetic_dtype
from outrider.train.rollout_loss import RolloutLoss
from outrider.train.soft_entropy import SoftEntropy, compiled, soft_entropy
from outrider.train.text import RowOrder, check_row_length, held_out, regenerate, token_rows
from outrider.train.trainer import Loss, Trainer, checkpoint_room
from outrider.types import OutriderError

Measure = Callable[[bool], tuple[dict[str, Any], Any]]  # whether training has ended -> values for the curve, all measurements
PASS_LOGITS = 1 << 26  # 268 MB in float32
Head = TypeVar("Head", bound=nn.Module)
LossOf = TypeVar("LossOf", bound=HeadLoss)
NAME_OF_MTP, NAME_OF_BLOCK = "mtp", "dflash"  # subfolders of the work folder


def plan_of(plan: HeadPlan, rows: RowOrder) -> TrainingPlan:
    """Return the plan of the training loop. Batches consist of whole rows."""
    return TrainingPlan(
        max(1, int(plan.epochs * rows.num_training * rows.seq_len)),
        plan.batch_tokens,
        ((1.0, rows.seq_len),),
        plan.minutes,
        muon_lr=plan.muon_lr or NEW_RATES["muon_lr"],
        adam_lr=plan.adam_lr or NEW_RATES["adam_lr"],
        warmup=0.02,
        eval_every_s=120.0,
        save_every_s=30.0,
        seed=plan.seed,
    )


def pass_tokens(target: PreTrainedModel) -> int:
    """Return the tokens per pass that bound the memory of a target's logits, of which a pass holds several copies."""
    logits = PASS_LOGITS if target.device.type == "cpu" else 8 * PASS_LOGITS
    return max(1, logits // int(loading.text_config(target).vocab_size))


def entropy_of(plan: HeadPlan) -> SoftEntropy:
    """Return the vocabulary-wide loss, compiled if requested: most of a step's work besides matrix products."""
    return compiled() if plan.compile else soft_entropy


@dataclass
class Workspace:
    """What the training runs of one target share: the target, its text and features, and the work folder."""

    target: ModelRunner | PreTrainedModel  # heads read a runner's features; a model is trained, or teaches a draft
    tokenizer: PreTrainedTokenizerBase | None
    work: Path  # rows, features, checkpoints
    source: Source = field(default_factory=Source)
    rows: Tensor | None = None  # [R, S] instead of a source
    _text: Tensor | None = field(default=None, init=False, repr=False)

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
        return ModelRunner.load(in_checkpoint_dtype(structural_copy(self.target)), RunnerConfig(max_batch=16))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the products of training."""
        return arithmetic_dtype(self.model.device)

    def features(self, layers: Sequence[int]) -> FeatureCache:
        """Return the cache of these hidden states; create or complete it if necessary."""
        rows, folder = self.training_rows(), self.work / "features"
        with advise_to_resume(), exclusive(folder), shown("features") as report:
            return capture(self.runner, rows, sorted(set(layers)), folder, report)

    def claim(self, name: str, model: nn.Module, layers: Sequence[int], about: Mapping[str, Any]) -> None:
        """Record what a part of the work folder is ``about``. ``layers``: hidden states that ``model`` reads.

        Raises ``OutriderError`` if it belongs to another run, or if the disk lacks room for the text's hidden states and the
        checkpoints of ``model``, which may be without weights. The disk is checked first: generating text may take hours, and
        a refused run records nothing.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        rows = self.text_rows() if self.rows is None else self.rows
        width = int(loading.text_config(self.model).hidden_size)
        needed = missing_bytes(self.work / "features", rows, len(set(layers)), width)
        needed += checkpoint_room(model, self.work / name / "checkpoint.pt")
        advice = "use less text (--max-tokens), a smaller model or another folder (--work)"
        require_disk(self.work, needed, "training takes", advice)
        text = digest(self.training_rows())
        check_or_record_identity(self.work / name / "run.json", {"target": fingerprint(self.model), "text": text, **about})

    def text_rows(self) -> Tensor:
        """Return rows of tokens [R, S] of the text, before regeneration."""
        if self._text is None:
            if self.tokenizer is None:
                raise OutriderError("the target has no tokenizer: text cannot be encoded")
            source = self.source
            self._text = token_rows(source.paths, self.tokenizer, source.seq_len, source.max_tokens)
        return self._text

    def training_rows(self) -> Tensor:
        """Return rows of tokens [R, S], as given or regenerated by the target."""
        if self.rows is None:
            rows, source = self.text_rows(), self.source
            if source.regenerate:
                folder = self.work / "text"
                with advise_to_resume(), exclusive(folder), shown("text") as report:
                    rows = regenerate(self.runner, rows, source.prompt_len, source.temperature, SEED, folder, report)
            self.rows = rows
        return self.rows


def train_medusa(workspace: Workspace, out: Path, plan: HeadPlan, options: MedusaRun) -> None:
    """Train heads and write them in vLLM's format with their measured accuracies.

    Raises ``OutriderError`` for invalid settings before any text is generated or read.
    """
    runner = workspace.runner
    check_captured(runner, [runner.num_layers], workspace.seq_len)
    vocab = reduced_vocab(options.draft_vocab, runner)
    heads: medusa_heads.MedusaHeads | None = None
    if options.start is not None:
        heads = medusa_heads.load(options.start, runner)[0]
        options = replace(options, heads=heads.shape.num_heads, layers=heads.shape.num_layers)
        heads = shapes.continued(heads, runner)
    check_row_length(workspace.seq_len, options.heads + 3, f"{options.heads} heads")
    shape = shapes.medusa_shape(runner, options.heads, options.layers, vocab)
    sized = heads or shapes.check_new(medusa_heads.MedusaHeads, shape, runner)
    about = {"heads": options.heads, "layers": options.layers, "draft vocabulary": vocab, "start": options.start}

    def make() -> medusa_heads.MedusaHeads:
        return heads or shapes.new_medusa(runner, options.heads, options.layers, draft_ids_of(workspace, vocab))

    loss_of = partial(MedusaLoss, output=shapes.output_layer(runner))
    heads, _, accuracies = _train(workspace, plan, "medusa", about, sized, make, loss_of)
    finish(workspace, "medusa", out, {"accuracies": accuracies})
    medusa_heads.export(heads.to(checkpoint_dtype(runner.model)), out, runner.vocab_size, accuracies)


def eagle_sizes(options: EagleRun, runner: ModelRunner, seq_len: int) -> tuple[tuple[int, ...], int, int | None]:
    """Return hidden states, steps and draft vocabulary for a target and this row length.

    Raises ``OutriderError`` for invalid layers, or rows that are too short.
    """
    steps = (1 if options.generation == 1 else 5) if options.steps is None else options.steps
    vocab = None if options.generation == 1 else options.draft_vocab
    layers: tuple[int, ...] = (runner.num_layers,)
    if options.generation == 3:
        layers = options.hidden_states or default_hidden_states(runner.num_layers)
    check_steps(runner, layers, steps, seq_len)
    return layers, steps, reduced_vocab(vocab, runner)


def reduced_vocab(size: int | None, runner: ModelRunner) -> int | None:
    """Return the size of a reduced vocabulary; None for all tokens. Raises ``OutriderError`` if the target has fewer."""
    if size is not None and size > runner.vocab_size:
        raise OutriderError(f"invalid draft vocabulary of {size} tokens: the target has {runner.vocab_size}")
    return None if size == runner.vocab_size else size  # a reduced vocabulary of all tokens has no format


def draft_ids_of(workspace: Workspace, size: int | None) -> Tensor | None:
    """Return the most frequent tokens of the training rows, ascending; None for all tokens."""
    if size is None:
        return None
    rows = workspace.training_rows()
    return shapes.frequent_tokens(rows[: -held_out(len(rows))], workspace.runner.vocab_size, size)


def train_eagle(workspace: Workspace, out: Path, plan: HeadPlan, options: EagleRun) -> None:
    """Train a head and write it in the requested formats, the first to ``out`` itself.

    Raises ``OutriderError`` like ``eagle_sizes``, ``eagle_formats.load`` and ``check_exportable``, before any text is generated
    or read.
    """
    runner, start = workspace.runner, None
    if options.start is not None:
        start = eagle_formats.load(options.start, runner, runner.model)
        eagle_formats.check_exportable(start.shape)
        start, generation = shapes.continued(start, runner), start.shape.generation
        options = replace(options, generation=generation, hidden_states=start.hidden_states if generation == 3 else None)
    layers, steps, vocab = eagle_sizes(options, runner, workspace.seq_len)
    sized = start or shapes.check_new(EagleHead, shapes.eagle_shape(runner, options.generation, layers, vocab), runner)
    name = f"eagle{options.generation}"
    about = {"layers": layers, "steps": steps, "draft vocabulary": vocab, "start": options.start}

    def make() -> EagleHead:
        return start or shapes.new_eagle(runner, options.generation, layers, draft_ids_of(workspace, vocab))

    head, loss, found = _train(workspace, plan, name, about, sized, make, partial(RolloutLoss, steps=steps))
    measured = _measured(loss, found)
    head.to(checkpoint_dtype(runner.model))
    for folder, form in zip(options.folders(out), options.format, strict=True):
        finish(workspace, name, folder, measured)
        eagle_formats.export(head, folder, form, runner.name, measured["acceptance_by_rank"])


def train_mtp(workspace: Workspace, out: Path, plan: HeadPlan, options: MtpRun) -> None:
    """Train an MTP head, new or continued, and write it to ``out``.

    Raises ``OutriderError`` like ``check_steps`` and ``mtp_formats.load``, before any text is generated or read.
    """
    runner = workspace.runner
    check_steps(runner, [runner.num_layers], options.steps, workspace.seq_len)
    torch.manual_seed(plan.seed)
    if options.start is None:
        start = shapes.new_mtp(runner)
    else:
        start = shapes.continued(mtp_formats.load(options.start, runner), runner)
    about = {"steps": options.steps, "start": options.start}
    loss_of = partial(RolloutLoss, steps=options.steps)
    head, loss, found = _train(workspace, plan, NAME_OF_MTP, about, start, lambda: start, loss_of)
    measured = _measured(loss, found)
    finish(workspace, NAME_OF_MTP, out, measured)
    mtp_formats.export(head.to(checkpoint_dtype(runner.model)), out, options.format, measured["acceptance_by_rank"])


def block_sizes(options: BlockRun, runner: ModelRunner, seq_len: int) -> shapes.BlockSizes:
    """Return the sizes for a target and this row length.

    Raises ``OutriderError`` for invalid hidden states, or rows that are too short.
    """
    check_row_length(seq_len, options.block_size + 2, f"blocks of {options.block_size}")
    layers = options.layers or max(2, min(5, runner.num_layers // 7))
    states = options.hidden_states or tuple(sorted(set(block_formats.default_hidden_states(runner.num_layers, layers))))
    check_captured(runner, states, seq_len)
    return shapes.BlockSizes(states, layers, options.block_size, options.markov_rank, options.selector_rank)


def train_block(workspace: Workspace, out: Path, plan: HeadPlan, options: BlockRun) -> None:
    """Train a block drafter and write it to ``out`` with its acceptance by position.

    Raises ``OutriderError`` like ``block_sizes``, ``block_formats.load`` and ``check_exportable``, before any text is generated
    or read.
    """
    runner, start = workspace.runner, None
    if options.start is not None:
        start = block_formats.load(options.start, runner, runner.model)
        block_formats.check_exportable(start.shape)
        start, shape = shapes.continued(start, runner), start.shape
        options = BlockRun(
            shape.block_size, len(start.layers), shape.hidden_states, shape.markov_rank, shape.selector_rank, options.start
        )
    sizes = block_sizes(options, runner, workspace.seq_len)
    sized = start or shapes.check_new(BlockHead, shapes.block_shape(runner, sizes, 0), runner)

    def make() -> BlockHead:
        return start or shapes.new_block(runner, sizes, shapes.mask_token(workspace.training_rows(), runner))

    about = asdict(sizes) | {"start": options.start}
    head, _, found = _train(workspace, plan, NAME_OF_BLOCK, about, sized, make, BlockLoss)
    finish(workspace, NAME_OF_BLOCK, out, {"acceptance_by_position": found})
    block_formats.export(head.to(checkpoint_dtype(runner.model)), out, runner.num_layers, found["sampled"]["by_depth"])


def check_steps(runner: ModelRunner, layers: Sequence[int], steps: int, seq_len: int) -> None:
    """Raise ``OutriderError`` for invalid hidden states, and for rows too short for that many steps, or too long."""
    check_row_length(seq_len, steps + 2, f"{steps} steps")
    check_captured(runner, layers, seq_len)


def _train(
    workspace: Workspace,
    plan: HeadPlan,
    name: str,
    about: Mapping[str, Any],
    sized: nn.Module,
    make: Callable[[], Head],
    loss_of: Callable[..., LossOf],
) -> tuple[Head, LossOf, Any]:
    """Train a head in this part of the work folder. Return it, its loss, and what the final measurement found.

    ``sized``: the head that ``make`` returns, or one of its shape without weights; the text is read in between.
    """
    last = workspace.runner.num_layers
    layers = [*getattr(sized, "hidden_states", ()), last]
    workspace.claim(name, sized, layers, about)
    cache = workspace.features(layers)
    torch.manual_seed(plan.seed)
    head = make().to(workspace.runner.device)
    layers_to_compile: Any = head.layers if plan.compile and isinstance(head, FeatureHead) else ()
    for layer in layers_to_compile:
        (layer.mlp if isinstance(head, BlockHead) else layer).compile(dynamic=False)
    loss = loss_of(head, cache, last, seed=plan.seed, dtype=workspace.dtype, entropy=entropy_of(plan))
    return head, loss, run_job(workspace, name, head, cache, loss, plan, lambda _: loss.measure())


def _measured(loss: RolloutLoss, found: Any) -> dict[str, Any]:
    """Return the measurements of a head that drafts token by token."""
    return {"held_out": found, "acceptance_by_rank": loss.sibling_acceptance()}


def run_job(
    workspace: Workspace, name: str, model: nn.Module, rows: RowOrder, loss: Loss, plan: HeadPlan, measure: Measure
) -> Any:
    """Train ``model`` in this part of the work folder, resuming if interrupted. Return what the final measurement found."""
    found: Any = None

    def evaluate(final: bool) -> dict[str, Any]:
        nonlocal found
        values, found = measure(final)
        return values

    loop_plan = replace(plan_of(plan, rows), pass_tokens=pass_tokens(workspace.model))
    Trainer(name, model, rows, loss, loop_plan, workspace.work / name, evaluate).run()
    model.eval().requires_grad_(False)
    return found


def checkpoint_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the target's checkpoint."""
    named = getattr(model.config, "dtype", None)
    return named if isinstance(named, torch.dtype) and named.is_floating_point else torch.float32


def in_checkpoint_dtype(model: PreTrainedModel) -> PreTrainedModel:
    """Convert the weights of a model in place to its checkpoint's dtype; buffers, such as RoPE frequencies, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.to(checkpoint_dtype(model))
    return model


def finish(workspace: Workspace, name: str, out: Path, found: dict[str, Any]) -> None:
    """Write the curve and the measurements to the output folder, before the model, so that they mark it as trained here."""
    out.mkdir(parents=True, exist_ok=True)
    plots.draw(name, workspace.work / name, out)
    write_whole(out / MEASURED, json.dumps(found, indent=1) + "\n")
