"""Whole training runs of heads: text to rows, rows to features, features to a head, the head to a checkpoint to serve.

Every stage goes on where it was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from outrider.heads import eagle_formats
from outrider.heads import medusa as medusa_heads
from outrider.heads.eagle import default_hidden_states
from outrider.runner import ModelRunner
from outrider.train import plots, shapes
from outrider.train.capture import CachedRows, FeatureCache, capture, check_captured
from outrider.train.claims import claim, digest, fingerprint
from outrider.train.eagle import EagleLoss
from outrider.train.medusa import MedusaLoss, measure_accuracies
from outrider.train.plan import SEED, Plan
from outrider.train.precision import autocast_dtype
from outrider.train.progress import Progress
from outrider.train.soft_entropy import SoftEntropy, compiled, soft_entropy
from outrider.train.text import regenerate, token_rows
from outrider.train.trainer import Batches, Job, Loss, Trainer
from outrider.types import OutriderError, first_line

Evaluate = Callable[[bool], dict[str, Any]]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Source:
    """Where the training text comes from."""

    paths: tuple[Path, ...] = ()
    seq_len: int = 256
    max_tokens: int = 1_000_000  # of text that is read, and so of features that are kept on disk
    regenerate: bool = False  # the target writes all but the first prompt_len tokens of each row itself
    prompt_len: int = 64
    temperature: float = 0.0  # of what it writes


class Rows(Protocol):
    """How much there is to train on."""

    @property
    def num_training(self) -> int: ...

    @property
    def seq_len(self) -> int: ...


@dataclass(frozen=True)
class HeadPlan:
    """How long and how hard a head, or a model, is trained."""

    minutes: float | None = None
    epochs: float = 4.0
    batch_tokens: int = 4096
    muon_lr: float = 0.01
    adam_lr: float = 0.001
    seed: int = SEED
    compiled: bool = False  # losses, and a model's layers: a minute that pays on longer runs

    def plan(self, rows: Rows) -> Plan:
        """The loop's plan. Batches are of whole rows."""
        tokens = int(self.epochs * rows.num_training * rows.seq_len)
        if tokens < 1 or self.batch_tokens < 1:
            raise OutriderError("epochs and batch tokens must be above 0")
        lengths = ((1.0, rows.seq_len),)
        rates = {"muon_lr": self.muon_lr, "adam_lr": self.adam_lr, "warmup": 0.02}
        return Plan(tokens, self.batch_tokens, lengths, minutes=self.minutes, seed=self.seed, **rates)  # type: ignore[arg-type]


@dataclass
class Bench:
    """One target on the bench: what all its heads' runs share."""

    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase | None
    work: Path  # rows, features, checkpoints
    source: Source = field(default_factory=Source)
    rows: Tensor | None = None  # [R, S] instead of a source

    @property
    def seq_len(self) -> int:
        """Tokens of a row, known before any text is read."""
        return self.source.seq_len if self.rows is None else self.rows.shape[1]

    def claim(self, name: str, **options: Any) -> None:
        """Says what the work folder's part of this name is about. Raises ``OutriderError`` where it holds another run."""
        text = digest(self.training_rows())
        claim(self.work / name / "run.json", {"target": fingerprint(self.runner), "text": text, **options})

    def features(self, layers: Sequence[int]) -> FeatureCache:
        """The cache of these hidden states, made or completed."""
        rows = self.training_rows()
        with Progress("features") as bar:
            return capture(self.runner, rows, sorted(set(layers)), self.work / "features", bar.update)

    def training_rows(self) -> Tensor:
        """Rows of tokens [R, S], as they are or written anew by the target."""
        if self.rows is None:
            if self.tokenizer is None:
                raise OutriderError("text needs a tokenizer, which this target comes without")
            source = self.source
            self.rows = token_rows(source.paths, self.tokenizer, source.seq_len, source.max_tokens)
            if source.regenerate:
                with Progress("text") as bar:
                    self.rows = regenerate(
                        self.runner, self.rows, source.prompt_len, source.temperature, SEED, self.work / "text", bar.update
                    )
        return self.rows


class Latest(Generic[Found]):
    """What was measured last. A run ends with it: that is not done twice, nor left out where a run had ended before."""

    def __init__(self, measure: Callable[[], Found]) -> None:
        self._measure = measure
        self._found: list[Found] = []

    def again(self) -> Found:
        """Measures."""
        self._found = [self._measure()]
        return self._found[0]

    def known(self) -> Found:
        """The last result; measured now where there is none."""
        return self._found[0] if self._found else self.again()


def train_medusa(bench: Bench, out: Path, how: HeadPlan, num_heads: int = 4, num_layers: int = 1, distil: bool = True) -> bool:
    """Trains heads and writes them in vLLM's format with their measured accuracies. False if interrupted.

    What cannot be trained is an ``OutriderError`` before any text is written or read.
    """
    runner = bench.runner
    if bench.seq_len < num_heads + 3:
        raise OutriderError(f"rows of {bench.seq_len} tokens are too short for {num_heads} heads")
    check_captured(runner, [runner.num_layers], bench.seq_len)
    bench.claim("medusa", heads=num_heads, layers=num_layers, distil=distil)
    cache = bench.features([runner.num_layers])
    torch.manual_seed(how.seed)
    heads = shapes.new_medusa(runner, num_heads, num_layers).to(runner.device)
    output = shapes.output_layer(runner)
    loss = MedusaLoss(
        heads, output, cache, runner.num_layers, distil=distil, dtype=autocast_dtype(runner.device), entropy=entropy_of(how)
    )

    held_out = Latest(lambda: measure_accuracies(heads, output, cache, runner.num_layers))

    def measure(final: bool) -> dict[str, Any]:
        return {f"held_{head + 1}": row[0] for head, row in enumerate(held_out.again())}

    if not run_job(bench, "medusa", heads, CachedRows(cache), loss, how.plan(cache), measure):
        return False
    accuracies = held_out.known()
    medusa_heads.export(heads.to(checkpoint_dtype(runner)), out, runner.vocab_size, accuracies)
    finish(bench, "medusa", out, {"accuracies": accuracies})
    return True


