"""A tiny family, and servers for it that are tested with real clients."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import uvicorn
from tiny_folder import make_folder

from outrider import LLM
from outrider.server.app import create_app
from outrider.server.config import KeyRing, ServerConfig
from outrider.server.run import connections, listen
from outrider.server.service import Service

# unused, but httpx would otherwise create a context per call, which takes longer than the call
TLS = httpx.create_ssl_context()


class Served:
    """A server in a thread of this process."""

    def __init__(self, llm: LLM, config: ServerConfig, keys: KeyRing) -> None:
        self.llm = llm
        self._listener = listen("127.0.0.1", 0)
        address, port = self._listener.getsockname()
        app = create_app(llm, config, keys, address)
        self.service: Service = app.state.service
        self.url = f"http://{address}:{port}"
        settings = connections(app, config)
        settings.timeout_graceful_shutdown = 20
        self.server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self._listener]))

    def send(self, path: str, body: bytes | Iterator[bytes]) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=body, headers=headers, timeout=60, verify=TLS)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.send(path, json.dumps(body).encode())  # httpx would refuse to send an unpaired surrogate

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._listener.getsockname()[1]), timeout=10)

    def text(self, prompt: Any, **body: Any) -> str:
        answer = self.post("/v1/completions", prompt=prompt, **({"temperature": 0, "max_tokens": 24} | body))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        self._listener.close()
        assert not self._thread.is_alive()


def call(body: dict[str, Any]) -> bytes:
    """Return the bytes of a completion call, for a socket."""
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}"
    )
    return head.encode() + b"\r\n\r\n" + payload


def until(holds: Callable[[], Any], seconds: float = 30.0) -> None:
    """Poll until a condition holds that another thread causes."""
    deadline = monotonic() + seconds
    while not holds():
        assert monotonic() < deadline, "the condition did not hold in time"
        sleep(0.005)


@contextmanager
def serving(llm: LLM, keys: KeyRing | None = None, **config: Any) -> Iterator[Served]:
    served = Served(llm, ServerConfig(**config), keys or KeyRing())
    try:
        yield served
    finally:
        served.stop()


class Slow:
    """Delays each round of an engine until it is released."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate, step = threading.Semaphore(0), served.llm.engine.step
        self.num_rounds = 0
        self._open = False

        def held() -> Any:
            if not self._open:
                self._gate.acquire(timeout=20)
            self.num_rounds += 1
            return step()

        monkeypatch.setattr(served.llm.engine, "step", held)

    def rounds(self, count: int) -> None:
        self._gate.release(count)

    def go(self) -> None:
        self._open = True
        self._gate.release(100)


class ServedProcess:
    """``outrider serve`` as a separate process, which a test may leave in any state."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        lines = map(json.loads, (line for line in process.stderr if line.startswith("{")))
        self.ready: dict[str, Any] = next(lines)
        self.url = str(self.ready["url"])
        self.log: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=lambda: self.log.extend(lines), daemon=True)
        self.reader.start()

    def post(self, timeout: float, **body: Any) -> httpx.Response:
        asked = {"temperature": 0, "max_tokens": 24} | body
        return httpx.post(f"{self.url}/v1/completions", json=asked, timeout=timeout, verify=TLS)


@contextmanager
def serving_process(target: Path, *options: str) -> Iterator[ServedProcess]:
    command = [sys.executable, "-m", "outrider", "serve", "--target", str(target), "--port", "0", "--compile", "never"]
    with subprocess.Popen([*command, "--same-text", *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield ServedProcess(process)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "target", seed=0)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a draft that is often accepted, but not always."""
    return make_folder(tmp_path_factory.mktemp("models") / "draft", seed=0, num_hidden_layers=1)


@pytest.fixture(scope="session")
def load(target: Path, draft: Path) -> Callable[..., LLM]:
    """Return ``load("draft", k=3)`` -> an ``LLM`` of the tiny family."""

    def load(method: str = "draft", k: Any = 3, **options: Any) -> LLM:
        options = {"max_batch": 4, "compile": "never", "same_text": True} | options
        return LLM(target, draft=draft, method=method, num_draft_tokens=k, **options)

    return load


@pytest.fixture(scope="session")
def plain(load: Callable[..., LLM]) -> LLM:
    """Return the plain engine, the reference of all answers."""
    return load("plain", 0)


@pytest.fixture(scope="session")
def served(load: Callable[..., LLM]) -> Iterator[Served]:
    with serving(load()) as server:
        yield server
