"""Training runs of models: early-exit targets and distilled drafts.

Rows, checkpoints and curves are stored as for heads (``runs``); the result is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from outrider.errors import errors_as
from outrider.heads.checkpoint import named_errors
from outrider.memory import require_memory
from outrider.runner import gguf, loading
from outrider.runner.checkpoints.formats import quantization_of
from outrider.runner.config import torch_device
from outrider.runner.loading import context_length, decoder_layers, text_config
from outrider.runner.parallel_draft import mask_token_of
from outrider.runner.survey import survey_without_weights
from outrider.runner.tokenizers import check_same_vocabulary
from outrider.train.acceptance import ROWS, in_rounds, summary
from outrider.train.claims import read_or_create_json
from outrider.train.decoder import Decoder, evaluating
from outrider.train.distillation import DistillationLoss
from outrider.train.draft_model import new_draft
from outrider.train.layer_skip import EarlyExitLoss
from outrider.train.options import Distillation, DraftShape, HeadPlan, LayerSkip, Parallel
from outrider.train.parallel import ParallelDraftTraining
from outrider.train.runs import Workspace, checkpoint_dtype, finish, in_checkpoint_dtype, run_job
from outrider.train.shapes import COPIES, FLOAT32
from outrider.train.text import TextRows, check_continuation
from outrider.types import OutriderError
from outrider.weight_files import weight_bytes

logger = logging.getLogger(__name__)

QUANTISED = "training a model or draft needs the checkpoint in 16 or 32 bits; a head can be trained for a quantised target"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")


def train_early_exit(workspace: Workspace, out: Path, plan: HeadPlan, skip: LayerSkip) -> None:
    """Continue training the target for early exit and write it.

    Raises ``OutriderError`` for a target with fewer than three layers, or one whose layers do not run one by one.
    """
    model = workspace.model
    decoder = Decoder(model)
    if len(decoder.layers) < 3:
        raise OutriderError(
            f"early-exit training needs a target with at least three layers; this one has {len(decoder.layers)}"
        )
    _check_rows(workspace, model, str(model.name_or_path))
    decoder.check()
    workspace.claim("early-exit", model, (), asdict(skip))
    rows = TextRows(workspace.training_rows())

    def measure(final: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        found = measure_exits(decoder, rows.held_out if final else rows.held_out[:ROWS])
        return {f"held_exit_{depth}": each["greedy"]["acceptance"] for depth, each in found["exits"].items()}, found

    before = read_or_create_json(workspace.work / "early-exit" / "before.json", lambda: measure_exits(decoder, rows.held_out))
    for layer in decoder.layers if plan.compile else ():
        layer.compile()
    loss = EarlyExitLoss(decoder, skip, workspace.dtype, plan.seed)
    after = run_job(workspace, "early-exit", model, rows, loss, plan, measure)
    finish(workspace, "early-exit", out, {"before": before, "after": after})
    _save(workspace, model, out)


@torch.no_grad()
def measure_exits(decoder: Decoder, rows: Tensor) -> dict[str, Any]:
    """Return the model's loss on rows [R, S], and the acceptance of each early exit's drafts, by layers run."""
    pairs: dict[int, list[tuple[Tensor, ...]]] = {depth: [] for depth in range(1, len(decoder.layers))}
    loss = 0.0
    decoder.model.eval()
    for ids in rows.to(decoder.model.device).split(ROWS):
        states = decoder.hidden_states(ids[:, :-1])
        end = decoder.logits(states[-1])
        loss += len(ids) * float(torch.nn.functional.cross_entropy(end.flatten(0, 1).float(), ids[:, 1:].flatten()))
        for depth, found in pairs.items():
            found.append(in_rounds(end, decoder.logits(states[depth - 1])))
    return {"loss": round(loss / len(rows), 4), "exits": {str(depth): summary(each) for depth, each in pairs.items()}}


@dataclass(frozen=True)
class DraftRun:
    """Draft to train, and its loss."""

    shape: DraftShape = field(default_factory=DraftShape)
    start: str | None = None  # folder or hub id of a draft to continue, instead of a shape
    teaching: Distillation = field(default_factory=Distillation)
    parallel: Parallel = field(default_factory=Parallel)
    name: str = "draft"  # subfolder of the work folder


def train_draft(workspace: Workspace, out: Path, plan: HeadPlan, options: DraftRun = DraftRun()) -> None:
    """Train a small model on the target's logits and write it.

    Raises ``OutriderError`` for invalid sizes and for a draft with another vocabulary.
    """
    teaching, parallel = options.teaching, None if options.parallel.parallel is None else options.parallel
    if teaching.on_policy:
        check_continuation(teaching.prompt_len, workspace.seq_len)
    target = workspace.model.requires_grad_(False).eval()
    _check_rows(workspace, target, str(target.name_or_path))
    torch.manual_seed(plan.seed)
    if options.start is None:
        draft, origin = new_draft(target, options.shape)
    else:
        draft, origin = _existing(options.start, workspace, parallel is not None), f"continuing {options.start}"
    _check_rows(workspace, draft, "the draft")
    if target.device.type == "cpu":
        needed = FLOAT32 * (target.num_parameters() + COPIES * draft.num_parameters())
        what = "the target's weights, and the draft's with gradients and optimizer state, take at least"
        require_memory(needed, what, "choose a smaller draft")
    training = (
        None if parallel is None else ParallelDraftTraining.prepare(draft, workspace.tokenizer, parallel, workspace.seq_len)
    )
    origin += "" if training is None else f"; mask token {training.token}"
    share = draft.num_parameters() / target.num_parameters()
    logger.info("draft with %.1fM parameters, %.0f%% of the target's; %s", draft.num_parameters() / 1e6, 100 * share, origin)
    about = {"shape": asdict(options.shape), "teaching": asdict(teaching), "parallel": parallel and asdict(parallel)}
    if workspace.dtype == checkpoint_dtype(target):  # weights that are not trained need no more precision
        in_checkpoint_dtype(target)
    workspace.claim(options.name, draft, (), {"start": options.start, **about})
    rows = TextRows(workspace.training_rows())
    on_text = partial(measure_draft, draft, target) if training is None else partial(training.measure, target)

    def measure(final: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        found = on_text(rows.held_out if final else rows.held_out[: 4 * ROWS])
        return {f"held_{name}": found[name]["acceptance"] for name in ("greedy", "sampled")}, found

    before = read_or_create_json(workspace.work / options.name / "before.json", lambda: on_text(rows.held_out))
    loss = DistillationLoss(draft, target, teaching, workspace.dtype, plan.seed, training)
    if plan.compile:
        for layer in (*decoder_layers(draft), *decoder_layers(target)):
            layer.compile(dynamic=False)
        loss.divergence = torch.compile(loss.divergence, dynamic=False)
    after = run_job(workspace, options.name, draft, rows, loss, plan, measure)
    finish(workspace, options.name, out, {"parameters": draft.num_parameters(), "before": before, "after": after})
    _save(workspace, draft, out)


@torch.no_grad()
def measure_draft(draft: PreTrainedModel, target: PreTrainedModel, rows: Tensor) -> dict[str, Any]:
    """Return the acceptance of the draft on rows [R, S]."""
    with evaluating(draft):
        return summary(
            in_rounds(target(input_ids=ids, use_cache=False).logits, draft(input_ids=ids, use_cache=False).logits)
            for ids in rows.to(target.device).split(ROWS)
        )


def trainable(source: str) -> PreTrainedModel:
    """Load a model in float32, on a GPU if there is one; its config keeps the checkpoint's dtype.

    Raises ``OutriderError`` like ``check_trainable``, and for broken or incomplete weights.
    """
    check_trainable(source)
    model = loading.load_model(source, loading.load_config(source), "auto", torch_device("auto"))
    loading.check_weights(model, source)
    return model.float()


def check_trainable(source: str, copies: int = 1) -> None:
    """Raise ``OutriderError`` for a model that is quantised, that Outrider does not run, or that takes more than the memory.

    Reads the config and the sizes of the files only. ``copies``: of the weights in float32; ``COPIES`` if they are trained.
    """
    config = loading.load_config(source) if gguf.find(source) is None else None
    if config is None or quantization_of(config) is not None:
        raise OutriderError(f"{source} is quantised: {QUANTISED}")
    survey_without_weights(config, loading.model_class(config))
    if not torch.cuda.is_available():
        dtype = text_config(config).dtype
        growth = FLOAT32 // dtype.itemsize if isinstance(dtype, torch.dtype) else 1
        more = "" if copies == 1 else ", with gradients and optimizer state,"
        what = f"the weights of {source} in float32{more} take at least"
        require_memory(copies * growth * weight_bytes(source), what, "choose a smaller model")


def _check_rows(workspace: Workspace, model: PreTrainedModel, name: str) -> None:
    """Raise ``OutriderError`` if rows are longer than a model's context."""
    most = context_length(text_config(model))
    if most is not None and workspace.seq_len > most:
        raise OutriderError(
            f"rows of {workspace.seq_len} tokens exceed the context of {name}, {most} tokens: give a lower --seq-len"
        )


