"""A process that serves: a socket, signals, logs, and an end that lets running streams finish."""

from __future__ import annotations

import logging
import socket
import sys
from ipaddress import ip_address
from math import ceil
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from outrider.server.app import create_app
from outrider.server.bridge import EngineBridge
from outrider.server.config import KeyRing, ServerConfig
from outrider.server.gate import JsonLines
from outrider.types import OutriderError

if TYPE_CHECKING:
    from outrider.engine import LLM

logger = logging.getLogger("outrider.server")


class GracefulServer(uvicorn.Server):
    """At the first signal it takes nothing new, and says so, until its answers are finished; at the second it ends at once."""

    def __init__(self, config: uvicorn.Config, bridge: EngineBridge, facts: dict[str, Any], grace: float) -> None:
        """``grace``: seconds that running answers get."""
        super().__init__(config)
        self._bridge, self._facts, self._grace = bridge, facts, grace
        self._deadline: float | None = None  # from the first signal on

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens once it does."""
        await super().startup(sockets)
        logger.info("ready", extra={"facts": self._facts})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal that was obeyed is not raised again: an end that was asked for is no error."""
        if self._deadline is not None:
            self.force_exit = self.should_exit = True
        else:
            self._bridge.is_draining = True
            self._deadline = monotonic() + self._grace

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop listening: uvicorn asks ten times a second, and then waits until what is answered has been sent."""
        if self._deadline is not None:
            left = self._deadline - monotonic()
            self.config.timeout_graceful_shutdown = max(ceil(left), 1)
            self.should_exit |= left <= 0 or not self._bridge.num_open
        return await super().on_tick(counter)


def log_json() -> None:
    """Everything that is logged goes to standard error as JSON, a line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    ours = logging.getLogger("outrider")
    ours.handlers.clear()  # loading showed its notices as plain lines
    ours.propagate = True
    ours.setLevel(logging.INFO)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, to be taken before the seconds that loading takes. Raises ``OutriderError`` where there is none."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
        # Its connections inherit this. asyncio sets it only where a socket names its protocol, which create_server leaves out.
        # Without it, what follows a first chunk waits until that is acknowledged, and clients put that off for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]  # what follows is the address, once more
        raise OutriderError(f"cannot listen on {host} port {port} ({why}): choose another --port or --host") from None


def serve(llm: LLM, config: ServerConfig, keys: KeyRing, listener: socket.socket) -> None:
    """Serves until a signal ends it."""
    app = create_app(llm, config, keys)
    host, port = listener.getsockname()[:2]
    if not ip_address(host).is_loopback and not len(keys):
        logger.warning("everyone who reaches this machine can use the server: give it API keys")
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )
    name = f"[{host}]" if ":" in host else host
    facts = {"url": f"http://{name}:{port}", "model": config.name, "method": llm.proposer.name, "max_len": llm.runner.max_len}
    GracefulServer(settings, app.state.service.bridge, facts, config.shutdown_grace).run(sockets=[listener])
