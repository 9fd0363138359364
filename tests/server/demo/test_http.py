"""The demo over HTTP with a track controlled by the test: queue, disconnects, limits and invalid input."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Generator, Iterator
from time import sleep
from typing import Any

import httpx
import pytest

from outrider.server.config import ServerConfig
from outrider.server.demo import app
from outrider.server.demo.app import Demo
from outrider.server.demo.track import MAX_PROMPT, RaceRequest
from outrider.types import OutriderError

from ..served import TLS, until
from .conftest import Server, serving

GOOD = {"prompt": "def f(", "method": "draft"}


class HandTrack:
    """A track whose races run until the test ends them."""

    is_lossless, is_same_text = True, False

    def __init__(self) -> None:
        self.methods = {"draft": 16}
        self.padding = ""
        self.may_end = threading.Event()
        self.racing: list[str] = []  # prompts
        self.closed: list[str] = []

    def encode(self, wanted: RaceRequest) -> list[int]:
        if wanted.method != "draft":
            raise OutriderError("no such method here")
        return [1, 2]

    def race(self, wanted: RaceRequest, prompt: list[int]) -> Generator[list[dict[str, object]], None, None]:
        try:
            self.racing.append(wanted.prompt)
            yield [{"type": "started"}]
            if wanted.prompt == "breaks":
                raise ValueError("secret detail")
            while not self.may_end.wait(0.01):
                yield [{"type": "round", "padding": self.padding}]
            yield [{"type": "finished"}]
        finally:
            self.closed.append(wanted.prompt)


@pytest.fixture
def track() -> Iterator[HandTrack]:
    track = HandTrack()
    yield track
    track.may_end.set()


@pytest.fixture
def demo(track: HandTrack, monkeypatch: pytest.MonkeyPatch) -> Demo:
    monkeypatch.setattr(app, "MAX_WAITING", 3)
    return Demo(track, {"target": "toy"})  # type: ignore[arg-type]


@pytest.fixture
def server(demo: Demo, track: HandTrack, request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(demo, **getattr(request, "param", {})) as server:
        yield server
        track.may_end.set()
    demo.close()


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "Invalid JSON"),
        (b"[1]", 400, "expected a JSON object"),
        (b"{}", 400, "prompt: missing; method: missing"),
        (b'{"prompt": "", "method": "draft"}', 400, "prompt: String should have at least 1 character"),
        (b'{"prompt": 3, "method": "draft"}', 400, "prompt: expected a valid string"),
        (b'{"prompt": "\\ud800", "method": "draft"}', 400, "Invalid JSON"),
        ({"prompt": "x" * (MAX_PROMPT + 1)}, 400, "prompt: String should have at most 4000 characters"),
        ({"method": "magic"}, 400, "no such method"),
        ({"num_draft_tokens": -1}, 400, "num_draft_tokens: expected a value greater than or equal to 0"),
        ({"num_draft_tokens": "many"}, 400, "num_draft_tokens: expected"),
        ({"num_draft_tokens": True}, 400, "num_draft_tokens: expected"),
        ({"temperature": 9}, 400, "temperature: expected a value less than or equal to 2"),
        (b'{"prompt": "a", "method": "draft", "temperature": NaN}', 400, "temperature: expected"),
        ({"seed": 10**400}, 400, "seed: "),
        ({"accuracy": 1.5}, 400, "accuracy: expected a value less than or equal to 1"),
        ({"max_tokens": 10**6}, 400, "max_tokens: expected a value less than or equal to 256"),
        ({"max_tokens": 2.5}, 400, "max_tokens: expected a valid integer"),
        ({"colour": "red"}, 400, "colour: unknown field"),
        (b"[" * 1900, 400, "Invalid JSON"),
        (b" " * 32_769, 413, "larger than 32768 bytes"),
    ],
)
def test_invalid_input_gives_one_line(server: Server, demo: Demo, body: Any, status: int, told: str) -> None:
    answer = server.ask("POST", "/api/race", body if isinstance(body, bytes) else json.dumps(GOOD | body).encode())
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and told in message and "\n" not in message
    assert len(demo.line) == 0


def test_a_visitor_who_leaves_during_the_upload_is_no_failure(demo: Demo, caplog: pytest.LogCaptureFixture) -> None:
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/race", "headers": headers, "query_string": b""}

    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    asyncio.run(demo.app(ServerConfig(), "127.0.0.1")(scope, left, asyncio.Queue().put))  # type: ignore[arg-type]
    assert not caplog.records


def test_other_types_paths_and_verbs_are_refused(server: Server) -> None:
    assert server.ask("POST", "/api/race", json.dumps(GOOD).encode(), "text/plain").status_code == 415
    assert server.ask("GET", "/api/race").status_code == 405
    assert server.ask("GET", "/page/%2e%2e/app.py").status_code == 404
    missing = server.ask("GET", "/nothing")
    assert missing.status_code == 404 and missing.json()["error"]


def test_the_page_loads_nothing_from_elsewhere(server: Server) -> None:
    page = server.ask("GET", "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text
    for name in ("main.js", "style.css", "icon.svg"):
        assert server.ask("GET", f"/page/{name}").status_code == 200
    about = server.ask("GET", "/api/about").json()
    assert about["target"] == "toy" and about["methods"] == {"draft": 16}


def test_visitors_race_in_order_and_see_their_position(
    server: Server, track: HandTrack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "HEARTBEAT", 0.1)  # a silent connection may be closed on the way
    first = server.race(**GOOD | {"prompt": "first"})
    assert first.next() == {"type": "started"}
    second = server.race(**GOOD | {"prompt": "second"})
    assert second.next() == second.next() == {"type": "waiting", "ahead": 1}
    third = server.race(**GOOD | {"prompt": "third"})
    assert third.next() == {"type": "waiting", "ahead": 2}
    track.may_end.set()
    for visit in (first, second, third):
        assert visit.rest()[-1] == {"type": "finished"}
    assert track.racing == ["first", "second", "third"]


def test_a_full_queue_refuses_with_retry_after(server: Server, track: HandTrack) -> None:
    visits = [server.race(**GOOD) for _ in range(3)]
    for visit in visits:
        visit.next()
    late = server.race(**GOOD)
    assert late.response.status_code == 429 and int(late.response.headers["Retry-After"]) > 0
    assert b"2 visitors are already waiting" in late.response.read()  # the first one races
    late.leave()
    track.may_end.set()
    for visit in visits:
        visit.rest()


def test_a_visitor_who_finds_the_queue_full_takes_no_time_of_the_engine(server: Server, track: HandTrack) -> None:
    visits = [server.race(**GOOD) for _ in range(3)]
    for visit in visits:
        visit.next()
    track.encode = lambda wanted: pytest.fail("tokenized")  # type: ignore[method-assign]
    late = server.race(**GOOD)
    assert late.response.status_code == 429
    late.leave()
    track.may_end.set()
    for visit in visits:
        visit.rest()


@pytest.mark.parametrize("server", [{"body_timeout": 0.1}], indirect=True)
def test_a_body_that_does_not_arrive_is_refused(server: Server) -> None:
    head = b"POST /api/race HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
        slow.sendall(head)
        assert b" 408 " in slow.recv(4096)


def test_other_hosts_are_refused_on_a_loopback_address(server: Server) -> None:
    answer = httpx.get(server.url + "/api/about", headers={"host": "evil.example"}, verify=TLS)
    assert answer.status_code == 403 and "expected localhost or a loopback address" in answer.json()["error"]["message"]


def test_a_tab_closed_during_its_race_frees_the_place(server: Server, track: HandTrack, demo: Demo) -> None:
    first = server.race(**GOOD | {"prompt": "first"})
    assert first.next() == {"type": "started"}
    second = server.race(**GOOD | {"prompt": "second"})
    assert second.next() == {"type": "waiting", "ahead": 1}
    first.leave()
    assert second.next() == {"type": "started"}
    assert track.closed == ["first"]
    second.leave()
    until(lambda: len(demo.line) == 0)
    until(lambda: track.closed == ["first", "second"])


@pytest.mark.parametrize("server", [{"idle_timeout": 0.5}], indirect=True)
def test_a_visitor_who_does_not_read_does_not_delay_others(server: Server, track: HandTrack) -> None:
    track.padding = "x" * 1_000_000
    body = json.dumps(GOOD | {"prompt": "silent"}).encode()
    head = (
        f"POST /api/race HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", server.port))
        silent.sendall(head.encode() + body)
        until(lambda: track.racing == ["silent"])
        second = server.race(**GOOD | {"prompt": "second"})
        assert second.next() == {"type": "waiting", "ahead": 1}
        until(lambda: track.racing == ["silent", "second"])
        assert track.closed == ["silent"]
        second.leave()


def test_a_tab_closed_in_the_queue_frees_the_place(server: Server, track: HandTrack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEARTBEAT", 120.0)  # others learn of it at once, and once
    first, second = server.race(**GOOD | {"prompt": "first"}), server.race(**GOOD | {"prompt": "second"})
    assert first.next() and second.next()
    third = server.race(**GOOD | {"prompt": "third"})
    assert third.next() == {"type": "waiting", "ahead": 2}
    second.leave()
    assert third.next() == {"type": "waiting", "ahead": 1}
    sleep(0.1)
    track.may_end.set()
    assert first.rest()[-1] == {"type": "finished"}
    assert [event["type"] for event in third.rest()] == ["started", "finished"]
    assert track.racing == ["first", "third"]


def test_a_failed_race_shows_no_internals_and_affects_no_other_visitor(server: Server, track: HandTrack) -> None:
    broken = server.race(**GOOD | {"prompt": "breaks"}).rest()
    assert broken[-1]["type"] == "error" and "secret" not in broken[-1]["message"]
    track.may_end.set()
    assert server.race(**GOOD).rest()[-1] == {"type": "finished"}
