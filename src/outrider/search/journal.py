"""Intermediate results of a search in a file, so that an interrupted search resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from outrider.files import locked, write_whole
from outrider.types import OutriderError

SCHEMA = "outrider-tune/2"
Value = TypeVar("Value")


class JournalError(OSError):
    """The journal cannot be written."""


def is_finished(path: Path) -> bool:
    """Return whether the file is the journal of a search that has ended."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return bool(document["schema"] == SCHEMA and "result" in document)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Context manager: lock a journal. Raises ``OutriderError`` if it cannot, as while another search writes to it."""
    if path.exists() and not path.is_file():  # /dev/null
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
        question = json.loads(json.dumps(question))
        self.document: dict[str, Any] = {"schema": SCHEMA, "question": question, "seconds": {}, "found": {}}
        if resume:
            self.document = self._earlier(question)

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

    def _earlier(self, question: dict[str, Any]) -> dict[str, Any]:
        if self.path is None:
            raise OutriderError("--resume requires the file of an interrupted search, but there is none")
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise KeyError
            differing = [name for name in question if question[name] != document["question"].get(name)]
            _check(document)
        except OSError as error:
            raise OutriderError(f"--resume: cannot read {self.path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise OutriderError(f"--resume: {self.path} is not a complete journal of this version of outrider tune") from None
        if differing:
            raise OutriderError(
                f"--resume: {self.path} was made with other values of {', '.join(differing).replace('_', ' ')}: use the same or"
                " omit --resume"
            )
        return dict(document)


def _check(document: Any) -> None:
    """Raise ``ValueError``, or another error of access, for a missing or wrong value in a journal."""
    stages = {**document["found"]}
    groups = stages.pop("recorded", {}).values()
    good = [isinstance(token, int) for group in groups for output in group for token in output]
    good += [seconds >= 0 for seconds in document["seconds"].values()]
    for run in (run for stage in stages.values() for run in stage.values()):
        good += [0 < run["seconds"] < inf, run["tau"] > 0]
        if "accepted" in run:
            good += [run["decode_seconds"] >= 0, run["first_tokens"] > 0, *(accepted >= 0 for accepted in run["accepted"])]
    if not all(good):
        raise ValueError
