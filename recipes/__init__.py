"""How what comes with the package was made, in one command each."""

from __future__ import annotations

import sys

import typer

from outrider.cli.app import explain
from outrider.types import OutriderError


def run(app: typer.Typer) -> None:
    """Runs a recipe's commands: a mistake of the user's is one line and exit code 2."""
    try:
        app()
    except OutriderError as error:
        message, code = explain(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(code)
