"""The cache folder: compiled kernels and passes, packed weights, passed self-checks, exports and inflated models.

Files of the cache are loaded as code. Therefore, as ssh does with keys, a folder or file that another user could have written
is rejected.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from outrider.errors import OutriderError, without_path
from outrider.files import replaced

logger = logging.getLogger(__name__)

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
PART_SECONDS = 24 * 3600  # since its last write; after this no process still writes a partial file
UNUSED_SECONDS = 60 * 24 * 3600  # files that were not used for so long belong to old code, models or versions


def lasting_dir(*parts: str) -> Path:
    """Return a folder of the cache that only this user and root can write, created with mode 0700 if missing.

    The cache is ``$OUTRIDER_CACHE``, else ``$XDG_CACHE_HOME/outrider``, else ``~/.cache/outrider``. Raises ``OutriderError`` if
    the folder cannot be created or written or is not safe.
    """
    try:
        folder = _root().joinpath(*parts)
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        problem = _unsafe(folder)
        if problem is None:
            with tempfile.TemporaryFile(dir=folder):  # the mode is not enough: the file system may be read-only
                return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        problem = _in_words(error)
    raise OutriderError(f"the cache folder cannot be used: {problem}")


def cache_dir(*parts: str) -> Path:
    """Return ``lasting_dir``; if it fails, warn once and return a private folder that is removed when this process exits."""
    try:
        return lasting_dir(*parts)
    except OutriderError as error:
        return _temporary_dir(str(error), *parts)


def find(kind: str, key: str, suffix: str) -> Path | None:
    """Return the file that ``store`` saved in the folder ``kind`` under this key; None if there is none that is safe to load.

    A file that other users can write is removed; a folder that they can write is ignored. Both are logged as warnings.
    """
    with suppress(RuntimeError, OSError):  # no home folder, or an unreadable one
        folder = _root() / kind
        problem = _unsafe(folder) if folder.is_dir() else None
        if problem is not None:
            _temporary_dir(f"the cache folder cannot be used: {problem}")
        else:
            found = _safe(folder / f"{key}{suffix}")
            if found is not None:
                return found
    return _safe(_temporary_root() / kind / f"{key}{suffix}") if _temporary_root.cache_info().currsize else None


def store(built: Path, kind: str, key: str, suffix: str) -> Path:
    """Copy a finished file into the folder ``kind``, named by its key; return the copy.

    The copy is written to a temporary file, flushed to the disk and renamed, so that a crash leaves no partial file. If the
    cache cannot be written, the copy is kept until this process exits. Raises ``OSError`` if that fails too.
    """

    def copy(to: BinaryIO) -> None:
        with built.open("rb") as file:
            shutil.copyfileobj(file, to)

    try:
        return write(kind, key, suffix, copy)
    except OutriderError as error:
        return _stored(copy, _temporary_dir(str(error), kind), key, suffix)


def write(kind: str, key: str, suffix: str, fill: Callable[[BinaryIO], None]) -> Path:
    """Store what ``fill`` writes, as ``store`` does, then delete files of this kind unused for ``UNUSED_SECONDS``.

    Raises ``OutriderError`` if the cache is not writable.
    """
    try:
        stored = _stored(fill, lasting_dir(kind), key, suffix)
    except OSError as error:  # a full disk
        raise OutriderError(f"the cache folder cannot be used: {_in_words(error)}") from error
    _discard_older(stored.parent.glob(f"*{suffix}"), UNUSED_SECONDS)
    return stored


def discard(kind: str, key: str, suffix: str, keep: Path | None = None) -> None:
    """Remove the files of the folder ``kind`` whose names start with this key, except ``keep``. Errors are ignored."""
    with suppress(RuntimeError, OSError):
        for path in (_root() / kind).glob(f"{key}*{suffix}"):
            if path != keep:
                path.unlink()


def _root() -> Path:
    """Return the cache folder. Raises ``RuntimeError`` if there is no home folder and no variable names another one."""
    own, shared = os.environ.get("OUTRIDER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(os.path.abspath(own or Path(shared or Path.home() / ".cache") / "outrider"))


def _in_words(error: Exception) -> str:
    place = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return f"{without_path(error)}{place}; set OUTRIDER_CACHE to use another one"


@cache
def _temporary_root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _temporary_dir(problem: str, *parts: str) -> Path:
    if not _temporary_root.cache_info().currsize:  # once per process
        logger.warning("%s; until then compiled files are kept for this process only", problem)
    folder = _temporary_root().joinpath(*parts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _unsafe(folder: Path) -> str | None:
    """Return why other users could write into or replace the folder, and what to do about it; None if they cannot."""
    if not hasattr(os, "getuid"):  # on Windows the mode does not contain the permissions
        return None
    for path in _chain(folder):
        status = path.lstat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user (uid {status.st_uid}); set OUTRIDER_CACHE to use another one"
        is_sticky = path != folder and status.st_mode & stat.S_ISVTX  # such as /tmp: only owners can rename entries
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & OTHERS_MAY_WRITE and not is_sticky:
            return f"other users can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); run chmod go-w {path}"
    return None


def _chain(folder: Path) -> Iterator[Path]:
    """Yield the folder and its parents, before and after resolving symbolic links."""
    yield from dict.fromkeys(path for each in (folder, folder.resolve()) for path in (each, *each.parents))


def _safe(path: Path) -> Path | None:
    """Return a file of the cache, marked as used; None if it is missing, or removed because others could have written it."""
    if not os.path.lexists(path):
        return None
    status = path.lstat()
    is_own = not hasattr(os, "getuid") or (status.st_uid in (os.getuid(), 0) and not status.st_mode & OTHERS_MAY_WRITE)
    if stat.S_ISREG(status.st_mode) and is_own:  # its folder was checked
        with suppress(OSError):  # a cache that cannot be written
            os.utime(path)
        return path
    logger.warning("%s is not a file or can be written by other users: it is removed and built again", path)
    with suppress(OSError):
        path.unlink()
    return None


def _discard_older(files: Iterable[Path], seconds: float) -> None:
    """Delete the files that were last changed longer ago than this. Errors are ignored: other processes do the same."""
    for file in files:
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > seconds:
                file.unlink()


def _stored(fill: Callable[[BinaryIO], None], folder: Path, key: str, suffix: str) -> Path:
    _discard_older(folder.glob("*.part"), PART_SECONDS)  # of processes that were killed
    path = folder / f"{key}{suffix}"
    with replaced(path, mode=0o600) as part, part.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    return path
