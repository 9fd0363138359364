"""Command lines of the recipes."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from outrider.train.options import MedusaRun
from recipes import PACKAGE
from recipes.family import card as family_card
from recipes.family import stages
from recipes.family.config import PRESETS
from recipes.heads import card

RECIPES = sorted(path.parent.name for path in (Path(__file__).parents[1] / "recipes").glob("*/__main__.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_has_a_help_page(name):
    app = importlib.import_module(f"recipes.{name}.__main__").app
    commands = getattr(typer.main.get_command(app), "commands", {"": None})
    for command in commands:
        shown = CliRunner().invoke(app, [*([command] if command else []), "--help"])
        assert shown.exit_code == 0 and "--help" in shown.output, (name, command, shown.output)


def test_medusa_heads_of_an_earlier_edition_are_continued(monkeypatch):
    heads, found = importlib.import_module("recipes.heads.__main__"), []
    monkeypatch.setattr(heads, "train_medusa", lambda *given: found.append(given[-1]))
    monkeypatch.setattr(heads, "publish", lambda *_: None)
    at = SimpleNamespace(runner=SimpleNamespace(num_layers=14), features=lambda _: None, training_rows=list)
    heads.train("medusa", at, heads.Options(start=Path("earlier"), hardware="a CPU"))
    assert found == [MedusaRun(4, 3, start="earlier/medusa")]


def test_a_head_is_published_without_a_picture_of_its_curve(tmp_path, monkeypatch):
    """As without matplotlib."""
    (tmp_path / "head").mkdir()
    (tmp_path / "recipe").mkdir()
    monkeypatch.setattr(card, "__file__", str(tmp_path / "recipe" / "card.py"))
    curve = json.dumps([{"step": 1, "tokens": 96, "seconds": 60.0}])
    measured = json.dumps({"accuracies": [[0.5, 0.2, 0.1]]})
    for name, text in {"medusa_curve.json": curve, "measured.json": measured, "model.safetensors": ""}.items():
        (tmp_path / "head" / name).write_text(text)
    card.publish("medusa", tmp_path / "head", 3, "a CPU", False)
    assert (tmp_path / "recipe" / "medusa_curve.json").read_text() == curve
    assert "| 1 (2) | 50.0% | 80.0% |" in (tmp_path / "head" / "README.md").read_text()


def test_the_shipped_card_shows_the_stored_measurements():
    """Hardware, abilities, note and reading are arguments of the command."""
    folder = Path(stages.__file__).parent
    report = json.loads((folder / "report.json").read_text())
    curves = {name: json.loads((folder / f"{name}_curve.json").read_text()) for name in family_card.RUNS}
    made = family_card.render(PRESETS["gpu"], report, curves, family_card.Notes("@1@", "@2@", "@3@", "@4@"))
    text = (PACKAGE / "MODEL_CARD.md").read_text()
    assert re.fullmatch(re.sub("@[1-4]@", "(?s:.+?)", re.escape(made)), text)
    images = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(images) == 3 and all((PACKAGE / image).is_file() for image in images)


def test_a_card_shows_the_loss_against_tokens():
    def learned(losses):
        curve = [{"tokens": 1e6 * at, "loss": loss} for at, loss in enumerate(losses, 1)]
        return "\n".join(family_card.learning(curve))

    table = learned([4.0 - 0.1 * at for at in range(20)])
    assert "| million tokens | 2 | 4 |" in table and "| nats per token | 3.95 | 3.75 |" in table
    assert "| nats per token | 3.00 |" in learned([3.0])
