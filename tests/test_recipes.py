"""Command lines of the recipes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

RECIPES = sorted(path.parent.name for path in (Path(__file__).parents[1] / "recipes").glob("*/__main__.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_has_a_help_page(name):
    app = importlib.import_module(f"recipes.{name}.__main__").app
    commands = getattr(typer.main.get_command(app), "commands", {"": None})
    for command in commands:
        shown = CliRunner().invoke(app, [*([command] if command else []), "--help"])
        assert shown.exit_code == 0 and "--help" in shown.output, (name, command, shown.output)
