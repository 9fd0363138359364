"""Chat messages as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from outrider.errors import OutriderError
from outrider.options import shown


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: the content is text, the arguments of tool calls are objects.

    The role ``developer`` becomes ``system``, and ``reasoning`` also ``reasoning_content``.

    Raises ``OutriderError`` for malformed tool calls and for content that is not text or parts with text.
    """
    plain = {**message, "content": _text_of(message)}
    if message["role"] == "developer":  # OpenAI's newer name for system, which most templates do not know
        plain["role"] = "system"
    if thoughts := message.get("reasoning_content") or message.get("reasoning"):
        plain["reasoning_content"] = thoughts
    if not message.get("tool_calls"):
        return plain
    try:
        calls = [{**call, "function": _with_object(call["function"])} for call in message["tool_calls"]]
    except (TypeError, KeyError, AttributeError):
        raise OutriderError(f"invalid tool_calls {shown(message['tool_calls'])}: expected a list as in OpenAI's API") from None
    return {**plain, "tool_calls": calls}


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None and message["role"] in ("assistant", "tool"):
        return ""
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        known = [text for text in texts if isinstance(text, str)]
        content = "\n".join(known) if len(known) == len(content) else None
    if not isinstance(content, str):
        expected = 'expected text, or a list of parts {"type": "text", "text": ...}'
        raise OutriderError(f"invalid content {shown(message.get('content'))} of a message: {expected}")
    return content


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments_of(arguments) if isinstance(arguments, str) else arguments}


def arguments_of(text: str, parse_float: Callable[[str], float] = float) -> dict[str, Any]:
    """Return the arguments of a tool call from their JSON text; none for an empty one. Raises ``OutriderError`` for others."""
    try:
        found = json.loads(text or "{}", parse_float=parse_float)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OutriderError(f"invalid arguments {shown(text)} of a tool call: expected a JSON object")
    return found
