"""How what comes with the package was made, in one command each."""

from __future__ import annotations

import sys

import typer

from outrider.types import OutriderError


def run(app: typer.Typer) -> None:
    """Runs a recipe's commands: a mistake of the user's is one line and exit code 2."""
    try:
        app()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
