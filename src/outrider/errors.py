"""The error that explains a user's mistake. This module imports nothing of Outrider."""

from __future__ import annotations

import re


class OutriderError(Exception):
    """A mistake of the user that one clear line explains: the command line prints it and exits with code 2."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, for the message of an ``OutriderError``. Classes are shown by their names."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", line)[:300]
