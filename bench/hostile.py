"""Requests designed to stall or break a server, for ``soak.py``: schemas, texts, values, bodies, and raw connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from fuzz_targets import BODIES, BodyTarget
from mutations import of_json

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
HELD_SECONDS = 20.0  # maximum duration of a connection


def letters(choose: random.Random, count: int) -> str:
    """Return characters for which most tokenizers need more than one token each."""
    return "".join(chr(choose.randrange(0x4E00, 0x9000)) for _ in range(count))


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of objects nested to this depth."""
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


def doubling(choose: random.Random) -> dict[str, Any]:
    """Return a schema of 40 definitions, each of which refers to the next one twice."""
    links = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(40)}
    return {"$defs": links | {"d40": {"const": choose.randrange(99)}}, "$ref": "#/$defs/d0"}


SCHEMAS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "patterns": patterns,
    "either": either,
    "doubling": doubling,
    "properties": lambda choose: {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(10_000)}},
    "optional": lambda choose: {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(2_000)}},
    "states": lambda choose: {"type": "string", "pattern": f"(.*{letters(choose, 1)}.{{5000}})"},
    "repeats": lambda choose: {"type": "string", "pattern": f"((({letters(choose, 1)}{{1000}}){{1000}}){{1000}})"},
    "lookahead": lambda choose: {"type": "string", "pattern": f"^(?=.*{letters(choose, 1)})(?!a)(\\w+)\\1$"},
    "long": lambda choose: {"type": "string", "minLength": 10**9, "description": letters(choose, 3)},
    "many items": lambda choose: {"type": "array", "items": {"enum": [letters(choose, 2)]}, "minItems": 10**6},
    "itself": lambda choose: {"allOf": [{"$ref": "#"}, {"$ref": "#"}], "description": letters(choose, 3)},
    "elsewhere": lambda choose: {"$ref": f"file:///etc/passwd#{choose.randrange(9)}"},
    "enum": lambda choose: {"enum": [letters(choose, 3) for _ in range(4_000)]},
    "one of": lambda choose: {"oneOf": [{"const": letters(choose, 9)} for _ in range(250)]},
    "multiple": lambda choose: {"type": "number", "multipleOf": 10.0 ** -choose.randrange(1, 300)},
    "bounds": lambda choose: {"type": "integer", "minimum": -(10 ** choose.randrange(300)), "maximum": 10**300},
    "deep": lambda choose: nested(200),
    "as deep as allowed": lambda choose: nested(30),
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
        "text of controls": "\x00\x1b[2J\u202e\u200b\ufeff" * 40,
    }
    return [
        (kind, json.dumps({"prompt": prompt, "max_tokens": 8}, ensure_ascii=False).encode()) for kind, prompt in prompts.items()
    ]


def text(choose: random.Random) -> tuple[str, bytes]:
    """Return the kind and the body of a request."""
    return choose.choice(texts())


def value(choose: random.Random) -> tuple[str, bytes]:
    """Return kind and body of a completion request with unusual values, which may be valid."""
    body = choose.choice([body for path, body in BODIES if path == "completions"])
    return "values", of_json(BodyTarget.words)(json.dumps(body).encode(), choose)


MALFORMED = {
    "empty": b"",
    "cut": b'{"prompt": "x", "max_to',
    "no text": b"\xff\x00\xfe",
    "null": b"null",
    "list": b"[]",
    "string": b'"x"',
    "lists in lists": b"[" * 100_000,
    "objects in objects": b'{"a":' * 50_000,
    "long number": b'{"prompt": "x", "max_tokens": 1' + b"0" * 100_000 + b"}",
    "large exponent": b'{"prompt": "x", "temperature": 1e99999}',
    "not a number": b'{"prompt": "x", "temperature": NaN}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "prompt of a number": b'{"prompt": 3}',
    "prompt of lists": b'{"prompt": [[["x"]]]}',
    "negative token": b'{"prompt": [-1]}',
    "large token": b'{"prompt": [9223372036854775808]}',
    "no prompts": b'{"prompt": []}',
    "many prompts": json.dumps({"prompt": ["x"] * 10_000}).encode(),
    "many sequences": b'{"prompt": "x", "n": 2147483647}',
    "many fields": json.dumps({f"f{i}": i for i in range(100_000)}).encode(),
    "many biases": json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(100_000)}}).encode(),
    "many stops": json.dumps({"prompt": "x", "stop": ["s"] * 100_000}).encode(),
    "long stop": json.dumps({"prompt": "x", "stop": "s" * 100_000}).encode(),
    "many banned tokens": json.dumps({"prompt": "x", "banned_token_ids": ["x"] * 100_000}).encode(),
    "schema of a list": b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": []}}}',
}


