"""Failures and misuse affect only the client that causes them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from bench.load import virtual
from fastapi import Request, Response
from pydantic import ValidationError

from outrider import LLM, SamplingParams, native
from outrider.engine.logprobs import TokenLogprobs
from outrider.engine.outputs import Emission
from outrider.engine.stats import GenerationStats
from outrider.runner import compiled
from outrider.server.app import Deferred
from outrider.server.bridge import Busy, EngineBridge, Stream
from outrider.server.completions import CompletionBody
from outrider.server.config import Client, KeyRing, host_error
from outrider.server.gate import CLOSED, JsonLines
from outrider.server.grammar import GrammarCompiler
from outrider.server.protocol import ChatBody, StreamOptions
from outrider.server.responses import ResponseBody
from outrider.server.run import GracefulServer, listen
from outrider.server.service import EventStream, RunningAnswer, _whole
from outrider.types import OutriderError, Proposal

from .served import TLS, Served, Slow, call, serving, until

PROMPT = "def add(first, second):"
LONG = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
ENDED = 'vllm:request_success_total{finished_reason="length",model_name="outrider"}'


def wanted(plain: LLM, prompt: str = PROMPT, **params: Any) -> str:
    return plain.generate(prompt, SamplingParams(**({"max_tokens": 24} | params)))[0].outputs[0].text


def counts(server: Served) -> dict[str, float]:
    """Return the values of the server's metrics."""
    lines = httpx.get(server.url + "/metrics", verify=TLS).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


@pytest.fixture(scope="module")
def small(load: Callable[..., LLM]) -> Iterator[Served]:
    """A server with low limits."""
    with serving(load(max_batch=1), max_queue=1, max_body=3000, request_timeout=60.0, body_timeout=0.5) as server:
        yield server


