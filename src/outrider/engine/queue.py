"""Fair queue: higher priorities first; within a priority clients take turns, weighted by the work they request.

Self-clocked fair queueing (Golestani 1994): each item has a virtual time at which its client will have received it, and the
earliest is served first. A large request waits longer than a small one, also the first of a new client, and idle clients
accumulate no credit. With one client it is first come, first served.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
MAX_HELD_PER_FREE = 3  # places that a client may hold per free place: a single client gets three quarters of them


def exceeds_share(client: str, num_held: int, num_free: int) -> bool:
    """Return whether a client must leave the free places to others (dynamic thresholds: Choudhury, Hahne 1998).

    An empty name is not limited.
    """
    return bool(client) and num_held >= MAX_HELD_PER_FREE * num_free


@dataclass(slots=True, eq=False)
class _Place(Generic[Item]):
    """A waiting item."""

    priority: int
    end: float  # virtual time
    number: int  # breaks ties by arrival
    item: Item
    client: str
    cost: float

    def rank(self) -> tuple[int, float, int]:
        return -self.priority, self.end, self.number


class FairQueue(Generic[Item]):
    """Waiting items in the order in which they will be served."""

    def __init__(self) -> None:
        self._waiting: list[_Place[Item]] = []  # in the order of service; removed items are left out when it is next read
        self._places: dict[Item, _Place[Item]] = {}  # of the items that wait
        self._ends: dict[str, float] = {}  # client -> virtual time at the end of its last item
        self._time = 0.0  # virtual time at the end of the item served last
        self._count = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        """Iterate in the order of service."""
        return (place.item for place in self._in_order())

    def push(self, item: Item, client: str, priority: int, cost: float) -> None:
        """Queue an item after the earlier ones of its client. ``cost``: its work, in one unit for all items."""
        waiting = self._in_order()
        end = self._ends[client] = max(self._time, self._ends.get(client, 0.0)) + cost
        self._count += 1
        place = self._places[item] = _Place(priority, end, self._count, item, client, cost)
        insort(waiting, place, key=_Place.rank)

    def put_back(self, item: Item, client: str, priority: int) -> None:
        """Queue an item again that was served in vain: first of its priority, and at no further cost for its client."""
        waiting = self._in_order()
        self._count += 1
        place = self._places[item] = _Place(priority, 0.0, self._count, item, client, 0.0)
        insort(waiting, place, key=_Place.rank)

    def serve(self, item: Item) -> None:
        """Remove an item because it is served now."""
        waiting, served = self._in_order(), self._places.pop(item)
        self._time = max(self._time, served.end)  # an item of a lower priority may have waited until after all later ones
        waiting.remove(served)
        self._ends = {client: end for client, end in self._ends.items() if end > self._time}

    def remove(self, item: Item) -> None:
        """Remove an item, if it waits, without serving it: its client's later items wait as if it had never been queued."""
        self._places.pop(item, None)
        if len(self._waiting) > 2 * len(self._places):
            self._in_order()  # do not keep many removed items

    def _in_order(self) -> list[_Place[Item]]:
        """Return the places in the order of service, after one pass for all items removed since the last call.

        A call that ends may remove thousands of items in a row.
        """
        if len(self._waiting) == len(self._places):
            return self._waiting
        kept: list[_Place[Item]] = []
        freed: dict[str, float] = {}  # client -> work of its removed items so far
        for place in sorted(self._waiting, key=lambda place: place.number):
            before = freed.get(place.client, 0.0)
            if place.item not in self._places:
                freed[place.client] = before + place.cost
            else:
                place.end = min(place.end, max(self._time + place.cost, place.end - before))
                kept.append(place)
        self._waiting = sorted(kept, key=_Place.rank)
        self._ends |= dict.fromkeys(freed, 0.0)
        for place in kept:
            if place.client in freed:
                self._ends[place.client] = max(self._ends[place.client], place.end)
        return self._waiting
