"""SIGTERM as an exception that is handled like Ctrl-C, and that an interactive command can tell from it."""

from __future__ import annotations

from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM: the command ends, where Ctrl-C may end only what it is doing."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM."""
    raise Terminated
