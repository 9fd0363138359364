"""``outrider train``: train drafts and heads for a target on text. One function per kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from outrider.cli.console import show_notices
from outrider.cli.options import check_counts, flag, parse_list, values_given, with_groups
from outrider.errors import OutriderError
from outrider.family import TARGET
from outrider.files import expanded
from outrider.options import flag_name, path_or_text

if TYPE_CHECKING:
    from outrider.train.runs import HeadPlan, Workspace

HELP = "Train drafts and heads for a target. Repeat the command to resume an interrupted run."
EXAMPLES = """Examples:

outrider train medusa --target ./my-model --text notes.jsonl --out heads/medusa

outrider train eagle --target ./my-model --text notes.jsonl --out heads/eagle3 --minutes 30

outrider train eagle --target ./my-model --start ./eagle3 --text notes.jsonl --regenerate --out heads/my-eagle3

outrider train eagle --generation 1 --target ./my-model --text notes.jsonl --regenerate --out heads/eagle1

outrider train mtp --target ./my-model --start ./my-model --text notes.jsonl --out heads/mtp

outrider train dflash --target ./my-model --text notes.jsonl --regenerate --out heads/dflash

outrider train draft --target ./my-model --text notes.jsonl --layers 2 --width 512 --out my-draft

outrider train draft --target ./my-model --start ./small-model --text notes.jsonl --regenerate --out my-draft

outrider train draft --target ./my-model --start ./small-model --parallel 8 --text notes.jsonl --out my-parallel-draft

outrider train early-exit --target ./my-model --text notes.jsonl --minutes 60 --out my-model-early

outrider generate --target ./my-model --method eagle --draft heads/eagle3 "Dear Sir,"
"""
WHAT, TEXT = "What", "Text"
CONTINUE = "Continue this head, a folder or hub id, instead of a new one; its sizes stay."
Out = Annotated[Path, typer.Option(help="Output folder.", rich_help_panel=WHAT)]
training = partial(with_groups, panel=WHAT)  # the decorator of all commands here
MODEL_RATES = {"muon_lr": 0.002, "adam_lr": 0.0001}  # default learning rates to continue a model
MASK_RATES = {"muon_lr": 0.006, "adam_lr": 0.0015}  # the same for weights that must learn to read mask tokens


@dataclass(frozen=True)
class TextOptions:
    """Options of target and training text."""

    panel: ClassVar[str] = TEXT
    target: str | None = flag("Folder or hub id of the target (default: the embedded one).", panel=WHAT)
    text: list[Path] | None = flag(
        "Text file, or JSONL with text, prompt and completion, or messages; plain or .gz; repeatable."
    )
    work: Path | None = flag("Folder for features and checkpoints (default: OUT-work).", panel=WHAT)
    seq_len: int | None = flag("Tokens per row (default: 256).")
    max_tokens: int | None = flag("Maximum number of text tokens to use (default: 1000000).")
    regenerate: bool | None = flag("Replace each row by the target's continuation of its beginning.", None, "--regenerate")
    prompt_len: int | None = flag("Tokens of each row that are kept by --regenerate, or --on-policy (default: 64).")
    temperature: float | None = flag("With --regenerate: temperature; 0 is greedy (default: 0).")


@dataclass(frozen=True)
class LengthOptions:
    """Options of training length and learning rates."""

    panel: ClassVar[str] = "How long"
    minutes: float | None = flag("Minutes of training; the learning rate decays to zero by then (default: by --epochs).")
    epochs: float | None = flag("Maximum passes over the text (default: 4).")
    batch_tokens: int | None = flag("Tokens per step, at least one row; fewer need less memory (default: 4096).")
    muon_lr: float | None = flag("Learning rate of the layers' matrices (default: 0.01; 0.002 to continue an existing model).")
    adam_lr: float | None = flag("Learning rate of other weights (default: 0.001; 0.0001 to continue an existing model).")
    compiled: bool | None = flag("Compile the training step; takes a minute and pays on longer runs.", None, "--compile")


@training
def medusa(
    *,
    out: Out,
    heads: int | None = flag("Number of heads, the longest draft (default: 4)."),
    layers: int | None = flag("Residual blocks per head (default: 1)."),
    start: str | None = flag(CONTINUE),
    text: TextOptions,
    length: LengthOptions,
) -> None:
    """Train Medusa heads, in vLLM's format."""
    from outrider.train.runs import MedusaRun, train_medusa

    check_counts(heads=heads, layers=layers)
    run = MedusaRun(start=start, **sizes_given(start, heads=heads, layers=layers))
    how = plan_of(length, {} if start is None else MODEL_RATES)
    done(train_medusa(workspace_of(text, out, start=start), out, how, run), f"--method medusa --draft {out}")


