"""What a work folder holds, so that an interrupted run goes on with its own parts and never with another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.runner import ModelRunner
from outrider.types import OutriderError

SAMPLED = 64  # numbers of each tensor that tell one target from another


def fingerprint(runner: ModelRunner) -> str:
    """Tells one target from another: its config, and some numbers of every tensor, since a fine-tune may change any of them."""
    model = runner.model
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    tensors = [tensor.detach().flatten() for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    weights = [flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].float().tolist() for flat in tensors]
    return hashlib.sha256(json.dumps([config, weights], sort_keys=True, default=str).encode()).hexdigest()[:16]


def digest(rows: Tensor) -> str:
    """Tells one text from another, by its rows of ids [R, S]."""
    return hashlib.sha256(rows.int().contiguous().numpy().tobytes()).hexdigest()[:16]


def claim(path: Path, about: Mapping[str, Any]) -> None:
    """Says in the file ``path`` what its folder is about. Raises ``OutriderError`` where it says something else already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = json.loads(json.dumps(about))  # as it will be read again: tuples are lists
    known = once(path, lambda: dict(about))
    odd = [key for key in about if known.get(key) != about[key]]
    if odd:
        raise OutriderError(
            f"{path.parent} holds a run with another {' and '.join(odd)}: name another folder (--work) or delete it"
        )


def once(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file holds; it is made first where it is not there."""
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(make(), indent=1) + "\n")
        partial.replace(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found
