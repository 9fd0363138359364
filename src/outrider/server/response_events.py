"""Format responses as OpenAI's Responses API does: whole, or as a stream of semantic events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.server.answers import ItemAnswer

if TYPE_CHECKING:
    from outrider.engine.outputs import Chunk

# Kind of an item -> prefix of its id, and type of its text, which also names the events about it.
TEXTS = {"reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text")}
LOGPROBS: dict[str, dict[str, Any]] = {"reasoning": {}, "message": {"logprobs": []}}  # required by OpenAI's client


@dataclass(kw_only=True)
class ResponseAnswer(ItemAnswer):
    """Response of ``/v1/responses``. A stream consists of semantic events; the last one has the whole response."""

    echo: dict[str, Any]
    names: dict[str, dict[str, str]]  # a function's name in chat -> its namespace and name, if it has a namespace
    output: list[dict[str, Any]] = field(default_factory=list)  # the last item may be incomplete
    num_events: int = 0

    def response(self) -> dict[str, Any]:
        (completion,) = self.choices
        response: dict[str, Any] = self.events(0, completion)[-1]["response"]
        return response

    def opening(self) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def failure(self, status: int, body: dict[str, Any]) -> list[dict[str, Any]]:
        error = body["error"]
        code = "server_error" if error["type"] == "server_error" else "invalid_prompt"  # those that OpenAI's API knows
        closing = self._close_events("incomplete")
        failed = self._response("failed", error={"code": code, "message": error["message"]})
        return [*closing, self._event("response.failed", response=failed)]

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        head = {"id": self.call_id, "object": "response", "created_at": self.created, "model": self.model, "status": status}
        nothing = {"error": None, "incomplete_details": None, "usage": None}
        return {**head, **nothing, **self.echo, "output": list(self.output), **more}

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **content}

    def _of_item(self, kind: str, **content: Any) -> dict[str, Any]:
        """Return an event about the last item."""
        return self._event(kind, output_index=len(self.output) - 1, item_id=self.output[-1]["id"], **content)

    def _open(self, prefix: str, **item: Any) -> list[dict[str, Any]]:
        """Complete the last item and begin another one."""
        closing = self._close_events()
        self.output.append({"id": f"{prefix}_{self.call_id}_{len(self.output)}", **item, "status": "in_progress"})
        added = {name: [] if name == "content" else value for name, value in self.output[-1].items()}
        return [*closing, self._event("response.output_item.added", output_index=len(self.output) - 1, item=added)]

    def _text_events(self, kind: str, text: str) -> list[dict[str, Any]]:
        prefix, part_type = TEXTS[kind]
        events = []
        if not self.output or (self.output[-1]["type"], self.output[-1]["status"]) != (kind, "in_progress"):
            part = {"type": part_type, "text": "", **({"annotations": []} if kind == "message" else {})}
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events = self._open(prefix, type=kind, **own, content=[dict(part)])
            events.append(self._of_item("response.content_part.added", content_index=0, part=part))
        if text:
            self.output[-1]["content"][0]["text"] += text
            events.append(self._of_item(f"response.{part_type}.delta", content_index=0, delta=text, **LOGPROBS[kind]))
        return events

    def _call_events(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        function, events = call["function"], []
        if "id" in call:
            named = self.names.get(function["name"], {"name": function["name"]})
            events = self._open("fc", type="function_call", call_id=call["id"], **named, arguments="")
        self.output[-1]["arguments"] += function["arguments"]
        return [*events, self._of_item("response.function_call_arguments.delta", delta=function["arguments"])]

    def _close_events(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self.output or self.output[-1]["status"] != "in_progress":
            return []
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._of_item("response.function_call_arguments.done", **named)]
        else:
            part = item["content"][0]
            text = {"text": part["text"], **LOGPROBS[item["type"]]}
            events = [
                self._of_item(f"response.{part['type']}.done", content_index=0, **text),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)]

    def _end_events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the last events. An answer that is whole has a text or a call, which may be empty."""
        is_whole = chunk.finish_reason == "stop"
        needs_text = is_whole and all(item["type"] == "reasoning" for item in self.output)
        status = "completed" if is_whole else "incomplete"
        events = [*(self._text_events("message", "") if needs_text else []), *self._close_events(status)]
        details = None if is_whole else {"reason": "max_output_tokens"}
        response = self._response(status, incomplete_details=details, **self._usage_and_metrics())
        return [*events, self._event(f"response.{status}", response=response)]

    def _usage_and_metrics(self) -> dict[str, Any]:
        """Return the counts of chat under the names of this API."""
        counts = super()._usage_and_metrics()
        usage = counts["usage"]
        return counts | {
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            }
        }