@training
def eagle(  # noqa: PLR0913 - one parameter an option
    *,
    out: Out,
    generation: int | None = flag("1 (EAGLE-1 and EAGLE-2, which share their weights) or 3 (default: 3)."),
    steps: int | None = flag("Depths trained per step (default: 5; EAGLE-1: 1)."),
    layers: str | None = flag("Three hidden states for EAGLE-3, numbered as in transformers (default: 2, n/2, n-3)."),
    draft_vocab: int | None = flag("EAGLE-3: draft only this many of the most frequent tokens (default: all)."),
    formats: str = flag("native, speculators, or both separated by a comma.", "native", "--format"),
    start: str | None = flag(CONTINUE),
    text: TextOptions,
    length: LengthOptions,
) -> None:
    """Train an EAGLE head."""
    from outrider.train.runs import EagleRun, train_eagle

    check_counts(steps=steps, draft_vocab=draft_vocab)
    if generation == 1 and (layers, draft_vocab) != (None, None):
        raise OutriderError("--layers and --draft-vocab are EAGLE-3's: omit them with --generation 1")
    states = parse_list("--layers", layers, int) if layers is not None else None
    sizes = sizes_given(start, generation=generation, layers=states, draft_vocab=draft_vocab)
    run = EagleRun(steps=steps, formats=parse_list("--format", formats, str), start=start, **sizes)
    how = plan_of(length, {} if start is None else MODEL_RATES)
    done(train_eagle(workspace_of(text, out, start=start), out, how, run), f"--method eagle --draft {out}")


@training
def mtp(
    *,
    out: Out,
    steps: int = flag("Depths trained per step.", 3),
    start: str | None = flag(f"{CONTINUE} It may be the target's own."),
    layout: str = flag("Tensor names: qwen (mtp.*), deepseek (of a further layer) or mimo.", "qwen", "--format"),
    text: TextOptions,
    length: LengthOptions,
) -> None:
    """Train an MTP head with one layer of the target's kind, or continue the one in a checkpoint."""
    from outrider.train.runs import MtpRun, train_mtp

    check_counts(steps=steps)
    how, run = plan_of(length, {} if start is None else MODEL_RATES), MtpRun(steps, start, layout)
    done(train_mtp(workspace_of(text, out, start=start), out, how, run), f"--method mtp --draft {out}")


@dataclass(frozen=True)
class PairOptions:
    """Options for dependencies between consecutive drafts of a block."""

    panel: ClassVar[str] = WHAT
    markov_rank: int = flag(
        "DSpark: rank of a bias on the logits by the token before, such as 256; a block then has one draft more.", 0
    )
    selector_rank: int = flag(
        "DFlash 2: rank of a path selector over the 16 likeliest tokens of each draft, such as 256; adds short convolutions to"
        " the layers.",
        0,
    )


