"""Server process: socket, signals, logs, and a shutdown that lets running streams finish."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
import threading
from functools import partial
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from outrider.errors import OutriderError, without_path
from outrider.server.app import create_app
from outrider.server.bridge import EngineBridge
from outrider.server.config import KeyRing, ServerConfig, is_loopback
from outrider.server.connection import QuietAccepting, TimedProtocol
from outrider.server.gate import JsonLines

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from outrider.engine.llm import LLM

logger = logging.getLogger("outrider.server")

RESERVED_FILES = 128  # descriptors that are not for connections
CLOSING = 3.0  # seconds of the grace reserved for closing connections and stopping threads and processes


class GracefulServer(uvicorn.Server):
    """uvicorn server with a graceful shutdown: the first signal refuses new requests and lets running ones finish.

    A second signal ends the process immediately. Even if something hangs, it ends within ``grace`` seconds of the first one.
    """

    def __init__(self, config: uvicorn.Config, bridge: EngineBridge, facts: dict[str, Any], grace: float) -> None:
        """``grace``: maximum seconds from the first signal to the exit."""
        super().__init__(config)
        self._bridge, self._facts, self._grace = bridge, facts, grace
        self._closing = min(CLOSING, grace / 2)
        self._deadline: float | None = None  # for running responses; set by the first signal
        self.last_resort = threading.Timer(grace, self._end_late)
        self.last_resort.daemon = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Log the address once the server listens."""
        asyncio.get_running_loop().set_exception_handler(QuietAccepting())
        await super().startup(sockets)
        logger.info("ready", extra={"facts": self._facts})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown. Unlike uvicorn's, do not raise the signal again: a requested shutdown is not an error."""
        if self._deadline is not None:
            logger.warning("second signal received: exiting immediately")
            os._exit(128 + sig)
        else:
            self._bridge.is_draining = True
            self._deadline = monotonic() + self._grace - self._closing
            self.last_resort.start()

    def _end_late(self) -> None:
        logger.error("shutdown took longer than shutdown_grace (%g s): exiting immediately", self._grace)
        os._exit(1)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop listening. uvicorn asks ten times a second, then waits until answers are sent."""
        if self._deadline is not None:
            left = self._deadline - monotonic()
            self.config.timeout_graceful_shutdown = max(left, self._closing / 3)  # type: ignore[assignment]  # seconds
            if left <= 0:
                self._bridge.stop_streams()  # clients get an error, then there are none left
            self.should_exit |= left <= -self._closing / 3 or not self._bridge.num_open
        return await super().on_tick(counter)


def log_json() -> None:
    """Send all log records to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.getLogger().handlers[:] = [handler]
    package = logging.getLogger("outrider")
    package.handlers.clear()  # remove the plain-text handler used while loading
    package.propagate = True
    package.setLevel(min(package.getEffectiveLevel(), logging.INFO))  # --debug sets a lower one


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, opened before the model is loaded. Raises ``OutriderError`` if the address is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
        # Connections inherit TCP_NODELAY. asyncio sets it only on sockets with a protocol number, which create_server omits.
        # Without it, the data after a first chunk waits for a delayed acknowledgement, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
        why = without_path(error).partition(" (while")[0]  # the rest repeats the address
        raise OutriderError(f"cannot listen on {host} port {port} ({why}): choose another --port or --host") from None


def url_of(host: str, port: int) -> str:
    """Return the URL of a server on a host, which may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def most_connections() -> int:
    """Return the number of connections that leave descriptors of this process for its files and workers."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(limit - RESERVED_FILES, limit // 2)


def connections(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's configuration: no access log, and limits on headers, connections and their times."""
    times = {"header_timeout": config.header_timeout, "idle_timeout": config.idle_timeout}
    protocol = partial(TimedProtocol, max_connections=most_connections(), **times)
    return uvicorn.Config(
        app,
        http=cast("Any", protocol),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )


def serve(llm: LLM, config: ServerConfig, keys: KeyRing, listener: socket.socket) -> None:
    """Serve until a signal arrives. The process should exit afterwards: it is forced to when ``shutdown_grace`` is over."""
    host, port = listener.getsockname()[:2]
    app = create_app(llm, config, keys, host)
    if not is_loopback(host) and not len(keys):
        logger.warning("the server is reachable from other machines without an API key: set --api-keys")
    facts = {
        "url": url_of(host, port),
        "model": config.name,
        "method": llm.proposer.name,
        "drafter": llm.drafter,
        "max_len": llm.runner.max_len,
    }
    GracefulServer(connections(app, config), app.state.service.bridge, facts, config.shutdown_grace).run(sockets=[listener])
