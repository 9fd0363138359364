"""Queue of visitors: one races, the others wait in order of arrival."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, suppress


class Place(AbstractContextManager["Place"]):
    """A visitor's place at the end of a line, a context manager that frees it, so that later visitors move up.

    The visitor at the first place races. For one event loop.
    """

    def __init__(self, line: list[Place]) -> None:
        self._line, self._moved = line, asyncio.Event()
        line.append(self)

    @property
    def ahead(self) -> int:
        """Number of visitors before this one; 0 if it is this visitor's turn."""
        return self._line.index(self)

    async def wait(self, seconds: float) -> None:
        """Wait until the place moves up, at most ``seconds``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._moved.wait(), seconds)
        self._moved.clear()

    def __exit__(self, *error: object) -> None:
        self._line.remove(self)
        for other in self._line:
            other._moved.set()
