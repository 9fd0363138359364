"""Request bodies of Anthropic's Messages API, translated into chat requests. The server keeps no state between requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from outrider.engine.templates import with_thinking
from outrider.errors import OutriderError
from outrider.options import INT32
from outrider.server.mistakes import as_chat, known, refused, type_of
from outrider.server.protocol import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    Body,
    ChatBody,
    HostedTool,
    Identifier,
    Parameters,
    Stop,
    Text,
    TextPart,
    TranslatedFields,
    at_most,
    check_json,
)

# Types of blocks by the role of their message.
BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
EXPECTED_BLOCKS = "text, tool_use, tool_result or thinking"
# Tools that Anthropic's servers run: their types end with a date.
HOSTED = ("web_search_.*", "web_fetch_.*", "code_execution_.*", "tool_search_tool_.*")
NAMES = {"response_format": "output_config.format"}  # of a field of chat
# Anthropic's client reads these details, and sends the whole conversation without a thread.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
THREADLESS = refused("the server stores no conversations: send all messages, without thread", details=NO_THREADS)
TEXTS, CALLS = ("content", "reasoning_content"), "tool_calls"  # fields of a message of chat
BILLING = "x-anthropic-billing-header:"  # begins a line in Claude Code's system prompt that is not meant for the model


class Block(Body):
    ignored = frozenset({"cache_control"})


class TextBlock(TextPart):
    ignored = TextPart.ignored | {"citations"}


class ThinkingBlock(Block):
    ignored = Block.ignored | {"signature"}
    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Block):
    """Reasoning that only Anthropic can read. It is not shown to the model."""

    type: Literal["redacted_thinking"]
    data: Text


class CallBlock(Block):
    ignored = Block.ignored | {"caller"}
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(check_json)]


def _joined(content: str | list[Any] | None, separator: str = "\n") -> str:
    """Return the texts of a content; other blocks are left out."""
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(block.text for block in content if isinstance(block, TextBlock))


Texts = Text | Annotated[list[TextBlock], Field(fail_fast=True), at_most(MAX_MESSAGES, "blocks")]


class ResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts | None = None
    is_error: bool = False

    @property
    def text(self) -> str:
        """The result for the model. Chat templates have no place for ``is_error``."""
        return ("Error: " if self.is_error else "") + _joined(self.content)


def _kind(given: Any) -> str:
    """Return the tag of a block or a tool, which ``mistakes`` omits from the places of errors."""
    kind = type_of(given, "custom") if isinstance(given, dict) else given.type
    return f"tagged-{kind}"


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("tagged-text")]
    | Annotated[ThinkingBlock, Tag("tagged-thinking")]
    | Annotated[RedactedBlock, Tag("tagged-redacted_thinking")]
    | Annotated[CallBlock, Tag("tagged-tool_use")]
    | Annotated[ResultBlock, Tag("tagged-tool_result")],
    Discriminator(_kind),
    known("block", [kind for kinds in BLOCKS.values() for kind in kinds], EXPECTED_BLOCKS),
]
Blocks = Annotated[list[AnyBlock], Field(fail_fast=True), at_most(MAX_MESSAGES, "blocks")]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Text | Blocks

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        for block in self.blocks:
            if block.type not in BLOCKS[self.role]:
                expected = " or ".join(BLOCKS[self.role])
                raise ValueError(f"unsupported block {block.type!r} in a message with role {self.role}: expected {expected}")
        return self

    @property
    def blocks(self) -> list[Any]:
        return [] if isinstance(self.content, str) else self.content

    def assistant(self) -> dict[str, Any]:
        """Return the assistant's turn as a message of chat."""
        thoughts = [block.thinking for block in self.blocks if isinstance(block, ThinkingBlock)]
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
            for block in self.blocks
            if isinstance(block, CallBlock)
        ]
        said = {"content": _joined(self.content, separator=""), "reasoning_content": "\n".join(thoughts)}
        return {"role": "assistant", **said, "tool_calls": calls}


