"""The cache folder: compiled kernels and passes, packed weights, exports and inflated models, kept between runs.

What is found here is loaded as code. So, as ssh does with its keys, a folder or file that somebody else could have written is
refused, and every compiled file carries the hash of its content in its name, which is checked before the file is loaded.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from outrider.errors import OutriderError

logger = logging.getLogger(__name__)

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def lasting_dir(*parts: str) -> Path:
    """A writable folder of the cache, made with mode 0700 if missing, into which nobody but this user and root can write.

    The cache is ``$OUTRIDER_CACHE``, else ``$XDG_CACHE_HOME/outrider``, else ``~/.cache/outrider``. Raises ``OutriderError``,
    in one line, where there can be none.
    """
    try:
        folder = _root().joinpath(*parts)
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        problem = _unsafe(folder)
        if problem is None:
            with tempfile.TemporaryFile(dir=folder):  # tells more than the mode: a whole file system may be read-only
                return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        problem = _in_words(error)
    raise OutriderError(f"the cache folder cannot be used: {problem}")


def cache_dir(*parts: str) -> Path:
    """``lasting_dir``, or where there can be none, after one warning, a private folder that is removed with this process."""
    try:
        return lasting_dir(*parts)
    except OutriderError as error:
        return _instead(str(error), *parts)


def find(kind: str, key: str, suffix: str) -> Path | None:
    """The file that ``store`` put into the folder ``kind`` under this key; None where there is none that may be loaded.

    A file that is damaged or that others may write is removed, a folder that others may write is left alone: one warning each.
    """
    with suppress(RuntimeError, OSError):  # no home folder, or one that may not be looked into
        folder = _root() / kind
        problem = _unsafe(folder) if folder.is_dir() else None
        if problem is not None:
            _instead(f"the cache folder cannot be used: {problem}")
        else:
            found = _intact(folder, key, suffix)
            if found is not None:
                return found
    return _intact(_temporary_root() / kind, key, suffix) if _temporary_root.cache_info().currsize else None


def store(built: Path, kind: str, key: str, suffix: str) -> Path:
    """Copies a finished file into the folder ``kind`` under its key and the hash of its content, and returns the copy.

    A process or machine that stops in between leaves no half file: the copy is written aside, flushed to the disk and renamed.
    What another process has stored under the key since is kept and returned. Where the cache cannot be written, the copy is
    kept for this process alone. Raises ``OSError`` where not even that is possible.
    """

    def copy(to: BinaryIO) -> None:
        with built.open("rb") as file:
            shutil.copyfileobj(file, to)

    try:
        return write(kind, key, suffix, copy)
    except OutriderError as error:
        return _stored(copy, _instead(str(error), kind), key, suffix)


def write(kind: str, key: str, suffix: str, fill: Callable[[BinaryIO], None]) -> Path:
    """Stores what ``fill`` writes into a file, as ``store`` does, but only where it lasts.

    Raises ``OutriderError`` where the cache cannot be written.
    """
    try:
        return _stored(fill, lasting_dir(kind), key, suffix)
    except OSError as error:  # a full disk
        raise OutriderError(f"the cache folder cannot be used: {_in_words(error)}") from error


def discard(kind: str, key: str, suffix: str, keep: Path | None = None) -> None:
    """Removes the files of the folder ``kind`` whose key begins like this, except one; what cannot be removed stays."""
    with suppress(RuntimeError, OSError):
        for path in (_root() / kind).glob(f"{key}-*{suffix}"):
            if path != keep:
                path.unlink()


def _root() -> Path:
    """Raises ``RuntimeError`` where there is no home folder and nothing names another place."""
    own, shared = os.environ.get("OUTRIDER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(os.path.abspath(own or Path(shared or Path.home() / ".cache") / "outrider"))


def _in_words(error: Exception) -> str:
    place = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return f"{getattr(error, 'strerror', None) or error}{place}; OUTRIDER_CACHE names another one"


@cache
def _temporary_root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _instead(problem: str, *parts: str) -> Path:
    if not _temporary_root.cache_info().currsize:  # once a process
        logger.warning("%s; until then what is compiled is kept for this process alone", problem)
    folder = _temporary_root().joinpath(*parts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _unsafe(folder: Path) -> str | None:
    """Why others could put files into the folder, or another folder in its place, and what to do; None where they cannot."""
    if not hasattr(os, "getuid"):  # Windows, whose rights are not in the mode
        return None
    for path in _chain(folder):
        status = path.lstat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user (uid {status.st_uid}); OUTRIDER_CACHE names another one"
        is_sticky = path != folder and status.st_mode & stat.S_ISVTX  # as /tmp: entries are renamed by their owners alone
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & OTHERS_MAY_WRITE and not is_sticky:
            return f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w {path}"
    return None


def _chain(folder: Path) -> Iterator[Path]:
    """The folder, what stands above it, and the same behind symbolic links."""
    yield from dict.fromkeys(path for each in (folder, folder.resolve()) for path in (each, *each.parents))


def _intact(folder: Path, key: str, suffix: str) -> Path | None:
    for path in sorted(folder.glob(f"{key}-*{suffix}")):
        try:
            problem = _damage(path, suffix)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        if problem is None:
            return path
        logger.warning("%s %s: it is not loaded, but built anew", path, problem)
        with suppress(OSError):
            path.unlink()
    return None


def _damage(path: Path, suffix: str) -> str | None:
    """Why a file of the cache is not to be loaded; None where it is."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & OTHERS_MAY_WRITE):
        return "could have been written by others"
    if not path.name.endswith(f"-{_content_hash(path)}{suffix}"):
        return "is damaged"
    return None


def _content_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _stored(fill: Callable[[BinaryIO], None], folder: Path, key: str, suffix: str) -> Path:
    handle, part = tempfile.mkstemp(dir=folder, prefix=f".{key}-", suffix=".part")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        earlier = _intact(folder, key, suffix)
        if earlier is not None:
            return earlier
        path = folder / f"{key}-{_content_hash(Path(part))}{suffix}"
        os.replace(part, path)
        _flush_folder(folder)
        return path
    finally:
        Path(part).unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Makes a rename last over a power cut, where the system lets a folder be flushed."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
