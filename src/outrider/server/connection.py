"""HTTP/1.1 connections with timeouts for headers, idle keep-alive and unread responses."""

from __future__ import annotations

import asyncio
import errno
import logging
from time import monotonic
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LOG_INTERVAL = 60.0  # seconds between two log messages about connections that cannot be accepted
ACCEPTING = "socket.accept()"  # in the messages of asyncio about such connections


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with timeouts. ``state["arrived"]`` of each call is the time of its first byte."""

    def __init__(self, *args: Any, header_timeout: float, idle_timeout: float, max_connections: int, **options: Any) -> None:
        """``header_timeout``: seconds from a connection, or a call's first byte, to the end of the call's headers.

        ``idle_timeout``: maximum seconds between two calls, or with a response that the client does not read.
        ``max_connections``: of the server; further ones are closed at once.
        """
        super().__init__(*args, **options)
        self.timeout_keep_alive: float = idle_timeout  # type: ignore[assignment]
        self._header_timeout, self._idle_timeout, self._max_connections = header_timeout, idle_timeout, max_connections
        self._arrived: float | None = None  # time of the first byte of a call with incomplete headers
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
            error = OSError(errno.EMFILE, f"{self._max_connections} are open: raise the limit of descriptors (ulimit -n)")
            self.loop.call_exception_handler({"message": ACCEPTING, "exception": error})
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._arrived is None:
            self._arrived = monotonic()
            if self._headers_due is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_headers()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._arrived = None  # the data belonged to the body of the current call
        elif self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._arrived = None  # it was the rest of a body that was answered before it came

    def handle_events(self) -> None:
        """Record the arrival time of a new call. uvicorn also calls this after a response, for pipelined calls."""
        before = self.cycle
        self.app_state["arrived"] = self._arrived or monotonic()
        super().handle_events()
        if self.cycle is not before and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(self._idle_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._reading_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self._header_timeout, self._refuse)

    def _refuse(self) -> None:
        if self._arrived is not None:
            self.transport.write(REQUEST_TIMEOUT)
        self.transport.close()


class QuietAccepting:
    """Event-loop exception handler that logs failures to accept connections, thousands per second, once a minute."""

    def __init__(self) -> None:
        self._last = -LOG_INTERVAL
        self._count = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if ACCEPTING not in str(context.get("message")):
            loop.default_exception_handler(context)
            return
        self._count += 1
        if monotonic() - self._last >= LOG_INTERVAL:
            logger.error("cannot accept connections: %s (%d failed attempts)", context.get("exception"), self._count)
            self._last, self._count = monotonic(), 0
