"""Inflated targets for measurements: the same outputs at the cost of a larger model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from outrider.cli.options import ModelOptions
from outrider.errors import OutriderError
from outrider.family import TARGET
from outrider.files import expanded


def inflate_target(models: ModelOptions, size: str | None) -> tuple[ModelOptions, dict[str, Any]]:
    """Return options with the inflated target, and the fields that describe it in the results."""
    if size is None:
        return models, {}
    from outrider.bench.inflate import inflated

    source = expanded(models.target or TARGET)
    if not source.is_dir():
        raise OutriderError("--inflate requires a target in a local folder: download it first and give its folder")
    folder = inflated(source, size)
    note = json.loads((folder / "config.json").read_text())["outrider_inflated"]
    return replace(models, target=str(folder)), {"inflated": {"size": size, **note}}
