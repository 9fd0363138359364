"""HTTP interface of the demo: the page, its requests, and races as server-sent events, one at a time.

All work with the engine runs in one separate thread; this module contains coroutines only.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.config import KeyRing, ServerConfig
from outrider.server.demo.race import Event
from outrider.server.demo.track import MAX_PROMPT, MAX_TOKENS, RaceRequest, Track
from outrider.server.gate import Gate, error_response
from outrider.server.mistakes import mistakes
from outrider.server.service import as_http_error
from outrider.types import OutriderError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

PAGE = Path(__file__).parent / "page"
# Of ``ServerConfig``: bytes of a request; seconds after which a visitor who does not read messages leaves the queue.
LIMITS: dict[str, Any] = {"max_body": 32_768, "idle_timeout": 10.0}
MAX_WAITING = 32  # visitors in the queue, the racing one included
HEARTBEAT = 2.0  # seconds between queue position updates
HEADERS = [
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


class Demo:
    """Routes and their shared state: the track, its thread, and the queue of visitors."""

    def __init__(self, track: Track, about: Mapping[str, Any]) -> None:
        """``about``: model description for the page."""
        self._track, self._about = track, dict(about)
        self.line: list[asyncio.Event] = []  # the places of visitors, each set when it moves up; the first one races
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="demo-engine")

    def app(self, config: ServerConfig, address: str) -> Starlette:
        """Return the application. ``address``: on which the server listens."""
        routes = [
            Route("/", self._index),
            Route("/api/about", self._describe),
            Route("/api/race", self._race, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        layers = [Middleware(with_headers), Middleware(Gate, config=config, keys=KeyRing(), address=address)]
        kinds: tuple[type[Exception], ...] = (HTTPException, OutriderError, ClientDisconnect)
        return Starlette(routes=routes, middleware=layers, exception_handlers=dict.fromkeys(kinds, on_error))

    async def _index(self, request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")

    async def _describe(self, request: Request) -> Response:
        limits = {"prompt_chars": MAX_PROMPT, "max_tokens": MAX_TOKENS}
        track = self._track
        of_track = {"methods": track.methods, "lossless": track.is_lossless, "same_text": track.is_same_text}
        return JSONResponse(self._about | of_track | {"limits": limits})

    async def _race(self, request: Request) -> ASGIApp:
        """Stream a race as events."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send application/json")  # pages of other sites cannot send it
        try:
            wanted = RaceRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise OutriderError(mistakes(error.errors())) from None
        return partial(self._stream, wanted)

    async def _stream(self, wanted: RaceRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events of a race. The visitor stays in the queue for as long as the connection lasts.

        A prompt is tokenized in the engine's thread, so only after the place is taken.
        """
        if len(self.line) >= MAX_WAITING:
            full = f"{MAX_WAITING - 1} visitors are already waiting: try again in a minute"
            raise HTTPException(429, full, {"Retry-After": "30"})
        with self._place() as place:
            prompt = await self._in_thread(lambda: self._track.encode(wanted))
            async with aclosing(self._events(place, wanted, prompt)) as events:
                await StreamingResponse(_written(events), media_type="text/event-stream")(scope, receive, send)

    @contextmanager
    def _place(self) -> Iterator[asyncio.Event]:
        """Hold a place at the end of the line."""
        place = asyncio.Event()
        self.line.append(place)
        try:
            yield place
        finally:
            self.line.remove(place)
            for later in self.line:
                later.set()

    async def _events(self, place: asyncio.Event, wanted: RaceRequest, prompt: list[int]) -> AsyncGenerator[Event, None]:
        """Yield the visitor's queue position, then the race. Closing the generator ends the race within one slice."""
        while ahead := self.line.index(place):
            yield {"type": "waiting", "ahead": ahead}
            with suppress(TimeoutError):
                await asyncio.wait_for(place.wait(), HEARTBEAT)
            place.clear()
        racing = self._track.race(wanted, prompt)
        try:
            while (events := await self._in_thread(lambda: next(racing, None))) is not None:
                for event in events:
                    yield event
        except OutriderError as error:
            yield {"type": "error", "message": str(error)}
        except Exception as error:
            logger.warning("a race failed: %s: %s", type(error).__name__, error, exc_info=logger.isEnabledFor(logging.DEBUG))
            yield {"type": "error", "message": "the race failed inside the engine; the server continues"}
        finally:
            self._thread.submit(racing.close)  # runs after the current slice, before the next visitor's

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Stop the engine thread after its current work."""
        self._thread.shutdown()


async def _written(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async for event in events:
        yield b"data: " + json.dumps(event, allow_nan=False).encode() + b"\n\n"


async def on_error(request: Request, error: Exception) -> Response:
    """Return an error in OpenAI's format, as ``outrider serve`` does."""
    return error_response(request.url.path, request.state.call, *as_http_error(error))


def with_headers(app: ASGIApp) -> ASGIApp:
    """Wrap an application: send headers against external resources and framing."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        await app(scope, receive, start)

    return wrapped
