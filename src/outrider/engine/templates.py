"""Adapt messages and variables to a chat template. What a template reads is found by rendering short conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

PROBE = "a text to look for"  # in what a chat template renders
ARGUMENTS = {"key": "value"}  # of a call
USER = {"role": "user", "content": "a question"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "find", "content": "a result"}  # Mistral's ids have 9 letters
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # in the order of preference
PYTHON_CALLS = "List of tools: "  # in LFM2's chat templates, which show the content of messages but not their calls
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # for gpt-oss, which knows low, medium and high
THINKING_VARIABLES = "enable_thinking", "thinking"  # of chat templates; false: no reasoning
# Variables that Outrider sets itself: refused in ``chat_template_kwargs``.
OWN_VARIABLES = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")

Messages = list[dict[str, Any]]


def as_read_by(template: str | None, messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages with texts, reasoning, arguments of calls and the order of roles as a chat template reads them."""
    if template is None:
        return [dict(each) for each in messages]
    return [_adapted(template, each) for each in _without_refused_users(template, messages)]


def variables_for(template: str | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables for a chat template, with an effort that it knows."""
    found = dict(variables or {})
    effort = found.get("reasoning_effort")
    if isinstance(effort, str) and "<|channel|>analysis" in (template or ""):
        found["reasoning_effort"] = EFFORTS.get(effort, effort)
    return found


def with_thinking(variables: dict[str, Any], is_thinking: bool) -> dict[str, Any]:
    """Return variables for a chat template with reasoning on or off, unless they set it already."""
    if not variables.keys().isdisjoint(THINKING_VARIABLES):
        return variables
    return dict.fromkeys(THINKING_VARIABLES, is_thinking) | variables


def requested_variables(effort: object, verbosity: object, variables: dict[str, Any]) -> dict[str, Any]:
    """Return a request's variables for a chat template. The effort "none" disables reasoning where a template can do so."""
    named = {"reasoning_effort": effort, "verbosity": verbosity}
    given = {name: value for name, value in named.items() if value is not None}
    return given | (with_thinking(variables, False) if effort == "none" else variables)


def _without_refused_users(template: str, messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages with texts of the user as part of the result before them, if the template requires it."""
    found: Messages = []
    for message in messages:
        if found and found[-1]["role"] == "tool" and message["role"] == "user" and _refuses_user_after_result(template):
            found[-1]["content"] += f"\n\n{message['content']}"
        else:
            found.append(dict(message))
    return found


def _adapted(template: str, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("tool_calls") and PYTHON_CALLS in template and not _shows_calls(template):
        message["content"] = _in_python(message["tool_calls"]) + (message["content"] or "")
    elif message.get("tool_calls") and _reads_text_arguments(template):
        message["tool_calls"] = [{**call, "function": _with_text(call["function"])} for call in message["tool_calls"]]
    if message.get("reasoning_content"):
        message = _with_reasoning(template, message)
    # Templates of some image models drop plain texts.
    if isinstance(message.get("content"), str) and _reads_parts_only(template):
        message["content"] = [_text_part(message["content"])]
    return message


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _in_python(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as LFM2 writes them."""
    written = []
    for function in [call["function"] for call in calls]:
        values = [(key, _with_double_quotes(value)) for key, value in function["arguments"].items()]
        written.append(f"{function['name']}({', '.join([f'{key}={value}' for key, value in values])})")
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _with_double_quotes(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _with_reasoning(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its ``reasoning_content`` where the template reads reasoning, too."""
    thought, content = message["reasoning_content"], message["content"]
    key = _reasoning_key(template)
    if key is None:
        return {**message, "content": _blocks(thought, content)} if _reads_blocks(template) else message
    if message.get("tool_calls") and content and _refuses_content(template, key):
        thought, content = f"{thought}\n\n{content}", ""
    return {**message, "content": content, key: thought}


def _blocks(thought: str, content: str) -> Messages:
    return [{"type": "thinking", "thinking": thought}, *([_text_part(content)] if content else [])]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@lru_cache(maxsize=16)
def _reads_parts_only(template: str) -> bool:
    plain, parts = ([{**USER, "content": content}] for content in (PROBE, [_text_part(PROBE)]))
    return PROBE not in _rendered(template, plain) and PROBE in _rendered(template, parts)


@lru_cache(maxsize=16)
def _shows_calls(template: str) -> bool:
    return any([PROBE in _rendered(template, _called(arguments)) for arguments in ({"key": PROBE}, json.dumps(PROBE))])


@lru_cache(maxsize=16)
def _reads_text_arguments(template: str) -> bool:
    """Return whether calls whose arguments are objects fail or are shown as Python writes them, and texts are shown."""
    text = json.dumps(ARGUMENTS)
    as_object = _rendered(template, _called(ARGUMENTS))
    return (not as_object or repr(ARGUMENTS) in as_object) and text in _rendered(template, _called(text))


@lru_cache(maxsize=16)
def _reasoning_key(template: str) -> str | None:
    """Return the key of a message's reasoning, or None if the template shows none."""
    return next((key for key in REASONING_KEYS if PROBE in _rendered(template, _history(template, **{key: PROBE}))), None)


@lru_cache(maxsize=16)
def _reads_blocks(template: str) -> bool:
    """Return whether a template reads reasoning from the content. Others may show it as JSON, or as Python writes it."""
    shown = _rendered(template, _history(template, content=_blocks(PROBE, "an answer")))
    return PROBE in shown and not re.search(rf"['\"]{PROBE}['\"]", shown)


@lru_cache(maxsize=16)
def _refuses_content(template: str, key: str) -> bool:
    """Return whether a message with calls and reasoning, which has the key ``key``, may not have a content."""
    return not _rendered(template, _history(template, content="an answer", **{key: PROBE}))


@lru_cache(maxsize=16)
def _refuses_user_after_result(template: str) -> bool:
    history = _history(template)
    return not _rendered(template, [*history, USER]) and bool(_rendered(template, history))


def _history(template: str, **fields: Any) -> Messages:
    """Return a conversation with a call; ``fields``: further ones of its message."""
    return _called(json.dumps(ARGUMENTS) if _reads_text_arguments(template) else ARGUMENTS, **fields)


def _called(arguments: Any, **fields: Any) -> Messages:
    call = {"id": RESULT["tool_call_id"], "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call], **fields}, RESULT]


def _rendered(template: str, messages: Messages) -> str:
    """Return what a chat template renders, nothing if it rejects the messages."""
    try:
        found: Any = render_jinja_template([messages], chat_template=template, bos_token="", eos_token="")
    except MemoryError:  # of a worker, whose memory is limited
        raise
    except Exception:  # templates can raise anything
        return ""
    return str(found[0][0])
