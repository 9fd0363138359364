"""Queue of visitors: one races, the others wait in order of arrival."""

from __future__ import annotations

import asyncio
from types import TracebackType


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
        """Append a visitor and return the place, a context manager that frees it. Raises ``LineFull``."""
        if len(self._places) >= self.longest:
            raise LineFull
        place = Place(self)
        self._places.append(place)
        return place

    def ahead_of(self, place: Place) -> int:
        return self._places.index(place)

    def leave(self, place: Place) -> None:
        """Free a place; later visitors move up."""
        self._places.remove(place)
        for other in self._places:
            other.moved.set()


class Place:
    """One visitor's place, a context manager."""

    def __init__(self, line: WaitingLine) -> None:
        self._line = line
        self.moved = asyncio.Event()

    @property
    def ahead(self) -> int:
        """Number of visitors before this one; 0 if it is this visitor's turn."""
        return self._line.ahead_of(self)

    async def wait(self, seconds: float) -> None:
        """Wait until the place moves up, at most ``seconds``."""
        try:
            await asyncio.wait_for(self.moved.wait(), seconds)
        except TimeoutError:
            return
        self.moved.clear()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._line.leave(self)
