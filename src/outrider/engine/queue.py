"""Who is next: higher priorities first and, within one, each client in turn by the tokens that it asks for.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a client that asks for much waits behind one that asks for little, and one
that asks for nothing saves nothing up. With one client it is first come, first served.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.scheduler import Entry


class FairQueue:
    """Requests that wait."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, float, int, Entry]] = []  # -priority, start tag, number: in order
        self._ends: dict[str, float] = {}  # client -> where its last request ends in the common time
        self._time = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Entry]:
        """In order: who is next comes first."""
        return (entry for *_, entry in self._waiting)

    def push(self, entry: Entry, client: str, priority: int) -> None:
        """Queues a request behind what its client has asked for before."""
        start = max(self._time, self._ends.get(client, 0.0))
        self._ends[client] = start + entry.request.num_prompt_tokens + entry.max_tokens
        self._count += 1  # ties go to who came first; entries themselves are never compared
        insort(self._waiting, (-priority, start, self._count, entry))

    def serve(self, entry: Entry) -> None:
        """Takes out one whose turn it is."""
        self._time = next(start for _, start, _, each in self._waiting if each is entry)
        self.remove(entry)
        if not self._waiting:
            self._ends.clear()

    def remove(self, entry: Entry) -> None:
        """Takes out one that need not wait any longer."""
        self._waiting = [place for place in self._waiting if place[3] is not entry]
