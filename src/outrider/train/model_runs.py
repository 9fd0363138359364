"""Training runs of models: early-exit targets and distilled drafts.

Rows, checkpoints and curves are stored as for heads (``runs``); the result is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from outrider.heads.checkpoint import named_errors
from outrider.runner import ModelRunner, gguf, loading
from outrider.runner.checkpoints.formats import quantization_of
from outrider.runner.loading import decoder_layers, text_config
from outrider.runner.parallel_draft import mask_token_of
from outrider.runner.tokenizers import check_same_vocabulary
from outrider.train.acceptance import acceptance, summary
from outrider.train.claims import once
from outrider.train.decoder import Decoder
from outrider.train.distillation import Distillation, DistillationLoss
from outrider.train.draft_model import DraftShape, new_draft
from outrider.train.layer_skip import EarlyExitLoss, LayerSkip
from outrider.train.parallel import Masks, Parallel
from outrider.train.runs import Bench, HeadPlan, Latest, checkpoint_dtype, finish, run_job
from outrider.train.text import TextRows, check_continuation
from outrider.types import OutriderError, first_line

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
ROWS = 2  # held-out rows per pass: logits of a large vocabulary are wide


def train_early_exit(bench: Bench, out: Path, how: HeadPlan, skip: LayerSkip) -> bool:
    """Continue training the target for early exit and write it. Return False if interrupted.

    Raises ``OutriderError`` for a target with fewer than three layers, or one whose layers do not run one by one.
    """
    runner = bench.runner
    if runner.num_layers < 3:
        raise OutriderError(f"early-exit training needs a target with at least three layers; this one has {runner.num_layers}")
    _check_rows(bench.seq_len, runner.name, runner.max_len)
    model = trainable(runner)
    decoder = Decoder(model)
    decoder.check()
    bench.claim("early-exit", **asdict(skip))
    rows = TextRows(bench.training_rows())

    held_out = Latest(lambda: measure_exits(decoder, rows.held_out))

    def measure(final: bool) -> dict[str, Any]:
        exits = (held_out.again() if final else measure_exits(decoder, rows.held_out[:ROWS]))["exits"]
        return {f"held_exit_{depth}": found["greedy"]["acceptance"] for depth, found in exits.items()}

    before = once(bench.work / "early-exit" / "before.json", lambda: measure_exits(decoder, rows.held_out))
    for layer in decoder.layers if how.compiled else ():
        layer.compile()  # for any number of rows, because dropout skips some
    loss = EarlyExitLoss(decoder, skip, bench.dtype("early-exit"), how.seed)
    if not run_job(bench, "early-exit", model, rows, loss, how.plan(rows), measure):
        return False
    found = {"before": before, "after": held_out.known()}
    _save(bench, model, out)
    finish(bench, "early-exit", out, found)
    return True


@torch.no_grad()
def measure_exits(decoder: Decoder, rows: Tensor) -> dict[str, Any]:
    """Return the model's loss on rows [R, S], and the acceptance of each early exit's drafts, by layers run."""
    pairs: dict[int, list[tuple[Tensor, Tensor]]] = {depth: [] for depth in range(1, len(decoder.layers))}
    losses = []
    decoder.model.eval()
    for ids in rows.to(decoder.model.device).split(ROWS):
        states = decoder.hidden_states(ids[:, :-1])
        end = decoder.logits(states[-1])
        losses.append(float(torch.nn.functional.cross_entropy(end.flatten(0, 1).float(), ids[:, 1:].flatten())))
        for depth, found in pairs.items():
            found.append(acceptance(end, decoder.logits(states[depth - 1])))
    return {"loss": round(sum(losses) / len(losses), 4), "exits": {str(depth): summary(each) for depth, each in pairs.items()}}


@dataclass(frozen=True)
class DraftRun:
    """Draft to train, and its loss."""

    shape: DraftShape = field(default_factory=DraftShape)
    start: str | None = None  # folder or hub id of a draft to continue, instead of a shape
    teaching: Distillation = field(default_factory=Distillation)
    parallel: Parallel | None = None  # train it to draft in parallel, with mask tokens
    name: str = "draft"  # subfolder of the work folder


def train_draft(bench: Bench, out: Path, how: HeadPlan, kind: DraftRun = DraftRun()) -> bool:
    """Train a small model on the target's logits and write it. Return False if interrupted.

    Raises ``OutriderError`` for invalid sizes and for a draft with another vocabulary.
    """
    runner, teaching = bench.runner, kind.teaching
    if teaching.on_policy:
        check_continuation(teaching.prompt_len, bench.seq_len)
    _check_rows(bench.seq_len, runner.name, runner.max_len)
    target = trainable(runner).requires_grad_(False).eval()
    torch.manual_seed(how.seed)
    if kind.start is None:
        draft, origin = new_draft(target, kind.shape)
    else:
        draft, origin = _existing(kind.start, bench, kind.parallel is not None), f"continuing {kind.start}"
    _check_rows(bench.seq_len, "the draft", getattr(text_config(draft), "max_position_embeddings", None))
    masks = None if kind.parallel is None else Masks.prepare(draft, bench.tokenizer, kind.parallel, bench.seq_len)
    origin += "" if masks is None else f"; mask token {masks.token}"
    share = draft.num_parameters() / target.num_parameters()
    logger.info("draft with %.1fM parameters, %.0f%% of the target's; %s", draft.num_parameters() / 1e6, 100 * share, origin)
    shape, parallel = asdict(kind.shape), kind.parallel and asdict(kind.parallel)
    bench.claim(kind.name, shape=shape, start=kind.start, teaching=asdict(teaching), parallel=parallel)
    rows = TextRows(bench.training_rows())
    on_text = partial(measure_draft, draft, target) if masks is None else partial(masks.measure, target)
    held_out = Latest(lambda: on_text(rows.held_out))

    def measure(final: bool) -> dict[str, Any]:
        found = held_out.again() if final else on_text(rows.held_out[: 4 * ROWS])
        return {f"held_{name}": found[name]["acceptance"] for name in ("greedy", "sampled")}

    before = once(bench.work / kind.name / "before.json", lambda: on_text(rows.held_out))
    loss = DistillationLoss(draft, target, teaching, bench.dtype(kind.name), how.seed, masks)
    if how.compiled:
        for layer in (*decoder_layers(draft), *decoder_layers(target)):
            layer.compile(dynamic=False)
        loss.divergence = torch.compile(loss.divergence, dynamic=False)
    if not run_job(bench, kind.name, draft, rows, loss, how.plan(rows), measure):
        return False
    found = {"parameters": draft.num_parameters(), "before": before, "after": held_out.known()}
    _save(bench, draft, out)
    finish(bench, kind.name, out, found)
    return True


@torch.no_grad()
def measure_draft(draft: PreTrainedModel, target: PreTrainedModel, rows: Tensor) -> dict[str, Any]:
    """Return the acceptance of the draft on rows [R, S]."""
    was_training = draft.training
    draft.eval()

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for ids in rows.to(target.device).split(ROWS):
            yield acceptance(target(input_ids=ids, use_cache=False).logits, draft(input_ids=ids, use_cache=False).logits)

    with torch.compiler.set_stance("force_eager"):  # shapes differ from training's
        found = summary(pairs())
    draft.train(was_training)
    return found


def trainable(runner: ModelRunner, source: str | None = None) -> PreTrainedModel:
    """Load the runner's model, or another one, in float32 on the runner's device.

    Raises ``OutriderError`` for quantised, broken or incomplete weights.
    """
    name = source or runner.name
    check_trainable(name)
    return loading.load_model(name, torch.float32, runner.device)


def check_trainable(name: str) -> None:
    """Raise ``OutriderError`` for quantised weights, from the config alone."""
    if gguf.find(name) is not None or quantization_of(loading.load_config(name)) is not None:
        raise OutriderError(f"{name} is quantised: training needs the checkpoint in 16 or 32 bits")


def _check_rows(seq_len: int, name: str, max_len: int | None) -> None:
    """Raise ``OutriderError`` if rows are longer than a model's context."""
    if max_len is not None and seq_len > max_len:
        raise OutriderError(f"rows of {seq_len} tokens exceed the context of {name}, {max_len} tokens: give a lower --seq-len")


