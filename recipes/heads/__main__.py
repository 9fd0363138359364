"""Command line of the recipe: `python -m recipes.heads all`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from outrider.cli.options import flag, with_groups
from outrider.train.options import BlockRun, EagleRun, HeadPlan, MedusaRun, MtpRun
from outrider.train.runs import Workspace, train_block, train_eagle, train_medusa, train_mtp
from recipes import PACKAGE, run
from recipes.family.config import SEED
from recipes.family.stages import hardware
from recipes.heads.card import publish
from recipes.heads.rows import COUNT, SEQ_LEN, workspace

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Name = Literal["medusa", "eagle1", "eagle3", "mtp", "dflash"]


@dataclass(frozen=True)
class Options:
    """Options of both commands."""

    minutes: float = flag("Minutes of training per head.", 28.0)
    rows: int = flag(f"Rows of {SEQ_LEN} tokens, begun by the corpus and continued by the target.", COUNT)
    target: Path = flag("Folder of the target.", PACKAGE / "target")
    tokens: Path = flag("Tokenised text of the family's recipe.", Path("build/family/tokens"))
    package: Path = flag("Folder that gets one folder per head.", PACKAGE)
    work: Path = flag("Folder for rows, features and checkpoints.", Path("build/heads"))
    start: Path | None = flag("Folder with one folder per head, such as an earlier edition's: continue these heads.")
    hardware: str | None = flag("Hardware named in the card.")


def hidden_states(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's hidden states: the paper's, but the last one is later, because the target has few layers."""
    return 2, num_layers // 2, num_layers - 1


def train(name: str, at: Workspace, options: Options) -> None:
    """Train one head."""
    layers = hidden_states(at.runner.num_layers)
    at.features([*layers, at.runner.num_layers])  # what all of them read, captured once
    plan = HeadPlan(minutes=options.minutes, epochs=40, batch_tokens=2048, muon_lr=0.01, adam_lr=0.001, seed=SEED, compile=True)
    out, start = options.package / name, None if options.start is None else str(options.start / name)
    if name == "medusa":
        train_medusa(at, out, plan, MedusaRun(4, 3, start=start))
    elif name == "eagle1":
        train_eagle(at, out, plan, EagleRun(1, steps=2, start=start))
    elif name == "eagle3":
        train_eagle(at, out, plan, EagleRun(3, 3, layers, start=start))
    elif name == "mtp":
        train_mtp(at, out, plan, MtpRun(3, start=start))
    else:
        train_block(at, out, plan, BlockRun(8, 2, layers, markov_rank=128, start=start))
    publish(name, out, len(at.training_rows()), options.hardware or hardware(), options.start is not None)


def train_all(names: Sequence[str], options: Options) -> None:
    """Train heads in order, each to its end."""
    at = workspace(options.target, options.tokens, options.work, options.rows)
    for name in names:
        train(name, at, options)


@app.command()
@with_groups
def one(*, name: Annotated[Name, typer.Argument()], options: Options) -> None:
    """Train one head; run again to resume."""
    train_all([name], options)


@app.command(name="all")
@with_groups
def everything(*, options: Options) -> None:
    """Text, features and all heads in order; run again to go on where it stopped."""
    train_all(get_args(Name), options)


if __name__ == "__main__":
    run(app)
