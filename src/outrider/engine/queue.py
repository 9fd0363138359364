"""Who is next: higher priorities first and, within one, each client in turn by the work that it asks for.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a client that asks for much waits longer than one that asks for little, and
one that asks for nothing saves nothing up. With one client it is first come, first served.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items that wait: requests for a place in the batch, texts and schemas for a worker."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, float, int, Item]] = []  # -priority, start tag, number: in order
        self._ends: dict[str, float] = {}  # client -> where its last item ends in the common time
        self._time = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        """In order: who is next comes first."""
        return (item for *_, item in self._waiting)

    def push(self, item: Item, cost: float, client: str, priority: int) -> None:
        """Queues an item after what its client has asked for before. ``cost`` is in any unit that all items share."""
        start = max(self._time, self._ends.get(client, 0.0))
        self._ends[client] = start + cost
        self._count += 1  # ties go to who came first; items themselves are never compared
        insort(self._waiting, (-priority, start, self._count, item))

    def serve(self, item: Item) -> None:
        """Takes out one whose turn it is."""
        self._time = next(start for _, start, _, each in self._waiting if each is item)
        self.remove(item)
        if not self._waiting:
            self._ends.clear()

    def remove(self, item: Item) -> None:
        """Takes out one that need not wait any longer."""
        self._waiting = [place for place in self._waiting if place[3] is not item]
