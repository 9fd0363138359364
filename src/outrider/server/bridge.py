"""One thread owns the engine; this is the bridge between it and asyncio. Whoever serves talks to the engine through it.

Knows requests and emissions, no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from outrider.engine.engine import refusal
from outrider.server.config import ANYONE, Client
from outrider.types import OutriderError, Request

if TYPE_CHECKING:
    from outrider.engine import LLM, Emission

logger = logging.getLogger(__name__)

IDLE = 1.0  # seconds after which a thread without work looks whether it should end


class Busy(OutriderError):
    """The queue is full; ``retry_after`` seconds from now it may not be."""

    def __init__(self, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(f"the server is busy: try again in {retry_after} s")


class Stopping(OutriderError):
    """The server finishes what it has and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Stream:
    """The emissions of one call's requests, as they come, until the last of them has ended. Close it in any case."""

    def __init__(self, bridge: EngineBridge, request_ids: Sequence[str], deadline: float) -> None:
        self._bridge = bridge
        self._open = set(request_ids)
        self._deadline = deadline
        self._emissions: asyncio.Queue[Emission] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Emission]:
        """Raises ``asyncio.TimeoutError`` at the deadline."""
        while self._open:
            emission = await asyncio.wait_for(self._emissions.get(), max(self._deadline - monotonic(), 0.0))
            if emission.finish_reason is not None:
                self._open.discard(emission.request_id)
            yield emission

    def put(self, emission: Emission) -> None:
        self._emissions.put_nowait(emission)

    def close(self) -> None:
        """Ends whatever still runs: its place is free within a round."""
        open_ids, self._open = self._open, set()
        if open_ids:
            self._bridge.cancel(open_ids)


class EngineBridge:
    """Runs an ``LLM``'s engine in a thread of its own. All methods but ``start`` are for the event loop's thread."""

    def __init__(self, llm: LLM, max_queue: int = 256) -> None:
        self.llm = llm
        self.max_queue = max_queue
        self.is_draining = False
        self.num_failures = 0  # steps that failed as a whole
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # of requests that have not ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._should_stop = threading.Event()
        self._seconds_per_end = 1.0  # running mean between two ends of requests
        self._last_end = monotonic()

    # --- from the event loop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to work, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; requests that still run end with it."""
        self.is_draining = True
        self._should_stop.set()
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests running or waiting."""
        return len(self._streams)

    def submit(self, samples: Sequence[Sequence[Request]], timeout: float, client: Client = ANYONE) -> Stream:
        """Queues the samples of each prompt; requests are those that ``Engine.check`` has let pass.

        Raises ``Stopping``, or ``Busy`` where the queue has no room for all of them.
        """
        requests = [request for group in samples for request in group]
        if self.is_draining:
            raise Stopping
        room = self.llm.engine.scheduler.max_batch + self.max_queue - self.num_open
        if len(requests) > room:
            raise Busy(self._retry_after(len(requests) - room))
        stream = Stream(self, [request.request_id for request in requests], monotonic() + timeout)
        for request in requests:
            self._streams[request.request_id] = stream
        self._commands.put(lambda: self._add(samples, client))
        return stream

    def cancel(self, request_ids: set[str]) -> None:
        """Ends requests; nothing more is heard of them."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        self._commands.put(lambda: self._abort(request_ids))

    def _deliver(self, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            stream = self._streams.get(emission.request_id)
            if stream is None:
                continue  # cancelled since
            if emission.finish_reason is not None:
                del self._streams[emission.request_id]
                now = monotonic()
                self._seconds_per_end += 0.2 * (min(now - self._last_end, 60.0) - self._seconds_per_end)
                self._last_end = now
            stream.put(emission)

    def _retry_after(self, num_lacking: int) -> int:
        """Whole seconds until so many requests will have ended, going by those that ended last."""
        return max(1, min(60, round(num_lacking * self._seconds_per_end)))

    # --- in the engine's thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self.llm.engine
        while not self._should_stop.is_set():
            self._obey(wait=not engine.has_work)
            if not engine.has_work:
                continue
            try:
                emissions = engine.step()
            except Exception as error:  # not one request's: the caches were dropped, so the next round begins anew
                self.num_failures += 1
                logger.exception("a round failed; its requests end")
                emissions = engine.fail_running(error)
            self._send(emissions)
        self._obey(wait=False)
        for entry in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(entry.request.request_id)

    def _obey(self, wait: bool) -> None:
        """Carries out what the event loop asked for meanwhile; waits for something to do where there is nothing."""
        try:
            command = self._commands.get(timeout=IDLE) if wait else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _add(self, samples: Sequence[Sequence[Request]], client: Client) -> None:
        failed = []
        for group in samples:
            for i, request in enumerate(group):
                try:
                    self.llm.engine.add(request, group[0].request_id if i else None, client.name, client.priority)
                except Exception as error:
                    logger.exception("request %s was not taken", request.request_id)
                    failed.append(refusal(request, error))
        self._send(failed)

    def _abort(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self.llm.engine.abort(request_id)

    def _send(self, emissions: Sequence[Emission]) -> None:
        if not emissions or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, emissions)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            self._should_stop.set()
