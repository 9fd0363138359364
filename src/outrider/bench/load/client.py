"""Send streamed requests and record the arrival times of their tokens, in seconds of the event loop's clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

PATH = "/v1/completions"
UNEXPECTED_JSON = (ValueError, LookupError, TypeError, AttributeError)  # raised for an answer of another form


@dataclass
class Sample:
    """Timing and counts of one request."""

    started: float
    first: float | None = None  # arrival of the first token
    ended: float = 0.0
    text: str = ""
    num_tokens: int = 0
    num_accepted: int = 0  # accepted drafts, if the server reports them
    num_drafts: int = 0
    pauses: list[tuple[float, float]] = field(default_factory=list)  # seconds before each later chunk, (mean) tokens in it
    error: str | None = None

    @property
    def first_token_seconds(self) -> float | None:
        """Return seconds from the request to its first token."""
        return None if self.first is None else self.first - self.started

    @property
    def token_seconds(self) -> float | None:
        """Return the mean seconds per token after the first chunk; None with a single chunk."""
        tokens = sum(count for _, count in self.pauses)
        return sum(seconds for seconds, _ in self.pauses) / tokens if tokens else None


class Client:
    """HTTP client for one server."""

    def __init__(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> None:
        """``body``: common fields of all requests.

        Without token counts per chunk, the answer's tokens are divided equally among its chunks.
        """
        self.http, self.body = http, body

    async def ask(self, prompt: str, **more: Any) -> Sample:
        """Send one request and return its sample. Errors are stored in the sample.

        A request is sent again once if its connection is closed before the first token, as servers do with idle connections.
        """
        clock = asyncio.get_running_loop().time
        sample, body = Sample(clock()), {**self.body, "prompt": prompt, **more}
        try:
            try:
                await self._send(body, sample)
            except httpx.RemoteProtocolError:
                if sample.first is not None:
                    raise
                await self._send(body, sample)
        except (httpx.HTTPError, *UNEXPECTED_JSON) as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.ended = sample.ended or clock()
        return sample

    async def _send(self, body: Mapping[str, Any], sample: Sample) -> None:
        async with self.http.stream("POST", PATH, json=body) as answer:
            if answer.status_code != 200:
                sample.error = f"{answer.status_code}: {_message(await answer.aread())}"
            else:
                await self._read(answer, sample)

    async def _read(self, answer: httpx.Response, sample: Sample) -> None:
        """Read the stream. If every chunk with text states the usage, its increase is the number of tokens in the chunk.

        It is read to the end, beyond [DONE], so that the connection is reused.
        """
        clock, last, is_done, is_counted = asyncio.get_running_loop().time, 0.0, False, True
        async for data in events(answer):
            if data == b"[DONE]":
                is_done = True
                continue
            now, event = clock(), json.loads(data)
            if "error" in event:
                sample.error = _message(data)
                return
            usage = event.get("usage")
            count = usage["completion_tokens"] - sample.num_tokens if usage else 0
            choices = event.get("choices")
            text = (choices[0].get("text") or "") if choices else ""
            sample.text += text
            is_counted &= bool(usage or not text)  # llama.cpp states usage only in the last chunk, which has no text
            if choices and (count if usage and is_counted else text):
                if sample.first is None:
                    sample.first = now
                else:
                    sample.pauses.append((now - last, count))
                last = sample.ended = now
            if usage:
                sample.num_tokens = usage["completion_tokens"]
                _count_drafts(usage, sample)
        if not is_done or sample.first is None:
            sample.error = "the stream was truncated"
        elif not sample.num_tokens:
            sample.error = "no usage in the answer: the server must support stream_options.include_usage"
        elif not is_counted:
            share = max(sample.num_tokens - 1, 1) / max(len(sample.pauses), 1)  # the first chunk counts as one token
            sample.pauses = [(seconds, share) for seconds, _ in sample.pauses]


async def events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events as they arrive."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # a space may follow
                yield line[5:].strip()


def _count_drafts(usage: Mapping[str, Any], sample: Sample) -> None:
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    if accepted is not None and rejected is not None:
        sample.num_accepted, sample.num_drafts = accepted, accepted + rejected


def _message(body: bytes) -> str:
    """Return the message of an error body in one line."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:200]
