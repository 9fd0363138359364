"""Format responses and errors as Anthropic's Messages API does: whole, or as a stream of events."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from outrider.chat import arguments_of
from outrider.errors import OutriderError
from outrider.server.answers import ItemAnswer

if TYPE_CHECKING:
    from outrider.engine.outputs import Chunk

# Kind of a text -> type of its block, which also names its text, and fields of the empty block.
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning": ("thinking", {"thinking": "", "signature": ""}),
    "message": ("text", {"text": ""}),
}
PREFIX = "msg_"  # of a message's id, before the id of its call
# HTTP status -> type of an error; others are invalid requests.
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format. ``body``: the error in OpenAI's, which may have Anthropic's details."""
    kept = {name: body["error"][name] for name in ("message", "details") if name in body["error"]}
    error = {"type": ERRORS.get(status, "invalid_request_error"), **kept}
    return {"type": "error", "error": error, "request_id": request_id}


@dataclass(kw_only=True)
class MessageAnswer(ItemAnswer):
    """Response of ``/v1/messages``, which consists of blocks."""

    max_tokens: int
    content: list[dict[str, Any]] = field(default_factory=list)
    is_open: bool = False  # whether the last block may be extended
    arguments: str = ""  # of the last block, if it is a call

    ping: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'

    def response(self) -> dict[str, Any]:
        (completion,) = self.choices
        ending = self.events(0, completion)[-2]  # before message_stop
        counts = {name: value for name, value in ending.items() if name not in ("type", "delta")}
        return {**self._message(), "content": self.content, **ending["delta"], **counts}

    def opening(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**self._message(), "usage": self._usage_and_metrics()["usage"]}}]

    def failure(self, status: int, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [error_of(status, body, self.call_id.removeprefix(PREFIX))]

    def _message(self) -> dict[str, Any]:
        head = {"id": self.call_id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": [], "stop_reason": None, "stop_sequence": None}

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        """Return an event about the last block."""
        return {"type": f"content_block_{kind}", "index": len(self.content) - 1, **content}

    def _open(self, **block: Any) -> list[dict[str, Any]]:
        """Complete the last block and begin another one."""
        closing = self._close_events()
        self.content.append(block)
        self.is_open, self.arguments = True, ""
        return [*closing, self._event("start", content_block=dict(block))]

    def _text_events(self, kind: str, text: str) -> list[dict[str, Any]]:
        (name, empty), events = TEXTS[kind], []
        if not self.is_open or self.content[-1]["type"] != name:
            events = self._open(type=name, **empty)
        self.content[-1][name] += text
        return [*events, *([self._event("delta", delta={"type": f"{name}_delta", name: text})] if text else [])]

    def _call_events(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        function, events = call["function"], []
        if "id" in call:
            events = self._open(type="tool_use", id=call["id"], name=function["name"], input={})
        self.arguments += function["arguments"]
        delta = {"type": "input_json_delta", "partial_json": function["arguments"]}
        return [*events, self._event("delta", delta=delta)]

    def _close_events(self) -> list[dict[str, Any]]:
        if not self.is_open:
            return []
        self.is_open, block = False, self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = _input(self.arguments)
        signature = [self._event("delta", delta={"type": "signature_delta", "signature": ""})]
        return [*(signature if block["type"] == "thinking" else []), self._event("stop")]

    def _end_events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the last events. An answer that is whole has a text or a call, which may be empty."""
        is_whole, sequence = chunk.finish_reason == "stop", None
        needs_text = is_whole and all(block["type"] == "thinking" for block in self.content)
        closing = [*(self._text_events("message", "") if needs_text else []), *self._close_events()]
        reason = "end_turn" if is_whole else "max_tokens"
        if not is_whole and len(self.choices[0].token_ids) < self.max_tokens:
            reason = "model_context_window_exceeded"
        elif isinstance(chunk.stop_reason, str):
            reason, sequence = "stop_sequence", chunk.stop_reason
        elif is_whole and any(block["type"] == "tool_use" for block in self.content):
            reason = "tool_use"
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*closing, {"type": "message_delta", "delta": delta, **self._usage_and_metrics()}, {"type": "message_stop"}]

    def _usage_and_metrics(self) -> dict[str, Any]:
        """Return the counts of chat under the names of this API, where the input excludes what was cached."""
        counts = super()._usage_and_metrics()
        usage = counts["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return counts | {
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
            }
        }


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call, with infinite numbers as the largest finite ones; none if they were truncated."""
    try:
        return arguments_of(arguments, _finite)
    except OutriderError:
        return {}


def _finite(text: str) -> float:
    number = float(text)
    return math.copysign(sys.float_info.max, number) if math.isinf(number) else number
