"""Command line of the recipe: `python -m recipes.drafts distilled`, `parallel` and `foreign`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.train.model_runs import DraftRun, train_draft, trainable
from outrider.train.options import DIVERGENCES, Distillation, DraftShape, HeadPlan, Parallel
from recipes import PACKAGE, run, work_folder
from recipes.drafts import foreign as foreign_draft
from recipes.family import model, report, tokenizer
from recipes.family.config import PRESETS, SEED
from recipes.heads.rows import COUNT, workspace

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

LEARNED = (0.006, 0.0015)  # learning rates of Muon and Adam for already trained weights
FRESH = (0.01, 0.0025)

Family = Annotated[Path, typer.Option("--family", help="folder of the family: target/ and draft/")]
Tokens = Annotated[Path, typer.Option("--tokens", help="the family recipe's tokenised text")]
Out = Annotated[Path, typer.Option("--out", help="folder for the finished draft")]
Minutes = Annotated[float, typer.Option("--minutes", help="of training")]
Rows = Annotated[int, typer.Option("--rows", help="rows of 256 tokens: the target's continuations of corpus text")]


@app.command()
def distilled(  # noqa: PLR0913 - one parameter an option
    minutes: Minutes = 25.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="initialise from the target's layers instead of the family's draft")
    ] = False,
    loss: Annotated[str, typer.Option("--loss", help=" or ".join(DIVERGENCES))] = "kl",
    rows: Rows = COUNT,
    family: Family = PACKAGE,
    tokens: Tokens = Path("build/family/tokens"),
    work: Annotated[Path, typer.Option("--work", help="folder of rows and checkpoints; the heads' folder has rows")] = Path(
        "build/heads"
    ),
    out: Out = Path("build/drafts/distilled"),
) -> None:
    """Distil a draft of the family draft's size for longer, and compare the two. Run again to resume."""
    at = replace(workspace(family / "target", tokens, work, rows), target=trainable(str(family / "target")))
    shape = DraftShape(PRESETS["cpu"].draft.layers, PRESETS["cpu"].draft.hidden, PRESETS["cpu"].distillation.layers)
    muon, adam = FRESH if fresh else LEARNED
    options = DraftRun(shape, None if fresh else str(family / "draft"), Distillation(loss=loss), name="distilled")
    plan = HeadPlan(minutes=minutes, epochs=40, batch_tokens=1024, muon_lr=muon, adam_lr=adam, seed=SEED, compile=True)
    train_draft(at, out, plan, options)
    compare(family, out, tokens)


def compare(family: Path, out: Path, tokens: Path) -> None:
    """Store and print the mean acceptance length of both drafts on the target's greedy text after held-out signatures."""
    target, learned = model.load(family / "target"), tokenizer.load(family / "target")
    found = {}
    for name, folder in (("family", family / "draft"), ("distilled", out)):
        found[name] = report.speculation(target, model.load(folder), learned, tokens)["mean_acceptance_length"]
    found["ratio"] = {k: round(found["distilled"][k] / found["family"][k], 3) for k in found["family"]}
    (out / "compared.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


@app.command()
def parallel(
    minutes: Minutes = 20.0,
    rows: Rows = COUNT,
    family: Family = PACKAGE,
    tokens: Tokens = Path("build/family/tokens"),
    work: Annotated[Path, typer.Option("--work", help="rows and checkpoints; the heads' folder has rows")] = Path(
        "build/heads"
    ),
    out: Out = Path("build/drafts/parallel"),
) -> None:
    """Train the family's draft further so that it makes 8 drafts in one pass (PARD); run again to resume."""
    muon, adam = LEARNED
    options = DraftRun(start=str(family / "draft"), parallel=Parallel(8), name="parallel")
    plan = HeadPlan(minutes=minutes, epochs=40, batch_tokens=1024, muon_lr=muon, adam_lr=adam, seed=SEED, compile=True)
    at = replace(workspace(family / "target", tokens, work, rows), target=trainable(str(family / "target")))
    train_draft(at, out, plan, options)


@app.command()
def foreign(  # noqa: PLR0913 - one parameter an option
    minutes: Minutes = 8.0,
    vocab: Annotated[int, typer.Option("--vocab", help="vocabulary size of the draft's tokenizer")] = 6144,
    rows: Rows = COUNT,
    megabytes: Annotated[float, typer.Option("--megabytes", help="maximum text per source, in megabytes")] = 12.0,
    corpus: Annotated[Path, typer.Option("--corpus", help="folder of the xz text files")] = Path("../shared/corpus"),
    family: Family = PACKAGE,
    tokens: Tokens = Path("build/family/tokens"),
    rows_work: Annotated[Path, typer.Option("--rows-work", help="folder of the rows")] = Path("build/heads"),
    work: Annotated[Path, typer.Option("--work", help="folder of tokenizer, tokens and checkpoints")] = Path(
        "build/drafts/foreign-work"
    ),
    out: Out = Path("build/drafts/foreign"),
) -> None:
    """Train a tokenizer of another size and a draft with it. Run again to resume. --rows 0: train on corpus text only."""
    work_folder(work)
    out.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    if rows and not (work / "tokens" / "tokens.json").exists():
        learned, at = tokenizer.load(family / "target"), workspace(family / "target", tokens, rows_work, rows)
        written = [str(learned.decode(row)) for row in at.training_rows().tolist()]
    foreign_draft.prepare(work, corpus, megabytes, vocab, written)
    foreign_draft.train(work, family, minutes, out)


if __name__ == "__main__":
    run(app)
