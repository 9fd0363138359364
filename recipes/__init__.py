"""Recipes that reproduce the embedded models, each with one command."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from outrider.cli.app import explain
from outrider.types import OutriderError

PACKAGE = Path(__file__).parents[1] / "src" / "outrider" / "family"


def run(app: typer.Typer) -> None:
    """Run a recipe's commands. User errors are reported in one line, with exit code 2."""
    try:
        app()
    except OutriderError as error:
        message, code = explain(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(code)


def work_folder(folder: Path) -> None:
    """Create a folder that git ignores."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")


def table(header: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    first, *others = ("| " + " | ".join(map(str, row)) + " |" for row in (header, *rows))
    return "\n".join([first, "|---" * len(header) + "|", *others])
