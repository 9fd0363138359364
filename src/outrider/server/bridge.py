"""Connect asyncio code to the thread that owns the engine.

This module handles requests and emissions; it does not depend on HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from outrider.engine.engine import error_emission
from outrider.runner.compiled import without_building
from outrider.server.config import ANYONE, Client
from outrider.types import OutriderError, Request

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Emission

logger = logging.getLogger(__name__)

Argument = TypeVar("Argument")


class Busy(OutriderError):
    """The queue is full; the client may retry after ``retry_after`` seconds."""

    def __init__(self, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(f"the server is busy: try again in {retry_after} s")


class Stopping(OutriderError):
    """The server accepts no new requests: it is shutting down, or its engine has failed."""

    def __init__(self, why: str = "the server is shutting down") -> None:
        super().__init__(why)


class TargetFailed(OutriderError):
    """The target failed; the client did not cause it."""


class Stream:
    """Asynchronous iterator over the emissions of one call's requests, until all have ended. It must be closed.

    Emissions within ``interval`` seconds of the last chunk are merged into the next one, except final ones: sending a chunk
    costs as much time as several passes of a small model.
    """

    def __init__(
        self, bridge: EngineBridge, request_ids: Sequence[str], deadline: float, interval: float = 0.0, queue_key: str = ""
    ) -> None:
        """``queue_key``: ``Client.queue_key`` of the call's client."""
        self._bridge, self.queue_key = bridge, queue_key
        self._open = set(request_ids)
        self._deadline, self._interval = deadline, interval
        self._held: dict[str, Emission] = {}  # request id -> merged emission
        self._due = 0.0  # when to send the held emissions
        self.ping_due = math.inf  # when to yield None, in seconds of ``time.monotonic``
        self._timer: asyncio.TimerHandle | None = None
        self._woken = asyncio.Event()
        self._is_stopped = False

    async def __aiter__(self) -> AsyncIterator[Emission | None]:
        """Yield emissions, and None at ``ping_due``, which the caller then sets to a later time.

        Raises ``TimeoutError`` at the deadline, and ``Stopping`` after ``stop``.
        """
        loop = asyncio.get_running_loop()
        while self._open:
            wake = loop.call_later(min(self._deadline, self.ping_due) - monotonic(), self._woken.set)
            try:
                await self._woken.wait()
            finally:
                wake.cancel()
            for emission in self._taken():
                if emission.finish_reason is not None:
                    self._open.discard(emission.request_id)
                yield emission
            if not self._open:
                return
            if self._is_stopped:
                raise Stopping
            if monotonic() >= self._deadline:
                raise TimeoutError
            if monotonic() >= self.ping_due:
                yield None

    def put(self, emission: Emission) -> None:
        held = self._held.setdefault(emission.request_id, emission)
        if held is not emission:
            held.append(emission)
        left = self._due - monotonic()
        if emission.finish_reason is not None or left <= 0:
            self._woken.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(left, self._woken.set)

    def _taken(self) -> Iterable[Emission]:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, monotonic() + self._interval
        self._woken.clear()
        held, self._held = self._held, {}
        return held.values()

    def stop(self) -> None:
        """End the iteration with an error."""
        self._is_stopped = True
        self._woken.set()

    def close(self) -> None:
        """Cancel unfinished requests; their slots are free within one round."""
        open_ids, self._open = self._open, set()
        if open_ids:
            self._bridge.cancel(open_ids)