def test_a_disconnect_frees_the_slot_within_a_round(small: Served, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, scheduler = Slow(small, monkeypatch), small.llm.engine.scheduler
    for path in ("stream", "whole"):
        with small.connect() as connection:
            connection.sendall(call({"prompt": PROMPT, "stream": path == "stream", **LONG}))
            until(lambda: small.service.bridge.num_open)
            slow.rounds(2)
            until(lambda: scheduler.running)
        until(lambda: not small.service.bridge.num_open)
        slow.rounds(1)
        until(lambda: not scheduler.running)
    slow.go()
    assert small.text(PROMPT) == wanted(plain)
    assert counts(small)[ENDED.replace("length", "abort")] >= 2


@pytest.mark.parametrize("turns", range(6))
def test_a_disconnect_during_tokens_ends_the_request(turns: int) -> None:
    """``turns`` of the event loop are between the two events; in one of them, waiting is cancelled just as it ends."""
    cancelled: set[str] = set()
    stream = Stream(SimpleNamespace(cancel=cancelled.update), ["r"], monotonic() + 20)  # type: ignore[arg-type]
    tokens = Emission("r", [5], ["plain"], "a", None, None, None, None, GenerationStats())

    class Answering:
        close = staticmethod(stream.close)

        async def chunks(self) -> AsyncIterator[Emission | None]:
            async for emission in stream:
                yield emission

    class Leaving:
        async def receive(self) -> dict[str, str]:
            await asyncio.sleep(0.01)
            stream.put(tokens)
            for _ in range(turns):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

    started = monotonic()
    answer = asyncio.run(_whole(Answering(), Leaving()))  # type: ignore[arg-type]
    assert answer.status_code == CLOSED and cancelled == {"r"} and monotonic() - started < 10


def test_tokens_within_the_interval_are_sent_together_but_an_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.server.bridge.monotonic", lambda: asyncio.get_running_loop().time())

    def emission(request_id: str, text: str, end: str | None = None) -> Emission:
        logprobs = [TokenLogprobs(-1.0)]
        return Emission(request_id, [len(text)], ["plain"], text, logprobs, end, None, None, GenerationStats())

    async def run() -> list[tuple[float, str, str]]:
        started, seen = asyncio.get_running_loop().time(), []
        stream = Stream(SimpleNamespace(), ["r", "s"], started + 20, 0.3)  # type: ignore[arg-type]

        async def tell() -> None:
            stream.put(emission("r", "a"))
            await asyncio.sleep(0.02)
            for request_id, text in (("r", "bb"), ("s", "c"), ("r", "ddd")):
                stream.put(emission(request_id, text))
            await asyncio.sleep(0.4)
            stream.put(emission("r", "e", "stop"))
            stream.put(emission("s", "f", "length"))

        telling = asyncio.ensure_future(tell())
        async for each in stream:
            assert each is not None and len(each.origins) == len(each.token_ids) == len(each.logprobs or ())
            seen.append((asyncio.get_running_loop().time() - started, each.request_id, each.text))
        await telling
        return seen

    seen = virtual.run(run())
    assert [(request_id, text) for _, request_id, text in seen] == [
        ("r", "a"), ("r", "bbddd"), ("s", "c"), ("r", "e"), ("s", "f")
    ]  # fmt: skip
    times = [time for time, *_ in seen]
    assert times == pytest.approx([0.0, 0.3, 0.3, 0.42, 0.42])  # the end comes within 0.3 s of the previous chunk


def test_a_full_queue_gives_retry_after(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(small, monkeypatch)
    with ThreadPoolExecutor() as callers:
        answers = [callers.submit(small.post, "/v1/completions", prompt=PROMPT, max_tokens=2) for _ in range(2)]
        until(lambda: small.service.bridge.num_open == 2)
        refused = small.post("/v1/completions", prompt=PROMPT)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        page = httpx.get(small.url + "/metrics").content
        assert b'outrider:requests_refused_total{model_name="outrider",status="429"}' in page
        slow.go()
    assert [answer.result().status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        ("completions", {"prompt": PROMPT}, ": ping\n\n"),
        ("messages", {"messages": [{"role": "user", "content": "Hi"}]}, 'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
def test_a_silent_stream_gets_pings(
    small: Served, path: str, body: dict[str, Any], ping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.server.service.PING_INTERVAL", 0.05)
    slow, url = Slow(small, monkeypatch), f"{small.url}/v1/{path}"
    with httpx.stream("POST", url, json=body | {"stream": True, "max_tokens": 9}, timeout=60) as stream:
        assert stream.headers["x-accel-buffering"] == "no"
        said, parts = "", stream.iter_text()
        while said.count(ping) < 2:
            said += next(parts)
        slow.go()
        said += "".join(parts)
    events = said.replace(ping, "").removesuffix("\n\n").split("\n\n")
    whole = small.post(f"/v1/{path}", stream=True, max_tokens=9, **body).text
    assert len(events) > 1 and events[-1] == whole.removesuffix("\n\n").split("\n\n")[-1] and "error" not in said


def test_a_stream_whose_text_is_held_back_gets_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bridge", "service"):
        monkeypatch.setattr(f"outrider.server.{name}.monotonic", lambda: asyncio.get_running_loop().time())

    class Holding:
        """Answer of one choice that shows no text before its end."""

        choices = (SimpleNamespace(request_id="r", finish_reason="stop", token_ids=[]),)
        ping, ends_with_done = b"ping", False
        opening = staticmethod(lambda: [{}])
        add = staticmethod(lambda index, emission: emission)
        usage = staticmethod(lambda: {"prompt_tokens": 1, "completion_tokens": 1})
        events = staticmethod(lambda index, chunk: [{}] if chunk.finish_reason else [])

    async def run() -> list[tuple[float, bytes]]:
        now = asyncio.get_running_loop().time
        started, seen = now(), []
        stream = Stream(SimpleNamespace(), ["r"], started + 100)  # type: ignore[arg-type]
        call = SimpleNamespace(arrived=started, log_fields={})
        running = RunningAnswer(stream, Holding(), call, MagicMock(), SamplingParams())  # type: ignore[arg-type]

        async def tell() -> None:
            for number in range(1, 9):
                await asyncio.sleep(5.0)
                end = "stop" if number == 8 else None
                stream.put(Emission("r", [5], ["plain"], "a", None, end, None, None, GenerationStats()))

        telling = asyncio.ensure_future(tell())
        async for event in EventStream(running, StreamOptions()).body_iterator:
            seen.append((now() - started, bytes(event)))  # type: ignore[arg-type]
        await telling
        return seen

    opening, *pings, end = virtual.run(run())
    assert pings == [(pytest.approx(15.0), b"ping"), (pytest.approx(30.0), b"ping")]
    assert opening[0] == 0 and end[0] == pytest.approx(40.0)


def test_the_time_until_a_retry_is_between_a_second_and_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, only = SimpleNamespace(max_batch=0), Client("ada", is_only=True)
    bridge = EngineBridge(SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler)), max_queue=1)  # type: ignore[arg-type]
    monkeypatch.setattr(bridge, "_check_health", lambda: None)
    for seconds, told in ((0.001, 1), (3.0, 3), (1e6, 60)):
        monkeypatch.setattr(bridge, "_seconds_per_end", seconds)
        with bridge.reserve_places(1, only), pytest.raises(Busy) as busy, bridge.reserve_places(1, only):
            pass
        assert busy.value.retry_after == told
    bridge._seconds_per_end, bridge._last_end = 1.0, -1e9  # the server was idle
    for mean in (0.8 + 0.2 * 60, 0.8 * (0.8 + 0.2 * 60)):
        bridge._streams["r"] = MagicMock()
        bridge._deliver([SimpleNamespace(request_id="r", finish_reason="stop")])  # type: ignore[list-item]
        assert bridge._seconds_per_end == pytest.approx(mean, rel=0.01)


def test_one_client_does_not_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SimpleNamespace(max_batch=4)
    bridge = EngineBridge(SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler)), max_queue=6)  # type: ignore[arg-type]
    monkeypatch.setattr(bridge, "_check_health", lambda: None)
    ada, bob = Client("ada"), Client("bob")
    with ExitStack() as calls:
        for _ in range(5):
            calls.enter_context(bridge.reserve_places(1, ada))
        with pytest.raises(Busy), bridge.reserve_places(1, ada):
            pass
        calls.enter_context(bridge.reserve_places(2, bob))
        bridge.submit([], monotonic() + 20, bob).close()  # nothing is left of it
        with bridge.reserve_places(1, bob), pytest.raises(Busy), bridge.reserve_places(1, bob):
            pass
    assert bridge.num_open == 0 and not bridge._preparing
    with bridge.reserve_places(10, ada):  # a single call
        pass
    with ExitStack() as calls:
        for _ in range(10):
            calls.enter_context(bridge.reserve_places(1, Client("ada", is_only=True)))


def test_running_requests_count_towards_a_clients_share(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyRing([("a", Client("ada")), ("b", Client("bob"))])
    with serving(load(max_batch=1), keys, max_queue=3) as server, ThreadPoolExecutor() as callers:
        slow = Slow(server, monkeypatch)

        def ask(key: str) -> int:
            body, headers = {"prompt": PROMPT, "max_tokens": 2}, {"authorization": f"Bearer {key}"}
            return httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).status_code

        answers = [callers.submit(ask, "a") for _ in range(2)]
        until(lambda: len(server.service.bridge._streams) == 2)
        assert ask("a") == 429
        answers.append(callers.submit(ask, "b"))
        until(lambda: len(server.service.bridge._streams) == 3)
        slow.go()
        assert [answer.result() for answer in answers] == [200] * 3


def test_a_client_cannot_guess_prompts_of_others_by_cached_tokens(load: Callable[..., LLM]) -> None:
    llm, keys = load(), KeyRing([("a", Client("ada")), ("b", Client("bob"))])
    with serving(llm, keys) as server:

        def num_cached(key: str) -> int:
            body, headers = {"prompt": PROMPT * 6, "max_tokens": 4}, {"authorization": f"Bearer {key}"}
            usage = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [num_cached("a"), num_cached("b")] == [0, 0]
        assert llm.proposer.draft.cache.num_reused == 0  # type: ignore[attr-defined]
        assert num_cached("a") > 0 and num_cached("b") > 0


def test_a_body_is_dropped_before_its_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(served, monkeypatch)
    with ThreadPoolExecutor() as callers:
        answer = callers.submit(
            served.send, "/v1/completions", b'{"prompt": "x", "max_tokens": 2, "metadata": {"marked": [[]]}}'
        )
        until(lambda: served.service.bridge._streams)
        found = gc.get_objects()
        requests = [each for each in found if issubclass(type(each), Request)]
        assert requests and not any(vars(each).keys() & {"_body", "_json"} for each in requests)
        assert not any("marked" in each for each in found if type(each) is dict)
        slow.go()
        assert answer.result().status_code == 200


def test_an_answer_does_not_depend_on_what_starlette_keeps() -> None:
    sent: list[Any] = []

    async def handler(given: Any, http: Request) -> Response:
        return Response(given)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http"}
    asyncio.run(Deferred(handler, "x", Request(scope))(scope, MagicMock(), send))
    assert sent[-1]["body"] == b"x"


def test_log_probabilities_of_a_call_are_limited(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.service._max_total_logprobs == 1 << 22
    monkeypatch.setattr(served.service, "_max_total_logprobs", 96)
    asked = {"prompt": ["a b", "c d"], "n": 2, "logprobs": 1}
    for num_tokens, status in ((12, 200), (13, 400)):
        answer = served.post("/v1/completions", max_tokens=num_tokens, **asked)
        assert answer.status_code == status
    assert "too many log-probabilities: 52 tokens with 2 each: expected at most 96" in answer.json()["error"]["message"]
    for num_tokens, status in ((9, 200), (10, 400)):  # each choice repeats the three tokens of its prompt
        assert served.post("/v1/completions", max_tokens=num_tokens, echo=True, **asked).status_code == status


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "127.8.9.1", "[::1]:1", "LOCALHOST:80", None])
def test_a_loopback_server_is_called_by_its_own_names(served: Served, host: str | None) -> None:
    with served.connect() as connection:  # without a host HTTP 1.0 is no browser
        connection.sendall(b"GET /health HTTP/1.0\r\n" + (f"Host: {host}\r\n".encode() if host else b"") + b"\r\n")
        assert b" 200 OK" in connection.recv(4096)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "10.0.0.1", "[::1", "0.0.0.0"])