@dataclass(frozen=True)
class EagleRun:
    """What kind of EAGLE head is trained."""

    generation: int = 3
    steps: int | None = None  # of depth that are trained at once; None: 5 for EAGLE-3, 1 for EAGLE-1
    layers: tuple[int, ...] | None = None  # hidden states of EAGLE-3; None: low, middle and high
    draft_vocab: int | None = None  # EAGLE-3: the most frequent so many tokens; None: all
    formats: tuple[str, ...] = ("native",)

    def settled(self, runner: ModelRunner, seq_len: int) -> EagleRun:
        """With what was left open decided for a target and rows of this length.

        Raises ``OutriderError`` for what cannot be trained: no such generation or layers, rows too short, a format without it.
        """
        if self.generation not in (1, 3):
            raise OutriderError(f"there is no EAGLE-{self.generation} head to train: 1 (EAGLE-1 and EAGLE-2) or 3")
        if self.generation == 1 and "speculators" in self.formats:
            raise OutriderError("an EAGLE-1 head is written in its native format only")
        if self.generation == 1:
            made = replace(self, steps=self.steps or 1, layers=(runner.num_layers,), draft_vocab=None)
        else:
            made = replace(self, steps=self.steps or 5, layers=self.layers or default_hidden_states(runner.num_layers))
        assert made.layers is not None and made.steps is not None
        if seq_len < made.steps + 2:
            raise OutriderError(f"rows of {seq_len} tokens are too short for {made.steps} steps")
        if made.draft_vocab is not None and not 1 <= made.draft_vocab <= runner.vocab_size:
            raise OutriderError(f"a draft vocabulary of {made.draft_vocab} tokens does not fit one of {runner.vocab_size}")
        check_captured(runner, made.layers, seq_len)
        return made


def train_eagle(bench: Bench, out: Path, how: HeadPlan, kind: EagleRun = EagleRun()) -> bool:
    """Trains a head and writes it in the formats asked for, the first into ``out`` itself. False if interrupted.

    Raises ``OutriderError`` as ``EagleRun.settled`` does, before any text is written or read.
    """
    runner = bench.runner
    kind = kind.settled(runner, bench.seq_len)
    assert kind.layers is not None and kind.steps is not None
    name = f"eagle{kind.generation}"
    bench.claim(name, layers=kind.layers, steps=kind.steps, **{"draft vocabulary": kind.draft_vocab})
    draft_ids = None
    if kind.draft_vocab is not None:
        draft_ids = shapes.frequent_tokens(bench.training_rows(), runner.vocab_size, kind.draft_vocab)
    cache = bench.features([*kind.layers, runner.num_layers])
    torch.manual_seed(how.seed)
    head = shapes.new_eagle(runner, kind.generation, kind.layers, draft_ids).to(runner.device)
    if how.compiled:
        for layer in head.layers:
            layer.compile(dynamic=False)
    loss = EagleLoss(
        head,
        cache,
        runner.num_layers,
        kind.steps,
        seed=how.seed,
        dtype=autocast_dtype(runner.device),
        entropy=entropy_of(how),
    )
    held_out = Latest(loss.evaluate)
    if not run_job(bench, name, head, CachedRows(cache), loss, how.plan(cache), lambda final: held_out.again()):
        return False
    found = {"held_out": held_out.known(), "acceptance_by_rank": loss.sibling_acceptance()}
    head = head.to(checkpoint_dtype(runner))
    for index, form in enumerate(kind.formats):
        folder = out if index == 0 else out.with_name(f"{out.name}-{form}")
        eagle_formats.export(head, folder, form, runner.name, found["acceptance_by_rank"])  # type: ignore[arg-type]
    finish(bench, name, out, found)
    return True


def entropy_of(how: HeadPlan) -> SoftEntropy:
    """The loss of logits as wide as the vocabulary: most of what a step does beside matrix products."""
    return compiled() if how.compiled else soft_entropy


def run_job(bench: Bench, name: str, model: nn.Module, batches: Batches, loss: Loss, plan: Plan, evaluate: Evaluate) -> bool:
    """Trains ``model`` in the work folder's part of this name, from where it was interrupted. False if interrupted."""
    plan = replace(plan, eval_every_s=120.0, save_every_s=30.0)
    folder = bench.work / name
    try:
        trainer = Trainer(Job(name, model, batches, loss, plan, folder, evaluate))
    except Exception as error:  # a file that is cut short, or of something else, fails in many ways
        said = f"the checkpoint in {folder} cannot be gone on from, delete it to begin anew"
        raise OutriderError(f"{said}: {first_line(error)}") from error
    finished = trainer.run()
    model.eval().requires_grad_(False)
    return finished


def checkpoint_dtype(runner: ModelRunner) -> torch.dtype:
    """That of the target's checkpoint."""
    named = getattr(runner.model.config, "dtype", None)
    return named if isinstance(named, torch.dtype) and named.is_floating_point else torch.float32


def finish(bench: Bench, name: str, out: Path, found: dict[str, Any]) -> None:
    """The curve and what was measured, beside what was trained."""
    curve = json.loads((bench.work / name / "curve.json").read_text())
    plots.draw(name, curve, out)
    (out / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
