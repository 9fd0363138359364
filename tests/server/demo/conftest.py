"""A tiny family on a track, and servers on free ports of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from tiny_folder import make_folder

from outrider.engine.llm import LLM
from outrider.server.config import ServerConfig
from outrider.server.demo import race
from outrider.server.demo.app import LIMITS, Demo
from outrider.server.demo.track import Track
from outrider.server.run import connections, listen

from ..served import TLS, until


@pytest.fixture(scope="package", autouse=True)
def patience() -> Iterator[None]:
    """Let races take long: other processes may use the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "MAX_SECONDS", 3600.0)
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create a target and its copy as draft, which is always accepted."""
    where = tmp_path_factory.mktemp("demo")
    return {name: str(make_folder(where / name, max_position_embeddings=512)) for name in ("target", "draft")}


@pytest.fixture(scope="session")
def track(folders: dict[str, str]) -> Track:
    llm = LLM(folders["target"], method="plain", max_batch=2, compile="never", verifier="rejection")
    return Track(llm, ["draft", "ngram"], folders["draft"])


class Server:
    """A running server and a client for it."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> httpx.Response:
        headers = {"content-type": kind}
        return httpx.request(method, self.url + path, content=body, headers=headers, timeout=60, verify=TLS)

    def race(self, **wanted: Any) -> Visit:
        return Visit(self.url, wanted)


class Visit:
    """One visitor's race: its events as they arrive, until the visitor leaves."""

    def __init__(self, url: str, wanted: dict[str, Any]) -> None:
        self._client = httpx.Client(timeout=60, verify=TLS)
        self.response = self._client.send(self._client.build_request("POST", url + "/api/race", json=wanted), stream=True)
        self._lines = self.response.iter_lines()

    def next(self) -> dict[str, Any] | None:
        return next((json.loads(line[6:]) for line in self._lines if line.startswith("data: ")), None)

    def rest(self) -> list[dict[str, Any]]:
        events = list(iter(self.next, None))
        self.leave()
        return events

    def leave(self) -> None:
        """Close the connection, as closing the tab does."""
        self.response.close()
        self._client.close()


@contextmanager
def serving(demo: Demo, **limits: float) -> Iterator[Server]:
    listening = listen("127.0.0.1", 0)
    config = ServerConfig(**LIMITS | limits)
    settings = connections(demo.app(config, "127.0.0.1"), config)
    settings.timeout_graceful_shutdown = 1
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started)
        yield Server(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