def _existing(source: str, workspace: Workspace, is_parallel: bool) -> PreTrainedModel:
    """Load an existing draft. Raises ``OutriderError`` if its vocabulary differs from the target's.

    Also raises it for a parallel draft without --parallel, because training would remove the ability.
    """
    if workspace.tokenizer is not None:
        with errors_as(f"cannot load a tokenizer from {source}", OSError, ValueError, KeyError):
            tokenizer = AutoTokenizer.from_pretrained(source)
        check_same_vocabulary(workspace.tokenizer, tokenizer)
    draft = trainable(source)
    token = mask_token_of(draft.config)
    if token is not None and not is_parallel:
        raise OutriderError(f"{source} drafts in parallel, with mask token {token}: give --parallel, such as --parallel 8")
    return draft


def _save(workspace: Workspace, model: Any, out: Path) -> None:
    """Write the model in the target's dtype, with unchanged files of the target's tokenizer and processor, if any."""
    model.generation_config = workspace.model.generation_config
    with named_errors(out):
        model.to(checkpoint_dtype(workspace.model)).save_pretrained(out)
    source = Path(str(workspace.model.name_or_path))
    files = [path for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()]
    processors = source.glob("*processor_config.json") if model is workspace.model else ()  # a draft reads text only
    for path in (*files, *processors):
        shutil.copyfile(path, out / path.name)
    if not files and workspace.tokenizer is not None:
        workspace.tokenizer.save_pretrained(out)
