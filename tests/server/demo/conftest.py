"""A tiny family on a track, and servers on free ports of this machine."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tiny_folder import make_folder

from outrider.engine.llm import LLM
from outrider.server.demo import race
from outrider.server.demo.track import Track

race.MAX_SECONDS = 3600.0  # other processes may use the machine


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create a target and its copy as draft, which is always accepted."""
    where = tmp_path_factory.mktemp("demo")
    return {name: str(make_folder(where / name, max_position_embeddings=512)) for name in ("target", "draft")}


@pytest.fixture(scope="session")
def track(folders: dict[str, str]) -> Track:
    llm = LLM(folders["target"], method="plain", max_batch=2, compile="never")
    return Track(llm, ["draft", "ngram"], folders["draft"])


class Server:
    """A running server and a client for it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/"

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        answer = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        connection.close()
        return answer

    def race(self, **wanted: Any) -> Visit:
        return Visit(self.port, json.dumps(wanted).encode())


class Visit:
    """One visitor's race: its events as they arrive, until the visitor leaves."""

    def __init__(self, port: int, body: bytes) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("POST", "/api/race", body, {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        self.status = self._response.status
        self.headers = self._response.headers

    def next(self) -> dict[str, Any] | None:
        while line := self._response.readline():
            if line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line[6:])
                return event
        return None

    @property
    def body(self) -> str:
        """Return the whole body of a non-streamed response."""
        return self._response.read().decode()

    def rest(self) -> list[dict[str, Any]]:
        events = list(iter(self.next, None))
        self.leave()
        return events

    def leave(self) -> None:
        """Close the connection, as closing the tab does."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._connection.close()


@contextmanager
def serving(app: Any) -> Iterator[Server]:
    uvicorn = pytest.importorskip("uvicorn")
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started)
        yield Server(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Poll until a condition holds that another thread causes."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.01)
