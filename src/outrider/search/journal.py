"""Intermediate results of a search in a file, so that an interrupted search resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from outrider.errors import OutriderError
from outrider.files import earlier, is_device, locked, object_in, write_whole

SCHEMA = "outrider-tune/2"
Value = TypeVar("Value")


class JournalError(OSError):
    """The journal cannot be written."""


def is_finished(path: Path) -> bool:
    """Return whether the file is the journal of a search that has ended."""
    document = object_in(path)
    return document.get("schema") == SCHEMA and "result" in document


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Context manager: lock a journal. Raises ``OutriderError`` if it cannot, as while another search writes to it."""
    if is_device(path):
        yield
        return
    # Not the journal, which is replaced at each write. It stays: two processes could lock a deleted file and a new one.
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, f"another search is writing to {path}: wait for it, or give another --out or --json"):
        yield


class Journal:
    """JSON file of results. Each result is written immediately."""

    def __init__(self, path: Path | None, question: dict[str, Any], resume: bool = False) -> None:
        """``question``: all inputs that the results depend on; ``path``: None keeps the results in memory.

        Raises ``OutriderError`` if ``resume`` is set and the file is missing, invalid or has another ``question``.
        """
        self.path = path
        self.document: dict[str, Any] = {"schema": SCHEMA, "question": question, "seconds": {}, "found": {}}
        if resume:
            if path is None:
                raise OutriderError("--resume requires the file of an interrupted search, but there is none")
            self.document |= earlier(path, question, "question", "outrider tune")
            if self.document["schema"] != SCHEMA:
                raise OutriderError(f"--resume: {path} was written by another version of outrider tune: omit --resume")

    def has(self, stage: str, name: str) -> bool:
        """Return whether the named result is known."""
        return name in self.document["found"].get(stage, {})

    def once(self, stage: str, name: str, find: Callable[[], Value]) -> Value:
        """Return the named result; if it is missing, compute, time and store it. Results must be JSON-serialisable."""
        stored = self.document["found"].setdefault(stage, {})
        if name not in stored:
            started = perf_counter()
            found = find()
            stored[name] = json.loads(json.dumps(found))
            seconds = self.document["seconds"]
            seconds[stage] = round(seconds.get(stage, 0.0) + perf_counter() - started, 3)
            self.write()
        return stored[name]

    def write(self) -> None:
        """Write the file atomically. Raises ``JournalError``."""
        if self.path is None:
            return
        try:
            write_whole(self.path, json.dumps(self.document) + "\n")
        except OSError as error:
            raise JournalError(error.errno, error.strerror, str(self.path)) from None
