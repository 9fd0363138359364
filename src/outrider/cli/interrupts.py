"""Convert signals to exceptions: SIGTERM is handled like Ctrl-C, but interactive commands can distinguish the two."""

from __future__ import annotations

from types import FrameType
from typing import NoReturn

received: list[int] = []  # signals of this command; one during an import may surface as an ImportError


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, which ends the command; Ctrl-C may end only its current action."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM: raise ``Terminated``."""
    received.append(number)
    raise Terminated


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C as Python does by default."""
    received.append(number)
    raise KeyboardInterrupt
