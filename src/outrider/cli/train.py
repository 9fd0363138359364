"""``outrider train``: train drafts and heads for a target on text. One function per kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.console import show_notices
from outrider.cli.options import flag, with_groups
from outrider.errors import OutriderError
from outrider.family import TARGET
from outrider.files import expanded
from outrider.hub import is_gguf_id, local_gguf
from outrider.options import flag_name, path_or_text
from outrider.train.options import (
    CONTINUED_RATES,
    MASK_RATES,
    MEASURED,
    NEW_RATES,
    TEXT,
    WHAT,
    BlockRun,
    Distillation,
    DraftShape,
    EagleRun,
    HeadPlan,
    LayerSkip,
    MedusaRun,
    MtpRun,
    Parallel,
    Source,
)
from outrider.weight_files import weight_files

if TYPE_CHECKING:
    from outrider.train.runs import Workspace

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
Out = Annotated[Path, typer.Option(help="Output folder.", rich_help_panel=WHAT)]
training = partial(with_groups, panel=WHAT)  # the decorator of all commands here


@dataclass(frozen=True)
class FileOptions:
    """The target, its training text and the work folder."""

    target: str | None = flag("Folder or hub id of the target, for heads also a GGUF file (default: the embedded one).")
    text: list[Path] | None = flag(
        "Text file, or JSONL with text, prompt and completion, or messages; plain or .gz; repeatable.", panel=TEXT
    )
    work: Path | None = flag("Folder for features and checkpoints (default: OUT-work).")


@training
def medusa(*, out: Out, run: MedusaRun, files: FileOptions, source: Source, length: HeadPlan) -> None:
    """Train Medusa heads, in vLLM's format."""
    check_sizes(run, "heads", "layers", "draft_vocab")
    train_head("medusa", out, run, files, source, length)


@training
def eagle(*, out: Out, run: EagleRun, files: FileOptions, source: Source, length: HeadPlan) -> None:
    """Train an EAGLE head."""
    if run.generation == 1 and (run.hidden_states, run.draft_vocab) != (None, None):
        raise OutriderError("--hidden-states and --draft-vocab are EAGLE-3's: omit them with --generation 1")
    check_sizes(run, "generation", "hidden_states", "draft_vocab")
    train_head("eagle", out, run, files, source, length)


@training
def mtp(*, out: Out, run: MtpRun, files: FileOptions, source: Source, length: HeadPlan) -> None:
    """Train an MTP head with one layer of the target's kind, or continue the one in a checkpoint."""
    train_head("mtp", out, run, files, source, length)


@training
def dflash(*, out: Out, run: BlockRun, files: FileOptions, source: Source, length: HeadPlan) -> None:
    """Train a block drafter, which drafts a block in one pass; written in z-lab's format."""
    check_sizes(run, "block_size", "layers", "hidden_states", "markov_rank", "selector_rank")
    train_head("dflash", out, run, files, source, length)


@training
def draft(  # noqa: PLR0913 - groups of options
    *,
    out: Out,
    shape: DraftShape,
    start: str | None = flag("Continue this draft, a folder or hub id, instead of a new one."),
    teaching: Distillation,
    parallel: Parallel,
    files: FileOptions,
    source: Source,
    length: HeadPlan,
) -> None:
    """Train a small draft model on the target's logits, and write it as a Hugging Face folder."""
    from outrider.train.model_runs import DraftRun, train_draft

    if parallel.parallel is None and parallel != Parallel():
        raise OutriderError("--keep and --keep-least need --parallel")
    run = DraftRun(shape, start, replace(teaching, prompt_len=source.prompt_len), parallel)
    check_sizes(shape, "layers", "width", "from_layers", start=start)
    continued = CONTINUED_RATES if parallel.parallel is None else MASK_RATES
    plan = length.with_rates(NEW_RATES if start is None else continued)
    workspace = workspace_of(
        files, source, out, start, uses_prompts=teaching.on_policy > 0, copies=1, shape=None if start else shape
    )
    train_draft(workspace, out, plan, run)
    done(f"--draft {out}")


@training
def early_exit(*, out: Out, skip: LayerSkip, files: FileOptions, source: Source, length: HeadPlan) -> None:
    """Fine-tune a model so that its first layers can draft for it (LayerSkip), and write it as a Hugging Face folder."""
    from outrider.train.model_runs import train_early_exit
    from outrider.train.shapes import COPIES

    plan = length.with_rates(CONTINUED_RATES)
    workspace = workspace_of(files, source, out, copies=COPIES)
    train_early_exit(workspace, out, plan, skip)
    done(f"--target {out} --method early-exit")


COMMANDS = {"medusa": medusa, "eagle": eagle, "mtp": mtp, "dflash": dflash, "draft": draft, "early-exit": early_exit}


