"""Visitors in line: one races, the others wait in the order in which they came."""

from __future__ import annotations

import asyncio
from types import TracebackType


class LineFull(Exception):
    """Nobody else can wait."""


class WaitingLine:
    """At most ``longest`` places, the first of which races. For one event loop."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def join(self) -> Place:
        """The last place, to be used in a ``with`` that gives it back. Raises ``LineFull``."""
        if len(self._places) >= self.longest:
            raise LineFull
        place = Place(self)
        self._places.append(place)
        return place

    def ahead_of(self, place: Place) -> int:
        return self._places.index(place)

    def leave(self, place: Place) -> None:
        """Frees a place, wherever it is; those behind it move up."""
        self._places.remove(place)
        for other in self._places:
            other.moved.set()


class Place:
    """One visitor's place, until its ``with`` ends."""

    def __init__(self, line: WaitingLine) -> None:
        self._line = line
        self.moved = asyncio.Event()

    @property
    def ahead(self) -> int:
        """Visitors before this one; 0: it is this one's turn."""
        return self._line.ahead_of(self)

    async def wait(self, seconds: float) -> None:
        """Until the place has moved up, or for so long."""
        try:
            await asyncio.wait_for(self.moved.wait(), seconds)
        except asyncio.TimeoutError:
            return
        self.moved.clear()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._line.leave(self)
