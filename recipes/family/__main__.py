"""Command line of the recipe: `python -m recipes.family all --preset cpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recipes import PACKAGE, run, work_folder

from . import stages
from .card import Notes
from .config import PRESETS
from .stages import Workshop

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

PresetName = Annotated[Literal["cpu", "gpu", "tiny"], typer.Option("--preset", help="machine class")]
Corpus = Annotated[Path, typer.Option("--corpus", help="folder of the xz text files")]
Work = Annotated[Path, typer.Option("--work", help="folder for checkpoints and tokenised text")]
Minutes = Annotated[float | None, typer.Option("--minutes", help="minutes of training steps (default: the preset's)")]
Tokens = Annotated[
    int | None, typer.Option("--tokens", help="tokens of the whole run; a smaller number ends it early, with decay")
]
Package = Annotated[Path, typer.Option("--package", help="output folder of target/, draft/ and the model card")]
Curves = Annotated[Path, typer.Option("--curves", help="output folder of the curves and report.json")]

HERE = Path(__file__).parent
CORPUS, WORK = Path("../shared/corpus"), Path("build/family")


def workshop(preset: str, corpus: Path, work: Path, **options: Any) -> Workshop:
    """Return the workshop for these options. Raises a one-line error if the corpus is missing."""
    if not corpus.is_dir():
        raise typer.BadParameter(f"corpus folder {corpus} does not exist")
    work_folder(work)
    return Workshop(preset, corpus, work, **options)


def check_trained(folder: Path, stage: str) -> None:
    """Reject a folder without a checkpoint of a stage."""
    if not (folder / "checkpoint.pt").is_file():
        raise typer.BadParameter(f"no checkpoint in {folder}: run `python -m recipes.family {stage}` first")


def check_model(folder: Path | None) -> None:
    """Reject a folder that is given and is not of a model."""
    if folder is not None and not (folder / "config.json").is_file():
        raise typer.BadParameter(f"{folder} is not a model folder: it has no config.json")


@app.command()
def tokenizer(preset: PresetName = "cpu", corpus: Corpus = CORPUS, work: Work = WORK) -> None:
    """Train the tokenizer and tokenise the text."""
    stages.prepare(workshop(preset, corpus, work))


@app.command()
def target(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    minutes: Minutes = None,
    tokens: Tokens = None,
    start: Annotated[Path | None, typer.Option("--start", help="folder of a trained target to go on from")] = None,
) -> None:
    """Train the target. Run again to resume."""
    check_model(start)
    shop = workshop(preset, corpus, work, minutes=minutes, tokens_in_all=tokens, start=start)
    stages.train_target(shop)


@app.command()
def loops(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    minutes: Minutes = None,
) -> None:
    """Train the finished target against its own greedy loops. Run again to resume."""
    shop = workshop(preset, corpus, work, minutes=minutes)
    check_trained(work / "target", "target")
    stages.train_against_loops(shop)


@app.command()
def average(others: list[Path], preset: PresetName = "cpu", work: Work = WORK) -> None:
    """Average the weights of this folder's run against loops and of other ones, folders with a checkpoint.pt."""
    for folder in (work / "loops", *others):
        check_trained(folder, "loops")
    stages.average(Workshop(preset, CORPUS, work), others)


@app.command()
def draft(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    minutes: Minutes = None,
    rows: Annotated[int | None, typer.Option("--generated", help="number of sequences that the target writes first")] = None,
    teacher: Annotated[Path | None, typer.Option("--target", help="folder of a finished target (default: this run's)")] = None,
    start: Annotated[Path | None, typer.Option("--start", help="folder of a trained draft to go on from")] = None,
) -> None:
    """Let the target write text, and distil the draft on that text. Run again to resume."""
    check_model(teacher)
    check_model(start)
    shop = workshop(preset, corpus, work, minutes=minutes, start=start)
    if teacher is None:
        check_trained(work / stages.finished(shop), "loops")
        teacher = work / "export" / "target"
        stages.export_model(shop, stages.finished(shop), teacher)
    stages.train_draft(shop, teacher, rows)


@app.command()
def export(
    name: Literal["target", "loops", "average", "draft"], out: Path, preset: PresetName = "cpu", work: Work = WORK
) -> None:
    """Export the last checkpoint of a stage as a Hugging Face folder, also during training."""
    check_trained(work / name, name)
    if out.exists() and not (out / "config.json").is_file():  # an existing folder is deleted first, so it must be a model
        raise typer.BadParameter(f"{out} exists and is not a model folder: give another name")
    stages.export_model(Workshop(preset, CORPUS, work), name, out)


@app.command()
def finish(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    package: Package = PACKAGE,
    curves: Curves = HERE,
) -> None:
    """Export both models, measure them, draw the curves."""
    stages.finish(workshop(preset, corpus, work), package, curves)


@app.command()
def card(
    preset: PresetName = "cpu",
    package: Package = PACKAGE,
    curves: Curves = HERE,
    hardware: Annotated[str | None, typer.Option("--hardware", help="hardware description in the model card")] = None,
    abilities: Annotated[str, typer.Option("--abilities", help="paragraphs on what the models can and cannot do")] = "",
    note: Annotated[str, typer.Option("--note", help="paragraph about this run in the model card")] = "",
    reading: Annotated[str, typer.Option("--reading", help="paragraph on how the samples were read, and what was found")] = "",
) -> None:
    """Write the model card from the last measurements."""
    if not (curves / "report.json").is_file():
        raise typer.BadParameter(f"no measurements in {curves}: run `python -m recipes.family finish` first")
    notes = Notes(hardware or stages.hardware(), abilities, note, reading)
    stages.write_card(PRESETS[preset], package, curves, notes)


@app.command(name="all")
def everything(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    package: Package = PACKAGE,
    curves: Curves = HERE,
) -> None:
    """Run all stages in order. Run again to resume."""
    target(preset, corpus, work)
    loops(preset, corpus, work)
    draft(preset, corpus, work)
    finish(preset, corpus, work, package, curves)
    card(preset, package, curves)


if __name__ == "__main__":
    run(app)