def malformed(choose: random.Random) -> tuple[str, bytes]:
    """Return kind and body of an invalid request."""
    kind = choose.choice(list(MALFORMED))
    return f"malformed {kind}", MALFORMED[kind]


def sized(body: bytes, length: bytes | None = None) -> bytes:
    return POST + b"content-length: " + (str(len(body)).encode() if length is None else length) + b"\r\n\r\n" + body


STREAM = sized(json.dumps({"prompt": "x", "n": 16, "max_tokens": 200, "stream": True, "logprobs": 20}).encode())
CHUNKS = POST + b"transfer-encoding: chunked\r\n\r\n"
SHORT = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
# Bytes that a connection sends. Those in HELD then stay open without reading, those in GONE are reset.
CONNECTIONS = {
    "silent": b"",
    "headers": POST[:40],
    "body": sized(b"", b"1000"),
    "unread": STREAM,
    "aborted": STREAM,
    "noise": random.Random(0).randbytes(4096),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.Random(1).randbytes(500),
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "http/0.9": b"GET /\r\n\r\n",
    "http/9.9": b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "unknown method": b"FOO /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "connect": b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "path outside": b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    "path of bytes": b"GET /%00%ff\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    "long path": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "long header": POST + b"x: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "many headers": POST + b"x: y\r\n" * 50_000 + b"\r\n",
    "folded header": POST + b"x: a\r\n b\r\n\r\n",
    "null in a header": POST + b"x: a\x00b\r\n\r\n",
    "bare line feeds": sized(SHORT).replace(b"\r\n", b"\n"),
    "negative length": sized(SHORT, b"-1"),
    "length of letters": sized(SHORT, b"ten"),
    "huge length": sized(SHORT, b"9" * 40),
    "two lengths": POST + b"content-length: 3\r\n" + sized(SHORT).removeprefix(POST),
    "length and chunks": CHUNKS[:-2] + sized(SHORT).removeprefix(POST),
    "shorter than its length": sized(SHORT, b"1000"),
    "longer than its length": sized(SHORT + SHORT * 100, str(len(SHORT)).encode()),
    "chunk of letters": CHUNKS + b"zz\r\n",
    "huge chunk": CHUNKS + b"f" * 16 + b"\r\nx",
    "endless chunks": CHUNKS + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 80,
    "expects to go on": POST + b"expect: 100-continue\r\ncontent-length: 10\r\n\r\n",
    "compressed": POST + b"content-encoding: gzip\r\n" + sized(random.Random(2).randbytes(500)).removeprefix(POST),
    "upgrade": b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "pipelined": GET * 200,
}
HELD, GONE = ("unread",), ("aborted",)


async def connection(port: int, kind: str) -> tuple[str, int]:
    """Send an incomplete or invalid request, or read no answer. Return the kind and the first status of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        writer.write(CONNECTIONS[kind])
        await asyncio.wait_for(writer.drain(), HELD_SECONDS)
        if kind in HELD:
            await asyncio.sleep(HELD_SECONDS)
        elif kind in GONE:
            linger = struct.pack("ii", 1, 0)  # closing resets the connection
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            answer = await asyncio.wait_for(reader.read(100), HELD_SECONDS)
            await asyncio.wait_for(reader.read(), HELD_SECONDS)
    writer.close()
    status = answer.split(b" ", 2)[1:2]
    return f"connection {kind}", int(status[0]) if status and status[0].isdigit() else 0
