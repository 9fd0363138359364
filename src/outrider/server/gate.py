"""ASGI middleware: request ids, API keys, size and time limits for bodies, and one log line per call."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.config import ANYONE, Client, KeyRing, ServerConfig, host_error
from outrider.server.message_events import error_of

logger = logging.getLogger("outrider.server")

GUARDED = ("/v1/", "/tokenize", "/detokenize", "/openapi.json")  # beginnings of paths that need a key
UNKNOWN_KEY = "missing or unknown API key: send Authorization: Bearer <key>, or x-api-key: <key>"
DISCARD_FACTOR = 4  # the body of a refused call is read up to this multiple of the size limit
MESSAGES = "/v1/messages"  # beginning of the paths of Anthropic's API, whose errors have its format
MAX_LOGGED = 200  # characters of a path in the log
CLOSED = 499  # the client disconnected (nginx's code)


@dataclass
class Call:
    """Data about one call, logged when it ends."""

    request_id: str
    arrived: float  # time.monotonic() at its first byte
    client: Client = ANYONE
    log_fields: dict[str, Any] = field(default_factory=dict)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format. ``param``: the field of the body at fault."""
    readable = message.encode(errors="replace").decode()
    return {"error": {"message": readable, "type": kind, "param": param, "code": code}}


def error_response(path: str, call: Call, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Return the response to a call that failed. ``body``: the error in OpenAI's format."""
    found = error_of(status, body, call.request_id) if path.startswith(MESSAGES) else body
    return JSONResponse(found, status, headers)


class Gate:
    """Outermost ASGI middleware: check a call before it is parsed, and log it."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: KeyRing, address: str) -> None:
        self._app, self._config, self._keys, self._address = app, config, keys, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, status = Headers(scope=scope), 0
        given, state = headers.get("x-request-id", ""), scope.setdefault("state", {})
        request_id = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else secrets.token_hex(12)
        call = state["call"] = Call(request_id, state.get("arrived") or monotonic())

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id") if scope["path"].startswith(MESSAGES) else (b"x-request-id",)
                message["headers"] = [*message["headers"], *((name, call.request_id.encode()) for name in names)]
            await send(message)

        try:
            refused = self._refusal(scope["path"], headers, call, scope.get("client"))
            if refused is None:
                await self._app(scope, self._measured(receive), answer)
            else:
                if "expect" not in headers:  # with "Expect: 100-continue" the client has not sent the body yet
                    await self._discard(receive)
                await refused(scope, receive, answer)
        except Exception:
            if status:  # the response has started: abort it
                raise
            logger.exception("request %s failed", call.request_id)
            await _error(scope["path"], call, 500, "the server failed", "server_error")(scope, receive, answer)
        finally:
            facts = {
                "request_id": call.request_id,
                "method": scope["method"],
                "path": scope["path"][:MAX_LOGGED],
                "status": status or CLOSED,
                "client": call.client.name,
                "seconds": round(monotonic() - call.arrived, 4),
                **call.log_fields,
            }
            level = logging.INFO if scope["path"].startswith(GUARDED) else logging.DEBUG
            logger.log(level, "request", extra={"facts": facts})

    def _refusal(self, path: str, headers: Headers, call: Call, address: tuple[str, int] | None) -> Response | None:
        """Return the response to a call that is refused, or None."""
        unknown_host = None if len(self._keys) else host_error(headers.get("host"), self._address, self._config.host)
        if unknown_host is not None:
            return _error(path, call, 403, unknown_host, code="unknown_host")
        if path.startswith(GUARDED):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            key = key.encode("latin-1").strip().decode(errors="surrogateescape")  # the bytes that the client sent
            client = self._keys.client(key)
            if client is None:
                return _error(path, call, 401, UNKNOWN_KEY, code="invalid_api_key")
            call.client = client if len(self._keys) or address is None else replace(client, connection="{}:{}".format(*address))
        if headers.get("content-encoding", "identity").lower() != "identity":
            return _error(path, call, 415, "the body is compressed: send it without the header Content-Encoding")
        if int(headers.get("content-length", "0")) > self._config.max_body:  # h11 has checked that it is a number
            return _error(path, call, 413, self._too_large())
        return None

    def _too_large(self) -> str:
        return f"the body is larger than {self._config.max_body} bytes"

    def _measured(self, receive: Receive) -> Receive:
        """Wrap ``receive`` to enforce the size and time limits of the body."""
        num_bytes, is_complete, deadline = 0, False, monotonic() + self._config.body_timeout

        async def measured() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - monotonic())
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time") from None
            num_bytes += len(message.get("body", b""))
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            if num_bytes > self._config.max_body:
                if not is_complete:
                    await self._discard(receive)
                raise HTTPException(413, self._too_large())
            return message

        return measured

    async def _discard(self, receive: Receive) -> None:
        """Read the rest of a body, up to a limit: closing a connection with unread data would discard the response."""

        async def rest() -> None:
            left, message = DISCARD_FACTOR * self._config.max_body, await receive()
            while left > 0 and message.get("more_body", False):
                left -= len(message["body"])
                message = await receive()

        with suppress(TimeoutError):
            await asyncio.wait_for(rest(), self._config.body_timeout)


def _error(
    path: str, call: Call, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None
) -> Response:
    return error_response(path, call, status, error_body(message, kind, code), {"connection": "close"})


class JsonLines(logging.Formatter):
    """Format log records as one JSON object per line. Prompts and outputs are not logged."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record and its ``facts`` as JSON."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