class CustomTool(Body):
    # forced calls always match the schema, with strict or without
    ignored = frozenset({"strict", "cache_control", "eager_input_streaming", "input_examples"})
    type: Literal["custom"] = "custom"
    name: Identifier
    description: Text | None = None
    input_schema: Parameters
    # accepted with the only value that changes nothing
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] = False

    def function(self) -> dict[str, Any]:
        """Return the tool as a function of chat."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


AnyTool = Annotated[
    Annotated[CustomTool, Tag("tagged-custom")] | Annotated[HostedTool, Tag("tagged-hosted")],
    Discriminator(lambda given: "tagged-custom" if _kind(given) == "tagged-custom" else "tagged-hosted"),
    known("tool", ("custom", *HOSTED), '{"name": ..., "input_schema": ...}', default="custom"),
]


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type tool needs name: the tool to call" if self.name is None else "name needs type: tool")
        return self

    def in_chat(self) -> Any:
        """Return the choice in the form of chat."""
        named = {"type": "function", "function": {"name": self.name}}
        return named if self.type == "tool" else {"any": "required"}.get(self.type, self.type)


class Thinking(Body):
    ignored = frozenset({"budget_tokens"})
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] = "summarized"  # there are no summaries: reasoning is returned as it is


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class Output(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountBody(TranslatedFields):
    """Body of ``POST /v1/messages/count_tokens``, which may have every field of ``/v1/messages``."""

    # context_management, of Claude Code, names parts of a long conversation that Anthropic's servers may drop
    ignored = TranslatedFields.ignored | {"cache_control", "context_management", "inference_geo", "speed", "diagnostics"}
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES, "messages")]
    max_tokens: int | None = Field(None, ge=1, le=INT32)
    system: Texts = ""
    stop_sequences: list[Stop] = Field(default_factory=list, max_length=MAX_STOPS)
    tools: Annotated[list[AnyTool], Field(fail_fast=True), at_most(MAX_TOOLS, "tools")] = Field(default_factory=list)
    tool_choice: Choice = Choice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    output_config: Output = Output()
    # refused
    thread: Annotated[None, THREADLESS] = None
    stop: Annotated[None, refused("expected stop_sequences")] = None
    stream_options: Annotated[None, refused("every stream has the usage: leave it out")] = None
    response_format: Annotated[None, refused("expected output_config.format")] = None

    def chat(self) -> ChatBody:
        """Return the request as one of chat.

        Raises ``RequestValidationError`` for fields that cannot be combined, ``OutriderError`` if ``messages`` have no blocks.
        """
        given = self.sampling()
        thinking, effort, form = self.thinking, self.output_config.effort, self.output_config.format
        messages = self._messages()
        if not messages:
            raise OutriderError("messages have no blocks: expected at least one message with a text or a block")
        if form is not None:
            given["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        given |= {
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "tools": [tool.function() for tool in self.tools if isinstance(tool, CustomTool)] or None,
            "tool_choice": self.tool_choice.in_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "reasoning_effort": effort,
            "include_reasoning": self.include_reasoning and thinking.display != "omitted",
            "chat_template_kwargs": with_thinking(self.chat_template_kwargs, thinking.type != "disabled"),
        }
        return as_chat(given, "messages", NAMES)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the conversation as messages of chat, in a form that every template takes.

        There is one system message, at the beginning: later ones become text of the user. Messages of one role that follow each
        other are joined.
        """
        blocks = [self.system] if isinstance(self.system, str) else [block.text for block in self.system]
        instructions = [text for text in map(_without_billing, blocks) if text]
        messages: list[dict[str, Any]] = []
        for turn in self.messages:
            if turn.role == "assistant":
                messages.append(turn.assistant())
            elif turn.role == "system" and not messages:
                instructions.append(_joined(turn.content))
            elif turn.role == "system":
                said = f"<system-reminder>\n{_joined(turn.content)}\n</system-reminder>"
                messages.append({"role": "user", "content": said})
            elif isinstance(turn.content, str):
                messages.append({"role": "user", "content": turn.content})
            for block in turn.blocks if turn.role == "user" else ():
                if isinstance(block, ResultBlock):
                    messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
                else:
                    messages.append({"role": "user", "content": block.text})
        system = [{"role": "system", "content": "\n\n".join(instructions)}] if instructions else []
        return system + merged(messages, ("user", "assistant"))


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1, le=INT32)

    @model_validator(mode="after")
    def _can_be_answered(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's: expected the user's, because answers do not continue a text")
        return self


def _without_billing(text: str) -> str:
    """Return a text of the system prompt without the line about billing."""
    return text.partition("\n")[2].lstrip() if text.startswith(BILLING) else text


def merged(messages: Sequence[dict[str, Any]], roles: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages with consecutive messages of the same role merged into one, if it is one of these roles."""
    found: list[dict[str, Any]] = []
    for role, group in groupby(messages, itemgetter("role")):
        alike = list(group)
        if role in roles:
            content, thoughts = ("\n".join(each[name] for each in alike if each.get(name)) for name in TEXTS)
            said = {"reasoning_content": thoughts, CALLS: [call for each in alike for call in each.get(CALLS, ())]}
            alike = [{"role": role, "content": content, **{name: value for name, value in said.items() if value}}]
        found += alike
    return found
