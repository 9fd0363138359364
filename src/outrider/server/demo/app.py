"""HTTP interface of the demo: the page, its requests, and races as server-sent events, one at a time.

All work with the engine runs in one separate thread; this module contains coroutines only.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.demo.race import Event
from outrider.server.demo.track import MAX_PROMPT, MAX_TOKENS, RaceRequest, Track
from outrider.server.mistakes import mistakes
from outrider.types import OutriderError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

PAGE = Path(__file__).parent / "page"
MAX_BODY = 32_768  # bytes of a request
MAX_WAITING = 32  # visitors in the queue, the racing one included
HEARTBEAT = 2.0  # seconds between queue position updates
UNREAD = 10.0  # seconds until a visitor who does not read messages leaves the queue
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Place(AbstractContextManager["Place"]):
    """A visitor's place at the end of a line, a context manager that frees it, so that later visitors move up.

    The visitor at the first place races. For one event loop.
    """

    def __init__(self, line: list[Place]) -> None:
        self._line, self._moved = line, asyncio.Event()
        line.append(self)

    @property
    def ahead(self) -> int:
        """Number of visitors before this one; 0 if it is this visitor's turn."""
        return self._line.index(self)

    async def wait(self, seconds: float) -> None:
        """Wait until the place moves up, at most ``seconds``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._moved.wait(), seconds)
        self._moved.clear()

    def __exit__(self, *error: object) -> None:
        self._line.remove(self)
        for other in self._line:
            other._moved.set()


class Demo:
    """Routes and their shared state: the track, its thread, and the queue of visitors."""

    def __init__(self, track: Track, about: Mapping[str, Any]) -> None:
        """``about``: model description for the page."""
        self._track, self._about = track, dict(about)
        self.line: list[Place] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="demo-engine")

    def app(self) -> ASGIApp:
        """Return the application."""
        routes = [
            Route("/", self._index),
            Route("/api/about", self._tell),
            Route("/api/race", self._race, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        kinds: tuple[type[Exception], ...] = (HTTPException, OutriderError, ClientDisconnect, Exception)
        return with_headers(Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, explained)))

    async def _index(self, request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")

    async def _tell(self, request: Request) -> Response:
        limits = {"prompt_chars": MAX_PROMPT, "max_tokens": MAX_TOKENS}
        of_track = {"methods": self._track.methods, "lossless": self._track.is_lossless}
        return JSONResponse(self._about | of_track | {"limits": limits, "waiting": len(self.line)})

    async def _race(self, request: Request) -> ASGIApp:
        """Stream a race as events. Invalid requests are refused before the visitor is queued."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send application/json")  # pages of other sites cannot send it
        try:
            wanted = RaceRequest.model_validate_json(await self._body(request))
        except ValidationError as error:
            raise OutriderError(mistakes(error.errors())) from None
        prompt = await self._in_thread(lambda: self._track.encode(wanted))
        return RaceStream(self, wanted, prompt)

    async def _body(self, request: Request) -> bytes:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"the body is longer than {MAX_BODY} bytes")
        return body

    async def events(self, place: Place, wanted: RaceRequest, prompt: list[int]) -> AsyncGenerator[Event, None]:
        """Yield the visitor's queue position, then the race. Closing the generator ends the race within one slice."""
        while place.ahead:
            yield {"type": "waiting", "ahead": place.ahead}
            await place.wait(HEARTBEAT)
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


class RaceStream:
    """Response of a race. The visitor stays in the queue for as long as the connection lasts."""

    def __init__(self, demo: Demo, wanted: RaceRequest, prompt: list[int]) -> None:
        self._demo, self._wanted, self._prompt = demo, wanted, prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._demo.line) >= MAX_WAITING:
            full = f"{MAX_WAITING} visitors are already waiting: try again in a minute"
            await refusal(full, 429, {"Retry-After": "30"})(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), UNREAD)

        with Place(self._demo.line) as place:
            async with aclosing(self._demo.events(place, self._wanted, self._prompt)) as events:
                stream = StreamingResponse(_written(events), media_type="text/event-stream")
                try:
                    await stream(scope, receive, send_in_time)
                except (TimeoutError, ClientDisconnect):
                    logger.info("a visitor stopped reading: the next one starts")


async def _written(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async for event in events:
        yield b"data: " + json.dumps(event, allow_nan=False).encode() + b"\n\n"


def refusal(message: str, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


async def explained(request: Request, error: Exception) -> Response:
    """Return an error of the client as one line; any other one says that the server failed."""
    if isinstance(error, HTTPException):
        return refusal(error.detail, error.status_code, error.headers)
    is_client = isinstance(error, (OutriderError, ClientDisconnect))
    return refusal(str(error), 400) if is_client else refusal("the server failed", 500)


def with_headers(app: ASGIApp) -> ASGIApp:
    """Wrap an application to send headers against external resources, caching and framing."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await app(scope, receive, start if scope["type"] == "http" else send)

    return wrapped
