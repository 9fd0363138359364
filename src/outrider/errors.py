"""The error class for mistakes of the user, and what its messages are made of. Imports nothing else of Outrider."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

MAX_MESSAGE = 600  # characters of a message, which may quote a config or a file


class OutriderError(Exception):
    """A mistake of the user, explained in one line. The command line prints it and exits with code 2.

    Line breaks become spaces. A message longer than ``MAX_MESSAGE`` loses its middle: a quoted value may have any length, and
    the advice is at the end.
    """

    def __init__(self, message: str) -> None:
        line = one_line(message)
        half = MAX_MESSAGE // 2
        super().__init__(line if len(line) <= MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}")


class PromptTooLong(OutriderError):
    """The prompt leaves no room in the context. The message begins as clients expect that recognise it by its words."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an optional group of dependencies for this Python: Outrider is not on PyPI."""
    return f"run {shlex.quote(sys.executable)} -m pip install -e '.[{extra}]' in Outrider's folder"


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise ``OutriderError`` if a top-level module of an optional group is missing: as ``requires``, but without an import."""
    if find_spec(module) is None:
        raise OutriderError(f"{what} requires {module}: {how_to_install(extra)}")


@contextmanager
def requires(extra: str, what: str) -> Iterator[None]:
    """Context manager for imports: name the command that installs a missing or old package. ``what`` begins the sentence."""
    try:
        yield
    except ImportError as error:
        if error.name is None:  # transformers raises it for failures of its own modules
            raise
        raise OutriderError(f"{what} requires {error.name}: {how_to_install(extra)}") from error


def is_failure(error: BaseException) -> bool:
    """Return whether an error is not an interrupt: an ``Exception``, or a panic in a library written in Rust."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(text: str) -> str:
    """Replace line breaks and repeated spaces by single spaces."""
    return " ".join(text.split())


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that a name does not control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def check_text(text: str) -> None:
    """Raise ``OutriderError`` for text that cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OutriderError(f"invalid Unicode: unpaired surrogate at index {error.start}") from None


TARGET_FAILED = "the target failed"  # begins the error of a failure that is not the request's fault


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, on the CPU or on a GPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text


def without_path(error: BaseException) -> str:
    """Return the message of an exception that a file caused; the caller's message names the file."""
    if isinstance(error, UnicodeDecodeError):
        is_gzip = error.object.startswith(b"\x1f\x8b")
        return "expected UTF-8 text" + (", got gzip: its name must end in .gz" if is_gzip else "")
    return str(getattr(error, "strerror", None) or error)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, to be quoted in an ``OutriderError``; classes appear by name."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", line)[:300]


@contextmanager
def errors_as(what: str, *kinds: type[Exception], detail: Callable[[Exception], str] = first_line) -> Iterator[None]:
    """Context manager: raise exceptions of these kinds as an ``OutriderError`` that says ``what``, then their ``detail``."""
    try:
        yield
    except kinds as error:
        raise OutriderError(f"{what}: {detail(error)}") from error
