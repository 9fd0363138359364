"""An event loop in virtual time, and a fake server in it with known delays."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

Result = TypeVar("Result")


class VirtualTime(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__()

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if timers and not self._ready:  # type: ignore[attr-defined]
            self._now = max(self._now, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` in virtual time."""
    loop = VirtualTime()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@dataclass
class FakeServer:
    """Fake OpenAI server. The first chunk arrives after ``first`` seconds, each later one after ``pause``."""

    first: float = 0.25
    pause: float = 0.04
    per_chunk: int = 2  # tokens per chunk with drafts; 1 without
    owner: str = "outrider"
    counts: bool = True  # whether every chunk has a token count
    limit: int = 1000  # maximum concurrent requests; beyond it the status is 429
    has_metrics: bool = True
    context: int | None = None  # max_model_len, if the server states it
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    num_read_whole: int = 0  # streams read to the end, so that the connection can be reused
    rounds: int = 0
    drafts: int = 0
    accepted: int = 0

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake", "owned_by": self.owner, "max_model_len": self.context}]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self._page()) if self.has_metrics else httpx.Response(404)
        body = json.loads(request.content)
        self.bodies.append(body)
        if "continuous_usage_stats" in body["stream_options"] and not self.counts:
            return httpx.Response(400, json={"error": {"message": "unknown field"}})
        if self.running >= self.limit:
            return httpx.Response(429, json={"error": {"message": "the server is busy"}})
        return httpx.Response(200, content=self._stream(body))

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.running += 1
        self.most = max(self.most, self.running)
        is_plain = (body.get("speculative") or {}).get("num_draft_tokens") == 0
        left, done, wait = body["max_tokens"], 0, self.first
        while left:
            await asyncio.sleep(wait)
            count = min(left, 1 if is_plain else self.per_chunk)
            wait, left, done = self.pause, left - count, done + count
            if not is_plain:
                self.rounds, self.drafts, self.accepted = self.rounds + 1, self.drafts + 3, self.accepted + count - 1
            usage = {"usage": {"completion_tokens": done, "prompt_tokens": 5}} if self.counts else {}
            data = json.dumps({"choices": [{"text": "x" * count}], **usage}).encode()
            yield b"data: " + data[:20]  # a chunk may arrive in pieces
            yield data[20:] + b"\r\n\r\n"
        self.running -= 1
        yield b'data: {"choices": [], "usage": {"completion_tokens": %d, "prompt_tokens": 5}}\n\ndata: [DONE]\n\n' % done
        self.num_read_whole += 1

    def _page(self) -> str:
        here = '{model_name="fake",engine="0"}'
        return (
            f"# HELP vllm:spec_decode_num_drafts_total\nvllm:spec_decode_num_drafts_total{here} {self.rounds}.0\n"
            f"vllm:spec_decode_num_drafts_created{here} 1.7e9\n"
            f"vllm:spec_decode_num_draft_tokens_total{here} {self.drafts}.0\n"
            f"vllm:spec_decode_num_accepted_tokens_total{here} {self.accepted}.0\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="fake",position="0"}} {self.accepted}.0\n'
            f'outrider:phase_seconds_total{{model_name="fake",phase="score"}} {self.rounds / 10}\n'
        )