def _existing(source: str, bench: Bench, is_parallel: bool) -> PreTrainedModel:
    """Load an existing draft. Raises ``OutriderError`` if its vocabulary differs from the target's.

    Also raises it for a parallel draft without --parallel, because training would remove the ability.
    """
    if bench.tokenizer is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError) as error:
            raise OutriderError(f"cannot load a tokenizer from {source}: {first_line(error)}") from error
        check_same_vocabulary(bench.tokenizer, tokenizer)
    draft = trainable(bench.runner, source)
    token = mask_token_of(draft.config)
    if token is not None and not is_parallel:
        raise OutriderError(f"{source} drafts in parallel, with mask token {token}: give --parallel, such as --parallel 8")
    return draft


def _save(bench: Bench, model: Any, out: Path) -> None:
    """Write the model in the target's dtype, with unchanged files of the target's tokenizer, if any."""
    model.generation_config = bench.runner.model.generation_config
    with named_errors(out):
        model.to(checkpoint_dtype(bench.runner)).save_pretrained(out)
    source = Path(bench.runner.name)
    files = [path for pattern in TOKENIZER_FILES for path in source.glob(pattern)] if source.is_dir() else []
    for path in files:
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    if not files and bench.tokenizer is not None:
        bench.tokenizer.save_pretrained(out)
