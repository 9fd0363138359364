"""Read benchmark documents, and label their cells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import printable
from outrider.registry import PLAIN
from outrider.types import OutriderError

Cell = Mapping[str, Any]
KEY = ("method", "k", "temperature", "batch", "workload", "busy")
LOOP_WARNING = 0.1  # share of plain decoding's tokens in loops that causes a warning


def is_plain(cell: Cell) -> bool:
    """Return whether the cell is of plain decoding, by method or by K = 0."""
    return bool(cell["method"] == PLAIN or cell["k"] == 0)


def headline(cell: Cell) -> Cell:
    """Return the cell to show first: with the results before loops, if any output loops."""
    before = cell["before_loops"]
    return {**cell, **before} if before else cell


def loop_warnings(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each condition in which more than ``LOOP_WARNING`` of plain decoding's tokens are in loops."""
    found = []
    for cell in cells:
        share = cell["loop_share"]
        if is_plain(cell) and share > LOOP_WARNING:
            kept = f"the tokens before loops, {cell['tokens_before_loops']} of {cell['tokens']}"
            about = kept if cell["before_loops"] else "text that loops from the start"
            found.append(
                f"{condition(cell)}: {share:.0%} of plain decoding's tokens are in loops, which are easy to draft; "
                f"the results shown are for {about}"
            )
    return found


def label(cell: Cell) -> str:
    """Return method and draft length as a label."""
    return PLAIN if is_plain(cell) else f"{cell['method']} k={cell['k']}"


def condition(cell: Cell) -> str:
    """Return workload, temperature, batch and busy processes as a label, without default values."""
    name = printable(str(cell["workload"]))
    name += f", t={cell['temperature']:g}" if cell["temperature"] else ""
    name += f", batch {cell['batch']}" if cell["batch"] != 1 else ""
    return name + (f", {cell['busy']} busy" if cell["busy"] else "")


def busy_label(num: int) -> str:
    """Return the number of other busy processes in words."""
    return f"{num} other busy process{'es' if num > 1 else ''}"


def read(path: Path) -> dict[str, Any]:
    """Read a document of ``outrider bench --out``. Raises ``OutriderError`` for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OutriderError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise OutriderError(f"{path} is not valid JSON: expected a file of `outrider bench --out`") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if isinstance(document, dict) and document.get("kind") == "serve":
        raise OutriderError(f"{path} was written by `outrider bench serve`: expected a file of `outrider bench --out`")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise OutriderError(f"{path} is not a benchmark document: expected a file of `outrider bench --out`")
    if not cells:
        raise OutriderError(f"{path} contains no measurements")
    return dict(document)


def at(cells: Sequence[Cell], **values: Any) -> list[Cell]:
    """Return the cells with these values."""
    return [cell for cell in cells if all(cell[name] == value for name, value in values.items())]


def distinct(cells: Sequence[Cell], name: str) -> list[Any]:
    """Return the distinct values of one key, in order."""
    return list(dict.fromkeys(cell[name] for cell in cells))
