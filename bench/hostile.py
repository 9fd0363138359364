"""Requests designed to stall a server, for ``soak.py``: expensive schemas and texts, and connections that never end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
HELD_SECONDS = 20.0  # seconds until the client closes the connection, unless the server does


def letters(choose: random.Random, count: int) -> str:
    """Return characters for which most tokenizers need more than one token each."""
    return "".join(chr(choose.randrange(0x4E00, 0x9000)) for _ in range(count))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def patterns(choose: random.Random) -> dict[str, Any]:
    """Return a schema of patterns whose intersection takes exponential time to compute."""
    return {"type": "string", "allOf": [{"pattern": f".*{each}.*"} for each in letters(choose, choose.choice((20, 60, 300)))]}


def either(choose: random.Random, count: int = 14) -> dict[str, Any]:
    """Return a schema whose number of combinations doubles with each list."""
    names = letters(choose, count)
    return {"allOf": [{"anyOf": [{"properties": {name: {"type": kind}}} for kind in ("integer", "string")]} for name in names]}


SCHEMAS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "patterns": patterns,
    "either": either,
    "properties": lambda choose: {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(10_000)}},
    "optional": lambda choose: {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(2_000)}},
    "states": lambda choose: {"type": "string", "pattern": f"(.*{letters(choose, 1)}.{{5000}})"},
    "deep": lambda choose: nested(200),
}


def schema(choose: random.Random) -> tuple[str, bytes]:
    """Return the kind and the body of a request."""
    kind = choose.choice(list(SCHEMAS))
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMAS[kind](choose)}}
    return f"schema {kind}", json.dumps({"prompt": "x", "max_tokens": 400, "response_format": form}).encode()


@cache
def texts() -> list[tuple[str, bytes]]:
    """Return kinds and bodies of requests: the largest permitted body, and texts that just fit the context.

    Called once, before the clients start, because the time to build them would count as server delay.
    """
    choose = random.Random(0)
    prompts = {
        "text huge": letters(choose, 1_300_000),
        "text of one letter": "a" * 3_900_000,
        "text long": letters(choose, 20_000),
        "text of blanks": " " * 60_000,
    }
    return [
        (kind, json.dumps({"prompt": prompt, "max_tokens": 8}, ensure_ascii=False).encode()) for kind, prompt in prompts.items()
    ]


def text(choose: random.Random) -> tuple[str, bytes]:
    """Return the kind and the body of a request."""
    return choose.choice(texts())


async def hold(port: int, choose: random.Random) -> str:
    """Hold a connection whose request never ends or whose answer is never read. Returns its kind."""
    kind = choose.choice(("silent", "headers", "body", "unread"))
    body = json.dumps({"prompt": "x", "n": 16, "max_tokens": 200, "stream": True, "logprobs": 20}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = {"silent": b"", "headers": HEAD.encode()[:40], "body": HEAD.format(1000).encode()}
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        writer.write(said.get(kind, HEAD.format(len(body)).encode() + body))
        await writer.drain()
        if kind == "unread":
            await asyncio.sleep(HELD_SECONDS)
        else:
            await asyncio.wait_for(reader.read(), HELD_SECONDS)
    writer.close()
    return f"connection {kind}"
