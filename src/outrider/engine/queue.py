"""Fair queue: higher priorities first; within a priority clients take turns, weighted by the work they request.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a client with large requests waits longer than one with small requests, and
idle clients accumulate no credit. With one client it is first come, first served.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Waiting items in the order in which they will be served."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, float, int, Item]] = []  # -priority, start tag, number: in order
        self._ends: dict[str, float] = {}  # client -> end tag of its last request
        self._time = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        """Iterate in the order of service."""
        return (item for *_, item in self._waiting)

    def push(self, item: Item, client: str, priority: int, cost: float) -> None:
        """Queue an item after the earlier ones of its client. ``cost``: its work, in one unit for all items."""
        start = max(self._time, self._ends.get(client, 0.0))
        self._ends[client] = start + cost
        self._count += 1  # breaks ties by arrival, so that items are never compared
        insort(self._waiting, (-priority, start, self._count, item))

    def serve(self, item: Item) -> None:
        """Remove an item because it is served now."""
        self._time = next(start for _, start, _, each in self._waiting if each is item)
        self.remove(item)
        self._ends = {client: end for client, end in self._ends.items() if end > self._time} if self._waiting else {}

    def remove(self, item: Item) -> None:
        """Remove an item without serving it."""
        self._waiting = [place for place in self._waiting if place[3] is not item]