@training
def dflash(  # noqa: PLR0913 - one parameter an option
    *,
    out: Out,
    block_size: int | None = flag("Tokens of a block, the last committed one included: one more than drafts (default: 16)."),
    layers: int | None = flag("Layers of the head (default: a seventh of the target's, 2 to 5)."),
    hidden_states: str | None = flag(
        "Hidden states of the target that it reads, numbered as in transformers (default: as many as layers, evenly spaced).",
    ),
    pairs: PairOptions,
    start: str | None = flag(CONTINUE),
    text: TextOptions,
    length: LengthOptions,
) -> None:
    """Train a block drafter, which drafts a block in one pass; written in z-lab's format."""
    from outrider.train.runs import BlockRun, train_block

    states = parse_list("--hidden-states", hidden_states, int) if hidden_states is not None else None
    ranks = values_given(pairs)
    run = BlockRun(start=start, **sizes_given(start, block_size=block_size, layers=layers, hidden_states=states, **ranks))
    how = plan_of(length, {} if start is None else MODEL_RATES)
    done(train_block(workspace_of(text, out, start=start), out, how, run), f"--method dflash --draft {out}")


@training
def draft(  # noqa: PLR0913 - one parameter an option
    *,
    out: Out,
    layers: int | None = flag("Layers of the draft (default: an eighth of the target's, at least two)."),
    width: int | None = flag("Hidden size of the draft (default: the target's)."),
    from_layers: str | None = flag("Indices of the target layers that initialise it (default: evenly spaced)."),
    start: str | None = flag("Continue this draft, a folder or hub id, instead of a new one."),
    loss: str = flag("kl (forward KL) or tv (total variation, the rejection rate when sampling).", "kl"),
    parallel: int | None = flag("Train the draft to make this many drafts per pass, with mask tokens (PARD)."),
    keep: float | None = flag("With --parallel: share of chains kept from each depth to the next (default: 0.7)."),
    keep_least: float | None = flag("With --parallel: minimum share of the chains at any depth (default: 0.2)."),
    on_policy: float = flag("Share of a step's rows that the current draft generates itself.", 0.0, panel=TEXT),
    text: TextOptions,
    length: LengthOptions,
) -> None:
    """Train a small draft model on the target's logits, and write it as a Hugging Face folder."""
    from outrider.train.distillation import Distillation
    from outrider.train.draft_model import DraftShape
    from outrider.train.model_runs import DraftRun, train_draft
    from outrider.train.parallel import Parallel

    check_counts(layers=layers, width=width, parallel=parallel)
    sizes_given(start, layers=layers, width=width, from_layers=from_layers)
    if parallel is None and (keep, keep_least) != (None, None):
        raise OutriderError("--keep and --keep-least need --parallel")
    chosen = parse_list("--from-layers", from_layers, int) if from_layers is not None else None
    prompt_len = Distillation.prompt_len if text.prompt_len is None else text.prompt_len
    teaching = Distillation(loss=loss, on_policy=on_policy, prompt_len=prompt_len)
    shares = {name: share for name, share in (("keep", keep), ("least", keep_least)) if share is not None}
    masks = None if parallel is None else Parallel(parallel, **shares)
    run = DraftRun(DraftShape(layers, width, chosen), start, teaching, masks)
    rates = MODEL_RATES if parallel is None else MASK_RATES
    how = plan_of(length, {} if start is None else rates)
    workspace = workspace_of(text, out, start=start, uses_prompts=on_policy > 0, copies=1)
    done(train_draft(workspace, out, how, run), f"--draft {out}")


@training
def early_exit(
    *,
    out: Out,
    max_drop: float = flag("Layer dropout of the last layer.", 0.1),
    exit_scale: float = flag("Weight of early exits relative to the last layer.", 1.0),
    rotation: int | None = flag("A step trains every R-th exit, in turn (default: one exit)."),
    text: TextOptions,
    length: LengthOptions,
) -> None:
    """Fine-tune a model so that its first layers can draft for it (LayerSkip), and write it as a Hugging Face folder."""
    from outrider.train.layer_skip import LayerSkip
    from outrider.train.model_runs import COPIES, train_early_exit

    check_counts(rotation=rotation)
    if not 0 <= max_drop < 1 or not 0 <= exit_scale < math.inf:
        raise OutriderError(
            f"invalid --max-drop {max_drop} or --exit-scale {exit_scale}: expected 0 <= max-drop < 1 and exit-scale >= 0"
        )
    skip = LayerSkip(max_drop=max_drop, exit_scale=exit_scale, rotation=rotation)
    how = plan_of(length, MODEL_RATES)
    done(train_early_exit(workspace_of(text, out, copies=COPIES), out, how, skip), f"--target {out} --method early-exit")