def test_a_loopback_server_without_keys_refuses_other_hosts(served: Served, host: str) -> None:
    answer = httpx.get(served.url + "/v1/models", headers={"host": host}, verify=TLS)
    assert answer.status_code == 403 and "expected localhost or a loopback address" in answer.json()["error"]["message"]
    assert host_error(host, "0.0.0.0", "0.0.0.0") is None


def test_a_name_that_resolves_to_a_loopback_address_is_checked(load: Callable[..., LLM]) -> None:
    with serving(load("plain", 0), host="My-machine") as server:
        for host, status in (("my-machine:8000", 200), ("localhost", 200), ("evil.example", 403)):
            assert httpx.get(server.url + "/v1/models", headers={"host": host}, verify=TLS).status_code == status


def test_with_keys_every_host_is_allowed(load: Callable[..., LLM]) -> None:
    with serving(load(), KeyRing([("secret", Client())])) as server:
        headers = {"host": "api.example", "authorization": "Bearer secret"}
        assert httpx.get(server.url + "/v1/models", headers=headers, verify=TLS).status_code == 200


def test_compiling_a_grammar_delays_only_calls_with_new_schemas(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, compiled = threading.Event(), threading.Event(), GrammarCompiler.compiled

    def held(self: GrammarCompiler, *given: Any) -> Any:
        begun.set()
        go.wait(60)
        return compiled(self, *given)

    monkeypatch.setattr(GrammarCompiler, "compiled", held)
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "held"}}}
    with ThreadPoolExecutor() as callers:
        callers.submit(served.post, "/v1/completions", prompt="x", max_tokens=2, response_format=form)
        assert begun.wait(60)
        assert served.post("/v1/completions", prompt=[5, 6], max_tokens=2, logprobs=1).status_code == 200
        go.set()


