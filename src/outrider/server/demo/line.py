"""Queue of visitors: one races, the others wait in order of arrival."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, suppress


class LineFull(Exception):
    """The queue is full."""


class WaitingLine:
    """Queue with at most ``longest`` places; the visitor at the first one races. For one event loop."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def join(self) -> Place:
        """Append a visitor and return the place. Raises ``LineFull``."""
        if len(self._places) >= self.longest:
            raise LineFull
        self._places.append(Place(self._places))
        return self._places[-1]


class Place(AbstractContextManager["Place"]):
    """One visitor's place, a context manager that frees it, so that later visitors move up."""

    def __init__(self, line: list[Place]) -> None:
        self._line, self._moved = line, asyncio.Event()

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