def train_head(method: str, out: Path, run: Any, files: FileOptions, source: Source, length: HeadPlan) -> None:
    """Train a head for a method, and print how to use it."""
    from outrider.train import runs

    kinds = {"medusa": runs.train_medusa, "eagle": runs.train_eagle, "mtp": runs.train_mtp, "dflash": runs.train_block}
    train: Any = kinds[method]
    for other in run.folders(out)[1:] if isinstance(run, EagleRun) else ():
        check_out(other, models_of(files, run.start))
    workspace = workspace_of(files, source, out, run.start)
    plan = length.with_rates(NEW_RATES if run.start is None else CONTINUED_RATES)
    train(workspace, out, plan, replace(run, start=local_gguf(run.start)))
    done(f"--method {method} --draft {out}")


def check_sizes(run: Any, *names: str, start: str | None = None) -> None:
    """Raise ``OutriderError`` for given sizes together with a start, by default the run's, which determines them."""
    given = [name for name in names if getattr(run, name) != getattr(type(run), name)]
    if given and getattr(run, "start", start) is not None:
        raise OutriderError(f"--start determines the sizes: omit {', '.join(map(flag_name, given))}")


def workspace_of(
    files: FileOptions,
    source: Source,
    out: Path,
    start: str | None = None,
    *,
    uses_prompts: bool = False,
    copies: int = 0,
    shape: DraftShape | None = None,
) -> Workspace:
    """Check the options, then create the folders, then load the target.

    ``start``: a checkpoint that the run reads besides the target. ``uses_prompts``: --prompt-len has a use without
    --regenerate. ``copies``: of the target's weights in float32, in which models are trained; 0 to run it as it is.
    ``shape``: of a new draft.
    """
    from outrider.cli.session import check_source, loading
    from outrider.train.model_runs import trainable
    from outrider.train.runs import Workspace
    from outrider.train.text import check_continuation, check_text_file

    if copies:
        refuse_gguf_ids(files.target, start)
    check_out(out, models_of(files, start))
    if not files.text:
        raise OutriderError("no training text: give --text file.txt or --text file.jsonl")
    for path in files.text:
        check_text_file(path)
    source = replace(source, paths=tuple(files.text))
    if not source.regenerate and source.temperature != Source.temperature:
        raise OutriderError("--temperature needs --regenerate")
    if not (source.regenerate or uses_prompts) and source.prompt_len != Source.prompt_len:
        raise OutriderError("--prompt-len needs --regenerate, or --on-policy of `train draft`")
    if source.regenerate or uses_prompts:
        check_continuation(source.prompt_len, source.seq_len)
    check_source(files.target)
    check_source(start)
    target, start = path_or_text(local_gguf(files.target) or TARGET), local_gguf(start)
    if copies:
        check_models(str(target), start, copies, shape)
    work = files.work or out.with_name(f"{out.name}-work")
    try:
        work.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutriderError(f"cannot create the folder {error.filename}: {error.strerror}") from None
    show_notices()
    with loading(f"loading {files.target or 'the embedded model'}"):
        from outrider.engine.config import load_tokenizer
        from outrider.runner import ModelRunner, RunnerConfig

        tokenizer = load_tokenizer(target)  # first, because it takes no time
        loaded = trainable(str(target)) if copies else ModelRunner.load(target, RunnerConfig(max_batch=16))
    return Workspace(loaded, tokenizer, work, source)


def check_models(target: str, start: str | None, copies: int, shape: DraftShape | None) -> None:
    """Raise ``OutriderError`` for models that cannot be trained, and a target without a draft of this shape."""
    from outrider.train.draft_model import check_new_draft
    from outrider.train.model_runs import check_trainable

    check_trainable(target, copies)
    if start is not None:
        check_trainable(start)
    if shape is not None:
        check_new_draft(target, shape)


def refuse_gguf_ids(*models: str | None) -> None:
    """Raise ``OutriderError`` for hub ids of GGUF files, which cannot be trained, before they are downloaded."""
    from outrider.train.model_runs import QUANTISED

    for model in filter(is_gguf_id, models):
        raise OutriderError(f"{model} is a GGUF file: {QUANTISED}")


def models_of(files: FileOptions, start: str | None) -> list[str | Path]:
    """Return the models that a run reads."""
    return [path_or_text(files.target or TARGET), *([] if start is None else [start])]


def check_out(out: Path, models: Sequence[str | Path]) -> None:
    """Raise ``OutriderError`` for an output folder without a name, or with a model that the run reads or did not train."""
    if out.name in ("", ".."):
        raise OutriderError(f"invalid --out {str(out)!r}: give a named folder, such as ./head")
    for model in map(expanded, models):
        if out.exists() and model.exists() and out.samefile(model):
            raise OutriderError(f"--out {out} is the model that is read: give another folder, or it would be overwritten")
    if not (out / MEASURED).exists() and ((out / "config.json").exists() or weight_files(out)):
        raise OutriderError(
            f"--out {out} holds a model that was not trained here: give another folder, or it would be replaced"
        )


def done(options: str) -> None:
    """Print how to use the result."""
    typer.echo(f"done: use it with {options}; curve and measurements are in the same folder", err=True)
