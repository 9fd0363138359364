"""Recipes that reproduce the embedded models, each with one command."""

from __future__ import annotations

import sys

import typer

from outrider.cli.app import explain
from outrider.types import OutriderError


def run(app: typer.Typer) -> None:
    """Run a recipe's commands. User errors are reported in one line, with exit code 2."""
    try:
        app()
    except OutriderError as error:
        message, code = explain(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(code)
