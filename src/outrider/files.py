"""Expand paths that users write, open text files, read JSON and documents of interrupted work, and write files atomically."""

from __future__ import annotations

import gzip
import json
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from outrider.errors import OutriderError, errors_as, without_path

ADAPTER_ADVICE = "merge it into its model first, with merge_and_unload of peft, and save that"
READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib.error)  # of ``open_text`` and of reading its file
GGUF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})")  # name without ending of a part of a split GGUF file: stem, number of parts


def expanded(source: str | Path) -> Path:
    """Return the path with ``~`` or ``~user`` replaced by the home folder; unchanged if there is no such user.

    Look for a user's path with ``os.path``: methods of ``Path`` raise ``OSError`` for a name that is too long.
    """
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


def is_path(source: str | Path) -> bool:
    """Return whether a source is written as a path, which a hub id is not."""
    return str(source).startswith((".", "/", "~"))


def not_a_model_folder(source: str | Path) -> str:
    """Say why a folder without a config.json cannot be loaded as a model."""
    if (expanded(source) / "adapter_config.json").is_file():
        return f"{source} is not a model folder: it is an adapter (LoRA); {ADAPTER_ADVICE}"
    is_like_a_hub_id = not is_path(source) and str(source).count("/") == 1
    advice = (
        f"; for the hub id {source}, rename the folder of that name, or run the command elsewhere" if is_like_a_hub_id else ""
    )
    return f"{source} is not a model folder: config.json is missing{advice}"


def open_text(path: Path) -> IO[str]:
    """Open a UTF-8 file, with or without a byte order mark, plain or ``.gz``."""
    return (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig")


def read_object(file: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ``OutriderError``, whose message begins with ``what``, if there is none."""
    with errors_as(f"{what}: {file.name} cannot be read", OSError, detail=without_path):
        content = file.read_bytes()
    with errors_as(f"{what}: {file.name} is not JSON", ValueError, RecursionError):
        found = json.loads(content)
    if not isinstance(found, dict):
        raise OutriderError(f"{what}: {file.name} must be an object, got a {type(found).__name__}")
    return found


def object_in(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is none: a broken file is reported when it is loaded."""
    try:
        return read_object(file, "")
    except OutriderError:
        return {}


def is_device(path: Path) -> bool:
    """Return whether a path exists but is no regular file, such as /dev/null."""
    return path.exists() and not path.is_file()


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, with the line ends of Unix, which scripts need. Links and devices are written to directly."""
    if path.is_symlink() or is_device(path):  # do not replace /dev/null by a file
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    with replaced(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def locked(file: Path, refusal: str) -> Iterator[None]:
    """Context manager: lock a file, created if missing. Raises ``OutriderError`` if it cannot be locked.

    ``refusal``: the message if another process has locked it.
    """
    import fcntl  # Windows lacks it, and every module imports this one

    with file.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutriderError(refusal) from None
        except OSError as error:
            advice = "write to a disk that supports locks"
            raise OutriderError(f"cannot lock {file} ({without_path(error)}): {advice}") from error
        yield


@contextmanager
def replaced(file: Path, mode: int = 0o666) -> Iterator[Path]:
    """Return the path of a temporary file that replaces ``file`` when the block ends, and is removed if it fails.

    ``mode``: its permissions, less the process's umask. Its name is random, because several processes and
    threads may write the same file, and others may write to its folder.
    """
    unfinished = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    unfinished.touch(mode, exist_ok=False)  # does not follow a link
    try:
        yield unfinished
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def earlier(path: Path, question: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
    """Return the JSON document of interrupted work. ``what``: the command that writes such documents.

    Raises ``OutriderError`` unless the document's entry ``key`` agrees with ``question``, the inputs of the work.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known, asked = found[key], json.loads(json.dumps(question))  # tuples become lists
        differing = [name for name in asked if asked[name] != known.get(name)]
    except OSError as error:
        raise OutriderError(f"--resume: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise OutriderError(f"--resume: {path} was not written by {what}") from None
    if differing:
        names = ", ".join(differing).replace("_", " ")
        raise OutriderError(f"--resume: {path} was made with other values of {names}: use the same or omit --resume")
    return found
