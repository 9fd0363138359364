"""Expand paths that users write, and write files atomically."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(source: str | Path) -> Path:
    """Return the path with ``~`` or ``~user`` replaced by the home folder; unchanged if there is no such user."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. Links and devices are written to directly."""
    if path.is_symlink() or (path.exists() and not path.is_file()):  # do not replace /dev/null by a file
        path.write_text(text, encoding="utf-8")
        return
    partly = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partly.write_text(text, encoding="utf-8")
        partly.replace(path)
    finally:
        partly.unlink(missing_ok=True)
