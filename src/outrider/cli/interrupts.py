"""Signals as exceptions: SIGTERM is handled like Ctrl-C, and an interactive command can tell it from Ctrl-C."""

from __future__ import annotations

from types import FrameType
from typing import NoReturn

received: list[int] = []  # signals of this command: an import that one breaks off may raise an ImportError in its place


class Terminated(KeyboardInterrupt):
    """SIGTERM: the command ends, where Ctrl-C may end only what it is doing."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM."""
    received.append(number)
    raise Terminated


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C as Python does by default."""
    received.append(number)
    raise KeyboardInterrupt
