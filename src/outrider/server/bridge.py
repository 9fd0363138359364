"""Bridge between asyncio and the thread that owns the engine.

Knows requests and emissions, no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from outrider.engine.engine import lost
from outrider.runner.compiled import without_building
from outrider.server.config import ANYONE, Client
from outrider.types import OutriderError, Request

if TYPE_CHECKING:
    from outrider.engine import LLM, Emission

logger = logging.getLogger(__name__)

Argument = TypeVar("Argument")
Result = TypeVar("Result")
IDLE = 1.0  # seconds after which an idle thread checks whether to stop


def load_aside(load: Callable[[], Result]) -> Result:
    """Call ``load`` in a thread that ends afterwards. Raises what ``load`` raises.

    OpenMP's worker threads belong to the thread that first used them and live as long as it does. If there are more of them
    than cores, they sleep between two operations of a pass instead of spinning, and waking them takes longer than most
    operations. So only the engine's thread may own some. An executor's thread is not used: Ctrl-C would wait for it.
    """
    result: Future[Result] = Future()

    def work() -> None:
        try:
            result.set_result(load())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="outrider-loading", daemon=True).start()
    return result.result()


class Busy(OutriderError):
    """The queue is full; retry after ``retry_after`` seconds."""

    def __init__(self, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(f"the server is busy: try again in {retry_after} s")


class Stopping(OutriderError):
    """The server accepts no new requests: it is shutting down, or its engine has failed."""

    def __init__(self, why: str = "the server is shutting down") -> None:
        super().__init__(why)


class Stream:
    """Iterate over the emissions of one call's requests until all have ended. Always close it.

    Emissions within ``interval`` seconds of the last chunk are held back and joined, except ends: a chunk costs server and
    client as much as several passes of a small model.
    """

    def __init__(self, bridge: EngineBridge, request_ids: Sequence[str], deadline: float, interval: float = 0.0) -> None:
        self._bridge = bridge
        self._open = set(request_ids)
        self._deadline, self._interval = deadline, interval
        self._held: dict[str, Emission] = {}  # by request
        self._due = 0.0  # time at which held emissions are sent
        self._timer: asyncio.TimerHandle | None = None
        self._woken = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Emission]:
        """Raises ``asyncio.TimeoutError`` at the deadline."""
        late = asyncio.get_running_loop().call_later(max(self._deadline - monotonic(), 0.0), self._woken.set)
        try:
            while self._open:
                await self._woken.wait()
                for emission in self._taken():
                    if emission.finish_reason is not None:
                        self._open.discard(emission.request_id)
                    yield emission
                if self._open and monotonic() >= self._deadline:
                    raise TimeoutError
        finally:
            late.cancel()

    def put(self, emission: Emission) -> None:
        before = self._held.get(emission.request_id)
        self._held[emission.request_id] = emission if before is None else before.followed_by(emission)
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

    def close(self) -> None:
        """End running requests; their slots are free within one round."""
        open_ids, self._open = self._open, set()
        if open_ids:
            self._bridge.cancel(open_ids)


class EngineBridge:
    """Runs an ``LLM``'s engine in its own thread. All methods except ``start`` must be called from the event loop's thread."""

    def __init__(self, llm: LLM, max_queue: int = 256, interval: float = 0.0) -> None:
        """``max_queue``: sequences that may wait; ``interval``: see ``Stream``."""
        self.llm = llm
        self.max_queue, self.interval = max_queue, interval
        self.is_draining = False
        self.num_failures = 0  # steps that failed as a whole
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # of requests that have not ended
        self._inside: set[str] = set()  # ids inside the engine; used by the engine's thread only
        self._has_broken = False
        self._last_move = monotonic()  # when the engine's thread last began something
        self._num_reserved = 0  # places of calls that are being prepared
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._should_stop = threading.Event()
        self._seconds_per_end = 1.0  # running mean between two ends of requests
        self._last_end = monotonic()

    # --- from the event loop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread; running requests end with it."""
        self.is_draining = True
        self._should_stop.set()
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and not self._has_broken

    @property
    def stalled_seconds(self) -> float:
        """How long the engine has been at one step; 0 while it has nothing to do."""
        return monotonic() - self._last_move if self.llm.engine.has_work else 0.0

    @property
    def num_open(self) -> int:
        """Requests running or waiting, and those that are being prepared."""
        return len(self._streams) + self._num_reserved

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Keeps places for so many requests while they are prepared; ``submit`` them within, if all goes well.

        Raises ``Stopping``, ``Busy`` where the queue has no room for them, ``OutriderError`` where it never will.
        """
        if self.is_draining:
            raise Stopping
        self._check_health()
        most = self.llm.engine.scheduler.max_batch + self.max_queue
        if count > most:
            raise OutriderError(f"too many sequences in one call: {count}; the limit is {most}")
        lacking = count - (most - self.num_open)
        if lacking > 0:
            raise Busy(self._retry_after(lacking))
        self._num_reserved += count
        try:
            yield
        finally:
            self._num_reserved -= count

    def submit(self, samples: Sequence[Sequence[Request]], deadline: float, client: Client = ANYONE) -> Stream:
        """Queue the samples of each prompt; requests must have passed ``Engine.check``.

        ``deadline``: by the monotonic clock. Raises ``Stopping`` where there is no engine any more.
        """
        self._check_health()
        requests = [request for group in samples for request in group]
        stream = Stream(self, [request.request_id for request in requests], deadline, self.interval)
        for request in requests:
            self._streams[request.request_id] = stream
        self._commands.put(lambda: self._add(samples, client))
        return stream

    def _check_health(self) -> None:
        if not self.is_healthy:
            raise Stopping("the engine has failed")

    def cancel(self, request_ids: set[str]) -> None:
        """Abort requests; they emit nothing more."""
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

    def _break(self, error: BaseException) -> None:
        """Fail all streams: the engine's thread has ended by itself."""
        self._has_broken = True
        self._deliver([lost(request_id, error) for request_id in self._streams])

    def _retry_after(self, num_lacking: int) -> int:
        """Estimate the seconds, rounded, until ``num_lacking`` requests have ended, from the last ones that ended."""
        return max(1, min(60, round(num_lacking * self._seconds_per_end)))

    # --- in the engine's thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with without_building():
                self._work()
        except BaseException as error:
            logger.exception("the engine's thread has ended")
            self._call(self._break, error)

    def _work(self) -> None:
        engine = self.llm.engine
        while not self._should_stop.is_set():
            self._last_move = monotonic()
            self._obey(wait=not engine.has_work)
            if not engine.has_work:
                continue
            self._last_move = monotonic()
            try:
                emissions = engine.step()
            except BaseException as error:  # not one request's fault, or a library's panic: caches were dropped and are rebuilt
                self.num_failures += 1
                logger.exception("a round failed; its requests were ended")
                emissions = self._failed(error)
            self._send(emissions)
        self._obey(wait=False)
        for entry in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(entry.request.request_id)

    def _failed(self, error: BaseException) -> list[Emission]:
        """End all running requests, including those whose end in this round was not reported yet."""
        engine = self.llm.engine
        emissions = engine.fail_running(error)
        told = {emission.request_id for emission in emissions}
        told |= {entry.request.request_id for entry in engine.scheduler.waiting}
        return emissions + [lost(request_id, error) for request_id in self._inside - told]

    def _obey(self, wait: bool) -> None:
        """Execute the event loop's commands; wait for one if the engine is idle."""
        try:
            command = self._commands.get(timeout=IDLE) if wait else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _add(self, samples: Sequence[Sequence[Request]], client: Client) -> None:
        refused = []
        for group in samples:
            for i, request in enumerate(group):
                try:
                    self.llm.engine.add(request, group[0].request_id if i else None, client.turn, client.priority)
                    self._inside.add(request.request_id)
                except Exception as error:
                    logger.exception("request %s was not accepted", request.request_id)
                    refused.append(lost(request.request_id, error))
        self._send(refused)

    def _abort(self, request_ids: set[str]) -> None:
        self._inside -= request_ids
        for request_id in request_ids:
            try:
                self.llm.engine.abort(request_id)
            except Exception:
                logger.exception("request %s was not ended cleanly", request_id)

    def _send(self, emissions: Sequence[Emission]) -> None:
        if emissions:
            self._inside -= {emission.request_id for emission in emissions if emission.finish_reason is not None}
            self._call(self._deliver, emissions)

    def _call(self, what: Callable[[Argument], None], argument: Argument) -> None:
        """Schedule a call in the event loop."""
        assert self._loop is not None  # start() came before the thread
        try:
            self._loop.call_soon_threadsafe(what, argument)
        except RuntimeError:  # the event loop is closed
            self._should_stop.set()
