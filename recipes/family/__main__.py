"""Command line of the recipe: `python -m recipes.family all --preset cpu`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from recipes import run

from . import stages
from .config import PRESETS
from .stages import Workshop

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

PresetName = Annotated[str, typer.Option("--preset", help=f"machine class: {', '.join(PRESETS)}")]
Corpus = Annotated[Path, typer.Option("--corpus", help="folder of the xz text files")]
Work = Annotated[Path, typer.Option("--work", help="folder for checkpoints and tokenised text")]
Minutes = Annotated[float | None, typer.Option("--minutes", help="time budget; the preset's own if not given")]
Tokens = Annotated[
    int | None, typer.Option("--tokens", help="tokens of the whole run; fewer than planned end a run early, with its decay")
]
Wall = Annotated[bool, typer.Option("--wall", help="pauses count, too: the run ends by the clock")]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the layers")]
Package = Annotated[Path, typer.Option("--package", help="folder that gets target/, draft/ and the model card")]
Curves = Annotated[Path, typer.Option("--curves", help="folder that gets the curves and report.json")]

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "src" / "outrider" / "family"
CORPUS, WORK = Path("../shared/corpus"), Path("build/family")


def check_preset(preset: str) -> None:
    """Refuses a name that is none."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")


def workshop(preset: str, corpus: Path, work: Path) -> Workshop:
    """The workshop the options describe, or a one-line error."""
    check_preset(preset)
    if not corpus.is_dir():
        raise typer.BadParameter(f"no such corpus folder: {corpus}")
    work.mkdir(parents=True, exist_ok=True)
    (work / ".gitignore").write_text("*\n")
    return Workshop(preset, corpus, work)


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
    wall: Wall = False,
    compiled: Compiled = True,
) -> None:
    """Train the target; run again to resume."""
    budget = {"minutes": minutes, "tokens_in_all": tokens, "count_pauses": wall}
    shop = replace(workshop(preset, corpus, work), compiled=compiled, **budget)
    if not stages.train_target(shop):
        sys.exit("interrupted: the checkpoint is saved, run the same command to resume")


@app.command()
def loops(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    minutes: Minutes = None,
    wall: Wall = False,
    compiled: Compiled = True,
) -> None:
    """Train the finished target against its own greedy loops; run again to resume."""
    shop = replace(workshop(preset, corpus, work), minutes=minutes, count_pauses=wall, compiled=compiled)
    if not (work / "target" / "checkpoint.pt").is_file():
        raise typer.BadParameter(f"there is no target in {work}: run `python -m recipes.family target` first")
    if not stages.train_against_loops(shop):
        sys.exit("interrupted: the checkpoint is saved, run the same command to resume")


@app.command()
def draft(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    minutes: Minutes = None,
    wall: Wall = False,
    rows: Annotated[int | None, typer.Option("--generated", help="sequences the target writes first")] = None,
) -> None:
    """Export the target, let it write text, distil the draft on it; run again to resume."""
    shop = replace(workshop(preset, corpus, work), minutes=minutes, count_pauses=wall)
    stages.export_model(shop, "loops", work / "export" / "target")
    if not stages.train_draft(shop, rows):
        sys.exit("interrupted: the checkpoint is saved, run the same command to resume")


@app.command()
def export(name: str, out: Path, preset: PresetName = "cpu", work: Work = WORK) -> None:
    """Write the last checkpoint of `target`, `loops` or `draft` as a Hugging Face folder, while it trains if need be."""
    check_preset(preset)
    if name not in ("target", "loops", "draft"):
        raise typer.BadParameter(f"unknown model {name!r}: target, loops or draft")
    if not (work / name / "checkpoint.pt").is_file():
        raise typer.BadParameter(f"there is no checkpoint in {work / name}: run `python -m recipes.family {name}` first")
    if out.exists() and not (out / "config.json").is_file():  # what is there is deleted first
        raise typer.BadParameter(f"{out} is there and no model folder: name a new one")
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
    hardware: Annotated[str | None, typer.Option("--hardware", help="what the card says it was trained on")] = None,
    note: Annotated[str, typer.Option("--note", help="a paragraph on this very run")] = "",
) -> None:
    """Write the model card from the last measurements."""
    check_preset(preset)
    stages.write_card(PRESETS[preset], package, curves, hardware or stages.hardware(), note)


@app.command(name="all")
def everything(
    preset: PresetName = "cpu",
    corpus: Corpus = CORPUS,
    work: Work = WORK,
    package: Package = PACKAGE,
    curves: Curves = HERE,
) -> None:
    """All stages in order; run again to go on where it stopped."""
    target(preset, corpus, work)
    loops(preset, corpus, work)
    draft(preset, corpus, work)
    finish(preset, corpus, work, package, curves)
    card(preset, package, curves)


if __name__ == "__main__":
    run(app)
