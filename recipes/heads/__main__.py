"""Command line of the recipe: `python -m recipes.heads all`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import with_groups
from outrider.train.runs import Bench, EagleRun, HeadPlan, train_eagle, train_medusa
from recipes import run
from recipes.family.config import SEED
from recipes.family.stages import hardware
from recipes.heads.card import publish
from recipes.heads.rows import COUNT, SEQ_LEN, bench

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

PACKAGE = Path(__file__).parents[2] / "src" / "outrider" / "family"
NAMES = ("medusa", "eagle1", "eagle3")


@dataclass(frozen=True)
class Options:
    """Options of both commands."""

    minutes: Annotated[float, typer.Option(help="minutes of training per head")] = 28.0
    rows: Annotated[int, typer.Option(help=f"rows of {SEQ_LEN} tokens: the target's continuations of text")] = COUNT
    target: Annotated[Path, typer.Option(help="folder of the target")] = PACKAGE / "target"
    tokens: Annotated[Path, typer.Option(help="the family recipe's tokenised text")] = Path("build/family/tokens")
    package: Annotated[Path, typer.Option(help="output folder, with a subfolder for each head")] = PACKAGE
    work: Annotated[Path, typer.Option(help="folder for rows, features and checkpoints")] = Path("build/heads")
    hardware: Annotated[str | None, typer.Option(help="hardware description in the model card")] = None


def hidden_states(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's hidden states: the paper's, but the last one is later, because the target has only eight layers."""
    return 2, num_layers // 2, num_layers - 1


def train(name: str, at: Bench, package: Path, minutes: float, on: str) -> bool:
    """Train one head. Returns False if interrupted."""
    layers = hidden_states(at.runner.num_layers)
    at.features([*layers, at.runner.num_layers])  # captured once for all three heads
    how = HeadPlan(minutes=minutes, epochs=40, batch_tokens=2048, muon_lr=0.01, adam_lr=0.001, seed=SEED, compiled=True)
    out = package / name
    if name == "medusa":
        finished = train_medusa(at, out, how, num_heads=4, num_layers=3)
    elif name == "eagle1":
        finished = train_eagle(at, out, how, EagleRun(generation=1, steps=2))
    else:
        finished = train_eagle(at, out, how, EagleRun(generation=3, steps=3, layers=layers))
    if finished:
        publish(name, out, len(at.training_rows()), on)
    return finished


def train_all(names: Sequence[str], how: Options) -> None:
    """Train heads in order, each to its end. Exits if one is interrupted."""
    at = bench(how.target, how.tokens, how.work, how.rows)
    for name in names:
        if not train(name, at, how.package, how.minutes, how.hardware or hardware()):
            sys.exit("interrupted: the checkpoint is saved, run the same command to resume")


@app.command()
@with_groups
def one(*, name: Annotated[str, typer.Argument()], how: Options) -> None:
    """Train one of medusa, eagle1, eagle3. Run again to resume."""
    if name not in NAMES:
        raise typer.BadParameter(f"unknown head {name!r}; expected {', '.join(NAMES)}")
    train_all([name], how)


@app.command(name="all")
@with_groups
def everything(*, how: Options) -> None:
    """Prepare text and features and train the three heads in order. Run again to resume."""
    train_all(NAMES, how)


if __name__ == "__main__":
    run(app)
