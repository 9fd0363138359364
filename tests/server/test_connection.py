"""Idle connections are closed, and slow transfers count towards a call's time limit."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, sleep

import httpx
import pytest

from outrider import LLM
from outrider.server import run
from outrider.server.config import Client, KeyRing
from outrider.server.connection import QuietAccepting

from .served import Served, Slow, call, serving, until

CALL = call({"prompt": "def add(", "max_tokens": 3})
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def strict(load: Callable[..., LLM]) -> Iterator[Served]:
    with serving(load(), header_timeout=0.5, idle_timeout=1.0, request_timeout=1.5) as server:
        yield server


def closed_after(connection: socket.socket) -> tuple[float, bytes]:
    """Return the seconds until the server closes a connection, and the data received before."""
    started, said = monotonic(), b""
    while data := connection.recv(4096):
        said += data
    return monotonic() - started, said


def test_a_silent_connection_is_closed(strict: Served) -> None:
    with strict.connect() as connection:
        seconds, said = closed_after(connection)
    assert 0.3 < seconds < 3 and said == b""


def test_unfinished_headers_are_refused(strict: Served) -> None:
    with strict.connect() as connection:

        def drip() -> None:
            for byte in CALL[:80]:  # a part of the headers
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return
                sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        seconds, said = closed_after(connection)
    assert 0.3 < seconds < 3 and said.startswith(b"HTTP/1.1 408 ")


def test_a_second_call_has_the_same_header_timeout(strict: Served) -> None:
    with strict.connect() as connection:
        for _ in range(3):
            connection.sendall(GET)
            said = b""
            while not said.endswith(b"ok"):
                said += connection.recv(4096)
            assert b" 200 OK" in said
            sleep(0.7)  # longer than headers may take, shorter than a connection may be idle
        connection.sendall(GET[:20])
        seconds, said = closed_after(connection)
        assert 0.3 < seconds < 0.9 and b" 408 " in said
    with strict.connect() as connection:
        connection.sendall(GET + GET)  # the second is sent before the first is answered
        seconds, said = closed_after(connection)
        assert 0.8 < seconds < 3 and said.count(b"200 OK") == 2 and b" 408 " not in said


def test_a_body_that_comes_after_its_answer_starts_no_call(strict: Served) -> None:
    with strict.connect() as connection:
        connection.sendall(b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n")
        assert b" 404 " in connection.recv(4096)
        connection.sendall(b"later")
        seconds, rest = closed_after(connection)
    assert 0.3 < seconds < 3 and b" 408 " not in rest


def test_a_slow_body_is_not_idle_and_counts_as_the_calls_time(strict: Served) -> None:
    for pause, status in ((0.7, b" 200 "), (1.7, b" 504 ")):
        with strict.connect() as connection:
            connection.sendall(CALL[:-5])
            sleep(pause)
            connection.sendall(CALL[-5:])
            assert status in connection.recv(4096)


def test_an_unread_answer_is_aborted(load: Callable[..., LLM]) -> None:
    with serving(load(), idle_timeout=0.5, stream_interval=0) as server:
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = server.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": "x", "stream": True, "max_tokens": 200, "logprobs": 20, "ignore_eos": True}
        connection.sendall(call(body))
        until(lambda: server.service.bridge.num_open)
        until(lambda: not server.service.bridge.num_open)
        until(lambda: not server.server.server_state.connections, 5)
        connection.close()


@pytest.mark.parametrize(("limit", "most"), [(100, 50), (1024, 896), (resource.RLIM_INFINITY, sys.maxsize)])
def test_connections_leave_descriptors_for_files_and_workers(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert run.most_connections() == most


def test_connections_over_the_limit_are_closed(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "most_connections", lambda: 2)
    with serving(load("plain", 0)) as server, server.connect() as first, server.connect():
        until(lambda: len(server.server.server_state.connections) == 2)
        with server.connect() as third, suppress(ConnectionError):
            assert third.recv(1) == b""
        assert "ulimit -n" in caplog.text
        first.sendall(GET)
        assert b" 200 OK" in first.recv(4096)
        first.close()
        until(lambda: len(server.server.server_state.connections) == 1)
        with server.connect() as fourth:
            fourth.sendall(GET)
            assert b" 200 OK" in fourth.recv(4096)


def test_failed_accepts_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    quiet, loop = QuietAccepting(), asyncio.new_event_loop()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "too many open files")}
    with caplog.at_level(logging.ERROR):
        for _ in range(5000):
            quiet(loop, context)
        assert len(caplog.records) == 1 and "too many open files" in caplog.text
        quiet._last -= 61
        quiet(loop, context)
        assert "5000 failed attempts" in caplog.records[-1].getMessage()
        quiet(loop, {"message": "another"})
        assert caplog.records[-1].getMessage() == "another"
    loop.close()


def test_the_openapi_description_requires_a_key(load: Callable[..., LLM]) -> None:
    with serving(load(), KeyRing([("secret", Client())])) as server:
        assert httpx.get(server.url + "/openapi.json").status_code == 401
        assert httpx.get(server.url + "/openapi.json", headers={"authorization": "Bearer secret"}).status_code == 200


def test_ready_names_what_is_stalled(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(load(), stall_timeout=0.3) as server:

        def ready() -> tuple[int, str]:
            answer = httpx.get(server.url + "/ready")
            return answer.status_code, answer.text

        server.text("x")
        assert ready() == (200, "ready")
        slow = Slow(server, monkeypatch)
        with ThreadPoolExecutor() as callers:
            callers.submit(server.text, "x")
            until(lambda: ready()[0] == 503)
            assert "not ready: the engine has made no progress for" in ready()[1]
            slow.go()
        assert ready() == (200, "ready")
        texts, schemas = server.service.pools
        monkeypatch.setattr(type(texts), "stalled_seconds", 1.0)
        assert ready()[0] == 503 and "the workers have made no progress for 1 s" in ready()[1]
        monkeypatch.undo()
        schemas._start_error = "no memory"
        assert ready() == (503, "not ready: cannot start a process to compile a JSON schema: no memory")