COMMANDS = {"medusa": medusa, "eagle": eagle, "mtp": mtp, "dflash": dflash, "draft": draft, "early-exit": early_exit}


def sizes_given(start: str | None, **sizes: Any) -> dict[str, Any]:
    """Return the sizes that are not None. Raises ``OutriderError`` for sizes with ``start``, which determines them."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if start is not None and given:
        raise OutriderError(f"--start determines the sizes: omit {', '.join(map(flag_name, given))}")
    return given


def plan_of(length: LengthOptions, rates: dict[str, float]) -> HeadPlan:
    """Return the training plan. ``rates``: learning rates that replace the plan's defaults."""
    from outrider.train.runs import HeadPlan

    found = values_given(length)
    for name, number in found.items():
        if not 0 < number < math.inf:
            raise OutriderError(f"invalid {flag_name(name)} {number}: expected a finite number above 0")
    return HeadPlan(**(rates | found))


def workspace_of(
    text: TextOptions, out: Path, *, start: str | None = None, uses_prompts: bool = False, copies: int = 0
) -> Workspace:
    """Check the options, then load the target, then create the folders.

    ``start``: a checkpoint that the run reads besides the target. ``uses_prompts``: --prompt-len has a use without
    --regenerate. ``copies``: of the target's weights in float32, in which models are trained; 0 to run it as it is.
    """
    from outrider.cli.session import check_source, loading
    from outrider.train.model_runs import check_trainable, trainable
    from outrider.train.runs import Source, Workspace
    from outrider.train.text import check_continuation, check_text_file

    target = path_or_text(text.target or TARGET)
    check_out(out, [target] if start is None else [target, start])
    if not text.text:
        raise OutriderError("no training text: give --text file.txt or --text file.jsonl")
    for path in text.text:
        check_text_file(path)
    check_counts(seq_len=text.seq_len, max_tokens=text.max_tokens, prompt_len=text.prompt_len)
    if not text.regenerate and text.temperature is not None:
        raise OutriderError("--temperature needs --regenerate")
    if not (text.regenerate or uses_prompts) and text.prompt_len is not None:
        raise OutriderError("--prompt-len needs --regenerate, or --on-policy of `train draft`")
    found = {name: value for name, value in values_given(text).items() if name not in ("target", "text", "work")}
    source = Source(tuple(text.text), **found)
    if source.regenerate or uses_prompts:
        check_continuation(source.prompt_len, source.seq_len, source.temperature)
    check_source(text.target)
    check_source(start)
    if copies:
        check_trainable(str(target), copies)
        if start is not None:
            check_trainable(start)
    show_notices()
    with loading(f"loading {text.target or 'the embedded model'}"):
        from outrider.engine.config import load_tokenizer
        from outrider.runner import ModelRunner, RunnerConfig

        loaded = trainable(str(target)) if copies else ModelRunner.load(target, RunnerConfig(max_batch=16))
        tokenizer = load_tokenizer(target)
    work = text.work or out.with_name(f"{out.name}-work")
    try:
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutriderError(f"cannot create the folder {error.filename}: {error.strerror}") from None
    return Workspace(loaded, tokenizer, work, source)


def check_out(out: Path, models: Sequence[str | Path]) -> None:
    """Raise ``OutriderError`` for an output folder without a name, or one that holds a model that the run reads."""
    if out.name in ("", ".."):
        raise OutriderError(f"invalid --out {str(out)!r}: give a named folder, such as ./head")
    for model in map(expanded, models):
        if out.exists() and model.exists() and out.samefile(model):
            raise OutriderError(f"--out {out} is the model that is read: give another folder, or it would be overwritten")


def done(finished: bool, options: str) -> None:
    """Print whether training finished, and how to use the result."""
    if not finished:
        typer.echo("progress is saved: repeat the command to resume", err=True)
        raise KeyboardInterrupt
    typer.echo(f"done: use it with {options}; curve and measurements are in the same folder", err=True)