class EngineBridge:
    """Run an ``LLM``'s engine in its own thread. Call methods from the event loop's thread; any thread may read properties."""

    def __init__(self, llm: LLM, max_queue: int = 256, interval: float = 0.0) -> None:
        """``max_queue``: maximum number of waiting sequences; ``interval``: see ``Stream``."""
        self.llm = llm
        self.max_queue, self.interval = max_queue, interval
        self.is_draining = False
        self.num_failures = 0  # steps that failed for the whole batch
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # request id -> stream, for unfinished requests
        self._in_engine: set[str] = set()  # ids of requests in the engine; used by the engine thread only
        self._last_progress = monotonic()  # when the engine thread last started a step or a command
        self._preparing: Counter[str] = Counter()  # queue key -> sequences of calls that are still being prepared
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._should_stop = threading.Event()
        self._seconds_per_end = 1.0  # moving average of the time between two finished requests
        self._last_end = monotonic()

    # --- from the event loop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop the engine thread and abort running requests."""
        self.is_draining = True
        self._should_stop.set()
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive()

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the current step of the engine started; 0 if the engine is idle."""
        return monotonic() - self._last_progress if self.llm.engine.has_work else 0.0

    @property
    def num_open(self) -> int:
        """Number of requests that are running, waiting or being prepared."""
        return len(self._streams) + self._preparing.total()

    @contextmanager
    def reserve_places(self, count: int, client: Client) -> Iterator[None]:
        """Context manager that reserves queue space for ``count`` requests while they are prepared; ``submit`` them inside it.

        If there are several clients, one holds at most as many places as are free before its call: it cannot fill the queue
        alone (dynamic thresholds: Choudhury, Hahne 1998, with factor 1).

        Raises ``Stopping`` during shutdown, ``Busy`` if the queue is full, ``OutriderError`` if ``count`` exceeds its size.
        """
        if self.is_draining:
            raise Stopping
        self._check_health()
        most = self.llm.engine.scheduler.max_batch + self.max_queue
        if count > most:
            raise OutriderError(f"too many sequences in one call: {count}; the limit is {most}")
        free, key, held = most - self.num_open, client.queue_key, 0
        if key:
            held = self._preparing[key] + sum(stream.queue_key == key for stream in self._streams.values())
        lacking = count - (free - held)
        if lacking > 0:  # so many must finish before, at the recent rate
            raise Busy(max(1, min(60, round(lacking * self._seconds_per_end))))
        self._preparing[key] += count
        try:
            yield
        finally:
            self._preparing -= Counter({key: count})  # removes counts of 0

    def submit(self, samples: Sequence[Sequence[Request]], deadline: float, client: Client = ANYONE) -> Stream:
        """Queue the samples of each prompt. A request that the engine refuses ends with an error emission.

        ``deadline``: in seconds of ``time.monotonic``. Raises ``Stopping`` if the engine thread has stopped.
        """
        self._check_health()
        requests = [request for group in samples for request in group]
        stream = Stream(self, [request.request_id for request in requests], deadline, self.interval, client.queue_key)
        for request in requests:
            self._streams[request.request_id] = stream
        self._commands.put(lambda: self._add(samples, client))
        return stream

    def stop_streams(self) -> None:
        """End all streams with ``Stopping``."""
        for stream in {*self._streams.values()}:
            stream.stop()

    def _check_health(self) -> None:
        if not self.is_healthy:
            raise Stopping("the engine has failed")

    def cancel(self, request_ids: set[str]) -> None:
        """Abort requests; nothing more is emitted for them."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        self._commands.put(lambda: self._abort(request_ids))

    def _deliver(self, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            stream = self._streams.get(emission.request_id)
            if stream is None:
                continue  # cancelled in the meantime
            if emission.finish_reason is not None:
                del self._streams[emission.request_id]
                now = monotonic()
                self._seconds_per_end += 0.2 * (min(now - self._last_end, 60.0) - self._seconds_per_end)
                self._last_end = now
            stream.put(emission)

    def _fail_streams(self, error: BaseException) -> None:
        """Fail all streams after the engine thread has stopped unexpectedly."""
        self._thread.join()  # which has nothing left to do: from now on ``is_healthy`` is False
        self._deliver([error_emission(request_id, error) for request_id in self._streams])

    # --- in the engine thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with without_building():
                self._work()
        except BaseException as error:
            logger.exception("the engine thread has stopped")
            self._call(self._fail_streams, error)

    def _work(self) -> None:
        engine = self.llm.engine
        while not self._should_stop.is_set():
            self._run_commands(wait=not engine.has_work)
            if not engine.has_work:
                continue
            self._last_progress = monotonic()
            try:
                emissions = engine.step()
            except BaseException as error:  # e.g. a panic in a library; the engine rebuilds its caches
                self.num_failures += 1
                logger.exception("a round failed; its requests were ended")
                emissions = self._failed(error)
            self._send(emissions)
        self._run_commands(wait=False)
        for entry in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(entry.request.request_id)

    def _failed(self, error: BaseException) -> list[Emission]:
        """End all running requests, including those that finished in this round but were not reported yet."""
        engine = self.llm.engine
        emissions = engine.fail_running(error)
        known = {emission.request_id for emission in emissions}
        known |= {entry.request.request_id for entry in engine.scheduler.waiting}
        return emissions + [error_emission(request_id, error) for request_id in self._in_engine - known]

    def _run_commands(self, wait: bool) -> None:
        """Run commands from the event loop; if the engine is idle, wait for one."""
        try:
            command = self._commands.get(block=wait)
            while True:
                self._last_progress = monotonic()
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _add(self, samples: Sequence[Sequence[Request]], client: Client) -> None:
        refused = []
        for group in samples:
            for i, request in enumerate(group):
                try:
                    self.llm.engine.add(request, group[0].request_id if i else None, client.queue_key, client.priority)
                    self._in_engine.add(request.request_id)
                except BaseException as error:  # also a panic in a Rust library, such as the tokenizer's
                    logger.exception("request %s was not accepted", request.request_id)
                    refused.append(error_emission(request.request_id, error))
        self._send(refused)

    def _abort(self, request_ids: set[str]) -> None:
        self._in_engine -= request_ids
        for request_id in request_ids:
            try:
                self.llm.engine.abort(request_id)
            except BaseException:
                logger.exception("request %s was not ended cleanly", request_id)

    def _send(self, emissions: Sequence[Emission]) -> None:
        if emissions:
            self._in_engine -= {emission.request_id for emission in emissions if emission.finish_reason is not None}
            self._call(self._deliver, emissions)

    def _call(self, what: Callable[[Argument], None], argument: Argument) -> None:
        """Schedule a call in the event loop."""
        assert self._loop is not None  # set by start()
        try:
            self._loop.call_soon_threadsafe(what, argument)
        except RuntimeError:  # the event loop is closed
            self._should_stop.set()
