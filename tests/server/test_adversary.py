"""Expensive texts and schemas of one client do not delay other clients."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from processes import LISTED, children, running

from outrider import LLM, SamplingParams

from .served import TLS, ServedProcess, serving_process, until

PROMPT = "def add(first, second):"
SOON = 5.0  # seconds; on an idle machine an ordinary answer takes a hundredth of that
PATTERNS = [f".*{chr(0x4E00 + number)}.*" for number in range(300)]
HOSTILE_SCHEMAS: dict[str, Any] = {
    "an intersection of patterns": {"type": "string", "allOf": [{"pattern": pattern} for pattern in PATTERNS]},
    "a shorter one": {"type": "string", "allOf": [{"pattern": pattern} for pattern in PATTERNS[:40]]},
    "many properties": {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(10_000)}},
}


def memory(server: ServedProcess) -> int:
    """Return the resident bytes of the server's own process."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def attacked(target: Path) -> Iterator[ServedProcess]:
    # schemas that the limits on size would refuse at once reach the workers
    with serving_process(target, "--max-schema-choices", "300", "--max-schema-values", "30000") as server:
        yield server


@pytest.fixture(scope="module")
def answer(plain: LLM) -> str:
    return plain.generate(PROMPT, SamplingParams(max_tokens=24))[0].outputs[0].text


def check_honest(server: ServedProcess, answer: str) -> None:
    """Check that an ordinary client gets the correct answer in time."""
    started = monotonic()
    found = server.post(SOON, prompt=PROMPT)
    assert found.status_code == 200 and found.json()["choices"][0]["text"] == answer
    assert monotonic() - started < SOON


def check_held_up(server: ServedProcess, answer: str, attack: Callable[[], httpx.Response], seconds: float) -> str:
    """Check ordinary clients during ``attack``, which must be refused within ``seconds``. Returns its error message."""
    refused: list[httpx.Response] = []

    def ask() -> None:
        with suppress(httpx.HTTPError):
            refused.append(attack())

    attacker = threading.Thread(target=ask, daemon=True)
    started, before = monotonic(), memory(server)
    attacker.start()
    while attacker.is_alive():
        sleep(0.2)  # so that the attack has reached its stage
        check_honest(server, answer)
        assert httpx.get(f"{server.url}/ready", timeout=SOON, verify=TLS).status_code == 200
        assert monotonic() - started < seconds
        assert memory(server) - before < 300 << 20
    check_honest(server, answer)
    assert refused and refused[0].status_code == 400, refused
    return str(refused[0].json()["error"]["message"])


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_an_expensive_schema_is_refused_without_delaying_others(attacked: ServedProcess, answer: str, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": HOSTILE_SCHEMAS[name]}}
    told = check_held_up(attacked, answer, lambda: attacked.post(60.0, prompt=PROMPT, response_format=form), seconds=15.0)
    assert told.startswith("cannot compile a JSON schema within ")


def test_a_text_beyond_the_context_is_refused_before_it_is_tokenised(attacked: ServedProcess, answer: str) -> None:
    choose = random.Random(0)
    text = "".join(chr(choose.randrange(0x4E00, 0x9000)) for _ in range(1_300_000))  # 3.9 MB
    for body in ({"prompt": text}, {"prompt": "ab" * 1_950_000}, {"prompt": [text[:1000], text]}):
        told = check_held_up(attacked, answer, lambda body=body: attacked.post(60.0, **body), seconds=SOON)
        assert "context of 256" in told


@pytest.fixture(scope="module")
def hostile() -> Iterator[Any]:
    """The calls of ``bench/soak.py --hostile``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
        yield importlib.import_module("hostile")


@pytest.fixture(scope="module")
def impatient(target: Path) -> Iterator[ServedProcess]:
    timeouts = ("--header-timeout", "1", "--body-timeout", "1", "--idle-timeout", "1.5", "--schema-timeout", "0.5")
    with serving_process(target, *timeouts, "--max-len", "128") as server:
        yield server


def test_malformed_bodies_and_odd_values_are_the_clients_mistakes(impatient: ServedProcess, hostile: Any, answer: str) -> None:
    def status(body: bytes) -> int:
        headers = {"content-type": "application/json"}
        return httpx.post(f"{impatient.url}/v1/completions", content=body, headers=headers, timeout=60, verify=TLS).status_code

    found = {kind: status(body) for kind, body in hostile.MALFORMED.items()}
    assert found == dict.fromkeys(found, 400), found
    choose = random.Random(0)
    odd = {status(hostile.value(choose)[1]) for _ in range(60)}
    assert {200, 400} <= odd <= {200, 400, 404, 429}, odd
    check_honest(impatient, answer)


def test_hostile_schemas_are_refused_or_followed(impatient: ServedProcess, hostile: Any, answer: str) -> None:
    choose = random.Random(0)
    for kind, schema in hostile.SCHEMAS.items():
        form = {"type": "json_schema", "json_schema": {"schema": schema(choose)}}
        found = impatient.post(60.0, prompt="x", max_tokens=40, response_format=form)
        assert found.status_code in (200, 400), (kind, found.text)
        assert found.status_code == 200 or len(found.json()["error"]["message"]) < 300, (kind, found.text)
        check_honest(impatient, answer)


def test_connections_that_are_not_http_are_closed_and_delay_nobody(impatient: ServedProcess, hostile: Any, answer: str) -> None:
    """All at once; each is answered, or closed within the server's timeouts."""

    async def all_of_them() -> dict[str, int]:
        port = int(impatient.url.rsplit(":", 1)[1])
        return dict(await asyncio.gather(*(hostile.connection(port, kind) for kind in hostile.CONNECTIONS)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostile, "HELD_SECONDS", 10.0)
        started = monotonic()
        statuses = asyncio.run(all_of_them())
        assert monotonic() - started < 30
    assert len(statuses) == len(hostile.CONNECTIONS) and not {status for status in statuses.values() if status >= 500}, statuses
    check_honest(impatient, answer)
    assert not any("traceback" in line for line in impatient.log), impatient.log


def attack(server: ServedProcess, count: int) -> None:
    """Occupy the workers for as long as their limits allow."""

    def ask(number: int) -> None:
        schema = HOSTILE_SCHEMAS["a shorter one"] | {"description": str(number)}
        with suppress(httpx.HTTPError):
            server.post(60.0, prompt=PROMPT, response_format={"type": "json_schema", "json_schema": {"schema": schema}})

    for number in range(count):
        threading.Thread(target=ask, args=(number,), daemon=True).start()
    sleep(1.0)


def test_a_signal_ends_a_server_under_attack(target: Path) -> None:
    with serving_process(target, "--shutdown-grace", "4") as server:
        attack(server, 20)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(6.0) == 0


def test_a_second_signal_ends_the_server_at_once_with_one_line(target: Path) -> None:
    with serving_process(target) as server:
        attack(server, 3)
        server.process.send_signal(signal.SIGTERM)
        sleep(0.3)
        server.log.clear()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2.0) == 128 + signal.SIGTERM
        until(lambda: not server.reader.is_alive())
        assert [line["event"] for line in server.log] == ["second signal received: exiting immediately"]


@pytest.mark.skipif(not LISTED, reason="needs /proc (Linux)")
def test_no_worker_outlives_its_server(target: Path) -> None:
    with serving_process(target) as server:
        attack(server, 3)
        until(lambda: len(children(server.process.pid)) == 4)
        workers = children(server.process.pid)
        server.process.kill()
        until(lambda: not any(map(running, workers)), 8)