def test_bodies_that_are_too_large_or_too_slow_are_refused(small: Served) -> None:
    assert small.post("/v1/completions", prompt="x" * 4000).status_code == 413
    chunks = iter([b'{"prompt": "', b"x" * 2000, b"x" * 2000, b'"}'])
    assert small.send("/v1/completions", chunks).status_code == 413
    with small.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        assert b" 408 " in connection.recv(4096)


def test_a_client_that_waits_with_its_body_is_refused_at_once(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\nexpect: 100-continue\r\ncontent-length: 50\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(head)
        assert b" 403 " in connection.recv(4096)


@pytest.mark.parametrize(
    ("key", "size", "status"),
    [("secret", 6 << 20, b" 413 "), ("wrong", 9999, b" 401 ")],
)
def test_a_refused_body_gets_the_reason(load: Callable[..., LLM], key: str, size: int, status: bytes) -> None:
    """Closing a connection during the upload of a body would reset it, and the response would be lost."""
    with serving(load(), KeyRing([("secret", Client())])) as server:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-length: {size}\r\n\r\n"
        )
        with server.connect() as connection:
            connection.sendall(head.encode())
            connection.sendall(b"x" * (size // 2))
            sleep(0.3)  # so that a server that does not read the body answers and closes
            connection.sendall(b"x" * (size - size // 2))
            sleep(0.1)
            assert status in connection.recv(4096)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "expected a JSON object"),
        (b"{", "invalid JSON at character 1: Expecting property name"),
        (b'{"prompt": x}', "invalid JSON at character 11: Expecting value"),
        (b"[]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'"a"', "expected a JSON object"),
        (b"\xff\xfe", "invalid JSON at character 0: Expecting value"),
        (b'{"prompt": NaN}', "prompt: expected a valid string"),
        (b'{"prompt": "a", "seed": 1e400}', "seed: expected a"),
        (b'{"prompt": "a", "max_tokens": 2147483648}', "max_tokens: expected a value less than or equal to 2147483647"),
        (b'{"prompt": "a", "' + 999 * b"x" + b'": 1}', "xxx..."),
        (rb'{"prompt": "a", "\ud800": 1}', "expected a valid string"),
    ],
)
def test_a_malformed_body_is_a_client_error(served: Served, body: bytes, says: str) -> None:
    answer = served.send("/v1/completions", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"]
    assert not (error["param"] or "").isdigit() and len(error["param"] or "") <= 200


def test_an_answer_that_takes_too_long_ends(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(load(), request_timeout=0.3) as server:
        slow = Slow(server, monkeypatch)
        slow.rounds(1)
        answer = server.post("/v1/completions", prompt=PROMPT, **LONG)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"  # the client would wait as long again
        slow.rounds(1)
        streamed = server.post("/v1/completions", prompt=PROMPT, stream=True, **LONG)
        assert '"code":"timeout"' in streamed.text and "[DONE]" not in streamed.text
        slow.go()
        until(lambda: not server.llm.engine.has_work)


def test_keys_are_required_and_name_the_client(load: Callable[..., LLM], tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "keys").write_text("# ours\nsecret ada 2\n\nother\nthird\n")
    keys = KeyRing.load(tmp_path / "keys")
    assert keys.client("secret") == Client("ada", 2) and keys.client("other") == Client("client-4", 0)
    assert keys.client("third") == Client("client-5", 0)  # keys without a name are separate clients, which take turns
    with serving(load(), keys) as server, caplog.at_level(logging.INFO, "outrider.server"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            refused = httpx.get(server.url + "/v1/models", headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        given = {"authorization": "Bearer secret", "x-request-id": "mine-1"}
        asked = {"prompt": "A private prompt", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(server.url + "/v1/completions", json=asked, headers=given, timeout=60)
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == "cmpl-mine-1"
        assert httpx.get(server.url + "/health").status_code == 200
        until(lambda: any(getattr(record, "facts", {}).get("status") == 200 for record in caplog.records))
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == "outrider.server"]
    line = next(line for line in lines if line.get("request_id") == "mine-1")
    assert (line["client"], line["status"], line["completion_tokens"]) == ("ada", 200, 3)
    assert "private" not in json.dumps(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no API key"),
        ("key name high", "integer priority"),
        ("key my name 5", "integer priority"),
        ("key ada 5\nkey bob", "contains an API key twice: expected each key in one line"),
    ],
)
def test_an_invalid_key_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(OutriderError, match=says):
        KeyRing.load(tmp_path / "keys")


def test_a_key_may_have_letters_outside_ascii(load: Callable[..., LLM], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("schlüssel ada\nvoilà bob\n", encoding="utf-8-sig")  # with a byte order mark
    with serving(load(), KeyRing.load(tmp_path / "keys")) as server:
        for key, status in (("schlüssel".encode(), 200), ("voilà".encode(), 200), (b"schlussel", 401), (b"\xff", 401)):
            headers = {"authorization": b"Bearer  " + key}
            assert httpx.get(server.url + "/v1/models", headers=headers).status_code == status


def test_a_path_in_the_log_is_short_and_ascii(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outrider.server"):
        httpx.get(served.url + "/v1/%C2%9B" + "x" * 300, verify=TLS)
        until(lambda: any("facts" in vars(record) for record in caplog.records))
    line = JsonLines().format(next(record for record in caplog.records if "facts" in vars(record)))
    assert line.isascii() and len(json.loads(line)["path"]) == 200


@pytest.mark.parametrize("given", [",", " ", " , "])
def test_a_variable_without_keys_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEYS", given)
    with pytest.raises(OutriderError, match="OUTRIDER_API_KEYS contains no API key: expected one KEY"):
        KeyRing.load(None)
    monkeypatch.setenv("OUTRIDER_API_KEYS", "")
    assert len(KeyRing.load(None)) == 0


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEYS", "one, two bob 3")
    assert KeyRing.load(None).client("two") == Client("bob", 3)
    assert KeyRing.load(None).client("three") is None
    monkeypatch.setenv("OUTRIDER_API_KEYS", "schl\udcfcssel")  # bytes that are not UTF-8
    assert KeyRing.load(None).client("schl\udcfcssel") and KeyRing.load(None).client("schl?ssel") is None


def test_a_failing_proposer_loses_no_text(load: Callable[..., LLM], plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    propose, faults = llm.proposer.propose, iter(range(10**6))

    def faulty(context: Any, k: int) -> Proposal:
        number = next(faults)
        if number % 3 == 0:
            raise RuntimeError("injected")
        proposal = propose(context, k)
        return proposal if number % 3 == 1 else Proposal(proposal.token_ids + 100000, proposal.lens)

    monkeypatch.setattr(llm.proposer, "propose", faulty)
    with serving(llm) as server:
        for number in range(6):
            assert server.text(f"{PROMPT} {number}") == wanted(plain, f"{PROMPT} {number}")
        assert llm.engine.stats.faults >= 4
        assert b"outrider:proposer_faults_total" in httpx.get(server.url + "/metrics").content


def test_a_target_failure_ends_only_its_request(load: Callable[..., LLM], plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    score = llm.runner.score

    def failing(context: Any, proposal: Proposal, hidden: tuple[int, ...] = ()) -> Any:
        if any(request.num_prompt_tokens > 100 for request in context.requests):
            raise MemoryError("cannot allocate memory")
        return score(context, proposal, hidden)

    monkeypatch.setattr(llm.runner, "score", failing)
    with serving(llm) as server:
        with ThreadPoolExecutor() as callers:
            ask = lambda prompt: server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=24)  # noqa: E731
            first, failed, last = callers.map(ask, (PROMPT, "x1 " * 60, "The ship"))
        assert failed.status_code == 500 and "MemoryError" in failed.text
        assert failed.headers["x-should-retry"] == "false"
        form = {"response_format": {"type": "json_object"}, "banned_token_ids": [1]}
        masked = server.post("/v1/completions", prompt="x1 " * 60, max_tokens=24, **form)
        assert masked.status_code == 500 and "MemoryError" in masked.text
        for answer, prompt in ((first, PROMPT), (last, "The ship")):
            assert answer.json()["choices"][0]["text"] == wanted(plain, prompt)
        assert server.text(PROMPT) == wanted(plain)


def test_a_failed_round_ends_its_requests_but_not_the_server(
    load: Callable[..., LLM], plain: LLM, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    llm = load()
    with serving(llm) as server:
        monkeypatch.setattr(llm.runner, "commit", lambda *_: 1 / 0)
        assert server.post("/v1/completions", prompt=PROMPT).status_code == 500
        monkeypatch.undo()
        assert server.text(PROMPT) == wanted(plain)
        assert httpx.get(server.url + "/health").text == "ok"


def test_requests_that_finished_in_a_failed_round_are_answered(
    load: Callable[..., LLM], plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load()
    with serving(llm, request_timeout=20.0) as server:
        step = llm.engine.step

        def swallowing() -> Any:
            emissions = step()
            if any(emission.finish_reason for emission in emissions):
                raise RuntimeError("injected")
            return emissions

        monkeypatch.setattr(llm.engine, "step", swallowing)
        assert server.post("/v1/completions", prompt=PROMPT, max_tokens=3).status_code == 500
        monkeypatch.undo()
        assert server.text(PROMPT) == wanted(plain)


class Panic(BaseException):
    """Raised by libraries written in Rust: not an ``Exception``."""


def test_a_library_panic_ends_its_requests_but_not_the_server(
    load: Callable[..., LLM], plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load()
    with serving(llm, request_timeout=20.0) as server:

        def panics(*_: Any) -> Any:
            raise Panic("injected")

        monkeypatch.setattr(llm.runner, "score", panics)
        assert server.post("/v1/completions", prompt=PROMPT, max_tokens=3).status_code == 500
        monkeypatch.undo()
        assert server.text(PROMPT) == wanted(plain)


def test_a_stopped_engine_is_reported_at_once(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    with serving(llm, request_timeout=20.0) as server:
        monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
        monkeypatch.setattr(llm.engine, "fail_running", lambda error: 1 / 0)
        assert server.post("/v1/completions", prompt=PROMPT, max_tokens=3).status_code == 500
        assert httpx.get(server.url + "/health").status_code == 500
        assert httpx.get(server.url + "/ready").status_code == 503
        assert server.post("/v1/completions", prompt=PROMPT, max_tokens=3).status_code == 503


def test_unexpected_errors_have_openais_form_and_a_request_id(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    llm = load()
    with serving(llm) as server, caplog.at_level(logging.INFO, "outrider.server"):
        monkeypatch.setattr(server.service._prompts, "encode", lambda *_: 1 / 0)
        answer = server.post("/v1/completions", prompt=PROMPT)
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "the server failed"
        until(lambda: [record for record in caplog.records if record.getMessage() == "request"])
        facts = [record.facts for record in caplog.records if record.getMessage() == "request"]
        assert [(each["status"], each["request_id"]) for each in facts] == [(500, answer.headers["x-request-id"])]


def test_early_refusals_precede_tokenization(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(max_batch=1)
    with serving(llm, max_queue=2) as server:
        monkeypatch.setattr(server.service._prompts, "encode", lambda *_: pytest.fail("the prompt was tokenised"))
        assert server.post("/v1/completions", prompt=PROMPT, model="gpt-9").status_code == 404
        never = server.post("/v1/completions", prompt=PROMPT, n=4)
        assert never.status_code == 400 and "the limit is 3" in never.json()["error"]["message"]
        monkeypatch.setattr(type(server.service.bridge), "num_open", 3)
        assert server.post("/v1/completions", prompt=PROMPT).status_code == 429
        server.service.bridge.is_draining = True
        assert server.post("/v1/completions", prompt=PROMPT).status_code == 503


@pytest.mark.parametrize("depth", [65, 200, 1_000, 30_000])
@pytest.mark.parametrize("opening", ['{"a": ', "["])
def test_a_schema_that_is_nested_too_deep_is_a_client_error(served: Served, depth: int, opening: str) -> None:
    closing = "}" if opening[0] == "{" else "]"
    schema = f'{{"properties": {opening * depth}1{closing * depth}}}'
    body = f'{{"prompt": "a", "response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}}}'
    answer = served.send("/v1/completions", body.encode())
    assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]
    assert depth > 200 or "more than 64 levels" in answer.json()["error"]["message"]


def test_preparation_ends_at_a_disconnect_or_the_deadline(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(load(), request_timeout=0.5) as server:
        monkeypatch.setattr(server.service._prompts, "encode", lambda *_: asyncio.sleep(60))
        answer = server.post("/v1/completions", prompt=PROMPT)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        assert not server.service.bridge.num_open
    with serving(load()) as server:
        monkeypatch.setattr(server.service._prompts, "encode", lambda *_: asyncio.sleep(60))
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={"prompt": PROMPT}, timeout=0.5)
        until(lambda: not server.service.bridge.num_open)


def test_errors_of_a_malformed_body_are_short() -> None:
    """Each item of a list, parsed as each kind of prompt, used to be a separate error: 3 MB took 3 GB."""
    for kind, body in (
        (CompletionBody, {"prompt": [{}] * 10_000}),
        (CompletionBody, {"prompt": "a", "allowed_token_ids": ["x"] * 10_000}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(-number): 1 for number in range(10_000)}}),
        (CompletionBody, {"prompt": "a", **{f"field {number}": 1 for number in range(10_000)}}),
        (ChatBody, {"messages": [{}] * 10_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 10_000}]}),
        (ResponseBody, {"input": [{}] * 10_000}),
        (ResponseBody, {"input": [{"role": "user", "content": [{}] * 4_000}]}),
        (ResponseBody, {"input": "a", "tools": [{"type": "function"}] * 200}),
    ):
        with pytest.raises(ValidationError) as wrong:
            kind.model_validate(body)
        assert wrong.value.error_count() < 10


def test_a_signal_lets_streams_finish_and_refuses_new_requests(
    load: Callable[..., LLM], plain: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(load()) as server:
        ends: list[int] = []
        settings = uvicorn.Config(server.service, log_config=None)
        monkeypatch.setattr(os, "_exit", ends.append)
        graceful = GracefulServer(settings, server.service.bridge, {}, grace=30.0)
        monkeypatch.setattr(server.server, "on_tick", graceful.on_tick)
        slow = Slow(server, monkeypatch)
        slow.rounds(1)
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": PROMPT, "stream": True, **LONG}, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            first = next(line for line in lines if line)
            graceful.handle_exit(signal.SIGTERM, None)
            sleep(0.3)  # so that uvicorn checks whether it should exit
            assert httpx.get(server.url + "/ready").status_code == 503
            refused = server.post("/v1/completions", prompt="a")
            assert refused.status_code == 503 and refused.headers["retry-after"] and "x-should-retry" not in refused.headers
            slow.go()
            events = [line.removeprefix("data: ") for line in [first, *lines] if line]
        assert events.pop() == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        assert text == wanted(plain, max_tokens=200, ignore_eos=True)
        until(lambda: graceful.should_exit and not graceful.force_exit)
        caplog.clear()
        graceful.handle_exit(signal.SIGTERM, None)
        graceful.last_resort.cancel()
        assert ends == [128 + signal.SIGTERM] and ["second signal" in record.message for record in caplog.records] == [True]


def test_streams_that_outlast_the_grace_period_end_with_an_error(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(load()) as server:
        settings = uvicorn.Config(server.service, log_config=None)
        graceful = GracefulServer(settings, server.service.bridge, {}, grace=1.5)
        monkeypatch.setattr(server.server, "on_tick", graceful.on_tick)
        slow = Slow(server, monkeypatch)
        slow.rounds(1)
        url, body = server.url + "/v1/completions", {"prompt": PROMPT, **LONG}
        with ThreadPoolExecutor() as pool, httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line)
            whole = pool.submit(httpx.post, url, json=body, timeout=60)
            until(lambda: server.service.bridge.num_open == 2)
            graceful.handle_exit(signal.SIGTERM, None)
            last = [line.removeprefix("data: ") for line in lines if line][-1]
            assert json.loads(last)["error"]["message"] == "the server is shutting down"
            assert whole.result().status_code == 503 and whole.result().json() == json.loads(last)
        until(lambda: graceful.should_exit)
        graceful.last_resort.cancel()
        slow.go()


def test_shutdown_ends_within_the_grace_period(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(load()) as server:
        bridge = server.service.bridge
        monkeypatch.setattr(type(bridge), "num_open", 1)
        ends: list[int] = []
        settings = uvicorn.Config(server.service, log_config=None)
        monkeypatch.setattr(os, "_exit", ends.append)
        graceful = GracefulServer(settings, bridge, {}, grace=0.4)
        assert not asyncio.run(graceful.on_tick(1))
        graceful.handle_exit(signal.SIGTERM, None)
        sleep(0.3)
        assert asyncio.run(graceful.on_tick(1)) and graceful.config.timeout_graceful_shutdown == pytest.approx(0.2 / 3)
        assert not ends
        until(lambda: ends == [1])  # even if something hangs


def test_the_bridge_gets_no_emissions_after_a_request_ended(load: Callable[..., LLM]) -> None:
    llm = load()

    async def run() -> int:
        bridge = EngineBridge(llm)
        bridge.start()
        requests = llm.requests_for(llm.encode(PROMPT), SamplingParams(max_tokens=100, ignore_eos=True))
        stream, count = bridge.submit([requests], monotonic() + 60.0), 0
        async for _ in stream:
            count += 1
            stream.close()
        assert bridge.num_open == 0
        await bridge.stop()
        return count

    assert asyncio.run(run()) == 1
    assert not llm.engine.has_work


def test_the_first_command_of_an_idle_engine_counts_as_progress() -> None:
    """Otherwise the engine would seem to have stalled for as long as it was idle."""
    bridge, seen = EngineBridge(SimpleNamespace()), []  # type: ignore[arg-type]
    bridge._last_progress = -1e9
    bridge._commands.put(lambda: seen.append(bridge._last_progress))
    bridge._run_commands(wait=True)
    assert len(seen) == 1 and seen[0] > 0


def test_a_panic_in_a_command_does_not_end_the_engine_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As PyO3's."""

    def panic(*_: object) -> None:
        raise Panic("a library panicked")

    with monkeypatch.context() as patch:
        patch.setattr(served.llm.engine, "add", panic)
        answer = served.post("/v1/completions", prompt="x", max_tokens=2)
        assert answer.status_code == 500 and "a library panicked" in answer.text
    with monkeypatch.context() as patch:
        patch.setattr(served.llm.engine, "abort", panic)
        served.service.bridge.cancel({"r"})
        served.text("x")
    assert served.service.bridge.is_healthy


def test_the_scope_of_an_address_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    address, asked = ("fe80::1", 0, 0, 3), []
    found = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", address)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found])
    monkeypatch.setattr(socket, "create_server", lambda address, family: asked.append(address) or MagicMock())
    listen("fe80::1%eth0", 0)
    assert asked == [address]


@pytest.mark.skipif(not native.load(), reason="no C++ compiler")
@pytest.mark.parametrize("compile", ["auto", "always"])
def test_no_compilation_during_requests(
    compile: str, load: Callable[..., LLM], plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_build", lambda module, path: built.append(path))
    with serving(load(compile=compile)) as server:
        assert [server.text(PROMPT) for _ in range(3)] == [wanted(plain)] * 3
    assert not built


def test_metrics_have_vllms_names(served: Served) -> None:
    served.text(PROMPT)
    page = httpx.get(served.url + "/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="outrider",position="0"}',
        "vllm:time_to_first_token_seconds_bucket",
        'outrider:phase_seconds_total{model_name="outrider",phase="draft"}',
    ):
        assert name in page, name


def test_metrics_count_calls_and_tokens(served: Served, plain: LLM) -> None:
    before = counts(served)
    served.text(PROMPT, max_tokens=60, allowed_token_ids=[70])  # all drafts are accepted
    after, here, num_prompt = counts(served), '{model_name="outrider"}', len(plain.encode(PROMPT))
    added = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert added[ENDED] == added[f"vllm:time_to_first_token_seconds_count{here}"] == 1
    assert added[f"vllm:e2e_request_latency_seconds_count{here}"] == 1
    assert added[f"vllm:prompt_tokens_total{here}"] == added[f"vllm:request_prompt_tokens_sum{here}"] == num_prompt
    assert added[f"vllm:generation_tokens_total{here}"] == added[f"vllm:request_generation_tokens_sum{here}"] == 60
    assert 0 < added[f"vllm:inter_token_latency_seconds_count{here}"] < 60
    by_position = [
        value for name, value in after.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(by_position) == after[f"vllm:spec_decode_num_accepted_tokens_total{here}"] > 0


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ([1], "stop.0: expected a valid string"),
        ("", "stop: String should have at least 1 character; stop: expected a valid list"),
        (["x" * 300], "stop.0: String should have at most 256 characters"),
        (["x"] * 40, "stop: expected a valid string; stop: List should have at most 16 items after validation, not 40"),
    ],
)
def test_an_invalid_stop_string_is_reported_without_python_terms(small: Served, stop: Any, says: str) -> None:
    answer = small.post("/v1/completions", prompt=PROMPT, stop=stop)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == says


@pytest.mark.parametrize("name", ["function-after[x]", "body"])
def test_an_unknown_field_is_named_as_written(small: Served, name: str) -> None:
    answer = small.post("/v1/completions", prompt=PROMPT, **{name: 1})
    assert answer.json()["error"]["message"] == f"{name}: unknown field"
