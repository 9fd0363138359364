"""Identity of work folders, so that an interrupted run resumes only from its own files."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import first_line, is_out_of_memory
from outrider.files import locked, write_whole
from outrider.runner.forward import nameless_config
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

SAMPLED = 64  # sampled values per tensor that identify a target


def fingerprint(model: PreTrainedModel) -> str:
    """Return a fingerprint of a target: its config, and sampled values of every tensor, because a fine-tune may change any."""
    tensors = [tensor.detach().flatten() for tensor in (*model.parameters(), *model.buffers())]  # quantised ones hold integers
    samples = [flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED] for flat in tensors]
    weights = [(each.float() if each.is_floating_point() else each).tolist() for each in samples]
    return hashlib.sha256(json.dumps([nameless_config(model), weights], sort_keys=True, default=str).encode()).hexdigest()[:16]


def digest(rows: Tensor) -> str:
    """Return a fingerprint of a text from its rows of ids [R, S]."""
    return hashlib.sha256(rows.int().contiguous().numpy().tobytes()).hexdigest()[:16]


def check_or_record_identity(path: Path, about: Mapping[str, Any]) -> None:
    """Record a folder's identity in the file ``path``. Raises ``OutriderError`` if it already has another one."""
    about = json.loads(json.dumps(about))  # normalise as JSON: tuples become lists
    known = read_or_create_json(path, lambda: dict(about))
    odd = [key for key in about if known.get(key) != about[key]]
    if odd:
        raise OutriderError(
            f"{path.parent} belongs to a run with other {' and '.join(odd)}: give another folder (--work) or delete it"
        )


def read_or_create_json(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object in a file; make and write it if the file is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(make(), indent=1) + "\n")
    with damaged_file_errors(path):
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise TypeError("expected an object")
    return found


@contextmanager
def advise_to_resume() -> Iterator[None]:
    """Context manager: when interrupted, tell the user how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        logger.warning("progress is saved: repeat the command to resume")
        raise


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Context manager: lock a part of a work folder. Raises ``OutriderError`` if another process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"another run is writing to {folder}: wait for it, or give another --out and --work"
    with locked(folder / "lock", refusal):
        for pattern in ("*.pt.*.part", "*.safetensors.*.part"):  # of a run that was killed
            for leftover in folder.glob(pattern):
                leftover.unlink(missing_ok=True)
        yield


@contextmanager
def damaged_file_errors(file: Path) -> Iterator[None]:
    """Context manager: raise ``OutriderError`` with the name of a damaged or foreign file of an interrupted run."""
    try:
        yield
    except Exception as error:  # such files raise many kinds of exceptions
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        raise OutriderError(f"cannot resume from {file} ({first_line(error)}): delete it to start again") from error
