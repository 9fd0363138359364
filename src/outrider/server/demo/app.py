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
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.config import ServerConfig, host_error
from outrider.server.demo.race import Event
from outrider.server.demo.track import MAX_PROMPT, MAX_TOKENS, RaceRequest, Track
from outrider.server.mistakes import mistakes
from outrider.types import OutriderError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

PAGE = Path(__file__).parent / "page"
MAX_BODY = 32_768  # bytes of a request
BODY_SECONDS = 30.0  # until a request must be complete
MAX_WAITING = 32  # visitors in the queue, the racing one included
HEARTBEAT = 2.0  # seconds between queue position updates
UNREAD = 10.0  # seconds until a visitor who does not read messages leaves the queue
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Demo:
    """Routes and their shared state: the track, its thread, and the queue of visitors."""

    def __init__(self, track: Track, about: Mapping[str, Any]) -> None:
        """``about``: model description for the page."""
        self._track, self._about = track, dict(about)
        self.line: list[asyncio.Event] = []  # the places of visitors, each set when it moves up; the first one races
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="demo-engine")

    def app(self, host: str = ServerConfig.host, address: str = ServerConfig.host) -> ASGIApp:
        """Return the application. ``host``: as configured; ``address``: on which the server listens."""
        routes = [
            Route("/", self._index),
            Route("/api/about", self._tell),
            Route("/api/race", self._race, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        kinds: tuple[type[Exception], ...] = (HTTPException, OutriderError, ClientDisconnect, Exception)
        return with_headers(Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, on_error)), host, address)

    async def _index(self, request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")

    async def _tell(self, request: Request) -> Response:
        limits = {"prompt_chars": MAX_PROMPT, "max_tokens": MAX_TOKENS}
        track = self._track
        of_track = {"methods": track.methods, "lossless": track.is_lossless, "same_text": track.is_same_text}
        return JSONResponse(self._about | of_track | {"limits": limits})

    async def _race(self, request: Request) -> ASGIApp:
        """Stream a race as events."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send application/json")  # pages of other sites cannot send it
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(request)
            wanted = RaceRequest.model_validate_json(body)
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time") from None
        except ValidationError as error:
            raise OutriderError(mistakes(error.errors())) from None
        return partial(self._stream, wanted)

    async def _stream(self, wanted: RaceRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events of a race. The visitor stays in the queue for as long as the connection lasts.

        A prompt is tokenized in the engine's thread, so only after the place is taken.
        """
        if len(self.line) >= MAX_WAITING:
            full = f"{MAX_WAITING - 1} visitors are already waiting: try again in a minute"
            await refusal(full, 429, {"Retry-After": "30"})(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), UNREAD)

        with self._place() as place:
            prompt = await self._in_thread(lambda: self._track.encode(wanted))
            async with aclosing(self._events(place, wanted, prompt)) as events:
                stream = StreamingResponse(_written(events), media_type="text/event-stream")
                try:
                    await stream(scope, receive, send_in_time)
                except (TimeoutError, ClientDisconnect):
                    logger.info("a visitor stopped reading: the next one starts")

    async def _body(self, request: Request) -> bytes:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"the body is longer than {MAX_BODY} bytes")
        return body

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


def refusal(message: str, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Return an error of the client as one line; any other one says that the server failed."""
    if isinstance(error, HTTPException):
        return refusal(error.detail, error.status_code, error.headers)
    is_client = isinstance(error, (OutriderError, ClientDisconnect))
    return refusal(str(error), 400) if is_client else refusal("the server failed", 500)


def with_headers(app: ASGIApp, host: str, address: str) -> ASGIApp:
    """Wrap an application: refuse other hosts (``host_error``), and send headers against external resources and framing."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        why = host_error(Headers(scope=scope).get("host"), address, host)
        await (app if why is None else refusal(why, 403))(scope, receive, start)

    return wrapped
