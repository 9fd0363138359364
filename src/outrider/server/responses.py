"""Request bodies of OpenAI's Responses API, translated into chat requests. The server keeps no state between requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from outrider.errors import OutriderError
from outrider.options import INT32
from outrider.server.messages import merged
from outrider.server.mistakes import as_chat, known, refused, type_of
from outrider.server.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    CalledFunction,
    ChatBody,
    Effort,
    Function,
    HostedTool,
    Identifier,
    JsonSchema,
    SimpleFormat,
    Text,
    TranslatedFields,
    Verbosity,
    at_most,
    check_json,
    refusal_as,
)

SYSTEM = ("system", "developer")
PieceType = Literal["input_text", "output_text", "reasoning_text", "summary_text"]
ITEMS = ("message", "reasoning", "function_call", "function_call_output")
# Tools that OpenAI's servers run.
HOSTED = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation")
SHOWN = {"description", "parameters", "strict"}  # fields of a function, besides its name, that chat has
NAMES = {"response_format": "text.format", "max_completion_tokens": "max_output_tokens"}  # of fields of chat


class Piece(Body):
    # clients send answers back as they came
    ignored = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})
    type: PieceType
    text: Text


KnownPiece = Annotated[
    Piece, known("part", get_args(PieceType), '{"type": "input_text", "text": ...}'), refusal_as("output_text")
]
Pieces = Annotated[list[KnownPiece], Field(fail_fast=True), at_most(MAX_MESSAGES, "parts")]


def _joined(content: str | list[Piece] | None) -> str:
    return content if isinstance(content, str) else "\n".join(piece.text for piece in content or ())


class Item(Body):
    ignored = frozenset({"id", "status"})


class MessageItem(Item):
    ignored = Item.ignored | {"phase"}
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Pieces


class ReasoningItem(Item):
    ignored = Item.ignored | {"encrypted_content"}
    type: Literal["reasoning"]
    content: Pieces | None = None
    summary: Pieces | None = None


class CallItem(CalledFunction, Item):
    ignored = CalledFunction.ignored | Item.ignored | {"caller"}
    type: Literal["function_call"]
    call_id: Text
    namespace: Text | None = None


class ResultItem(Item):
    ignored = Item.ignored | {"caller", "name", "namespace"}  # the call itself has them, too
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Pieces


def _kind(given: Any) -> str:
    """Return the tag of an item, a tool or a choice, which ``mistakes`` omits from the places of errors."""
    if isinstance(given, str):
        return "tagged-word"
    kind = type_of(given, "message") if isinstance(given, dict) else given.type
    return f"tagged-{'hosted' if kind in HOSTED else kind}"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("tagged-message")]
    | Annotated[ReasoningItem, Tag("tagged-reasoning")]
    | Annotated[CallItem, Tag("tagged-function_call")]
    | Annotated[ResultItem, Tag("tagged-function_call_output")],
    Discriminator(_kind),
    known("item", ITEMS, ", ".join(ITEMS[:-1]) + " or " + ITEMS[-1], default="message"),
]


class FunctionTool(Function):
    ignored = frozenset({"output_schema"})
    type: Literal["function"]
    # accepted with the only value that changes nothing
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


Functions = Annotated[
    list[Annotated[FunctionTool, known("tool", ("function",), '{"type": "function", "name": ...}')]],
    Field(fail_fast=True),
    at_most(MAX_TOOLS, "tools"),
]


class Namespace(Body):
    """Functions whose calls name their group, too."""

    type: Literal["namespace"]
    name: Identifier
    description: Text | None = None  # accepted and ignored: templates have no place for it
    tools: Functions


class NamedFunction(Body):
    type: Literal["function"]
    name: Text
    namespace: Text | None = None


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class TextOptions(Body):
    format: Annotated[SimpleFormat | SchemaFormat, Field(discriminator="type")] = SimpleFormat(type="text")
    verbosity: Verbosity | None = None


class Reasoning(Body):
    """How much the model reasons. There are no summaries."""

    ignored = frozenset({"summary", "generate_summary"})
    effort: Effort | None = None
    # accepted with the only value that changes nothing
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


STATELESS = refused("the server stores no responses: send the whole conversation as input")
AnyTool = Annotated[
    Annotated[FunctionTool, Tag("tagged-function")]
    | Annotated[Namespace, Tag("tagged-namespace")]
    | Annotated[HostedTool, Tag("tagged-hosted")],
    Discriminator(_kind),
    known("tool", ("function", "namespace", *HOSTED), '{"type": "function", "name": ...}'),
]
AnyTools = Annotated[list[AnyTool], Field(fail_fast=True), at_most(MAX_TOOLS, "tools")]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: AnyTools


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("tagged-word")]
    | Annotated[NamedFunction, Tag("tagged-function")]
    | Annotated[AllowedTools, Tag("tagged-allowed_tools")],
    Discriminator(_kind),
    known("choice", ("function", "allowed_tools"), '{"type": "function", "name": ...} or allowed_tools', words=True),
]


class ResponseBody(TranslatedFields):
    # of OpenAI's own tools, and of Codex; metadata are repeated in the response
    ignored = (TranslatedFields.ignored - {"metadata"}) | {"max_tool_calls", "client_metadata"}
    input: Text | Annotated[list[AnyItem], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES, "items")]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32)
    tools: AnyTools = Field(default_factory=list)
    tool_choice: AnyChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    # accepted with the only value that changes nothing
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    background: Annotated[Literal[False], refused("responses cannot run in the background: leave it out", False)] = False
    # accepted without effect on the answer
    metadata: Annotated[dict[str, Any], AfterValidator(check_json)] | None = None  # repeated in the response
    include: list[
        Literal[
            "reasoning.encrypted_content",
            "web_search_call.action.sources",
            "web_search_call.results",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "message.input_image.image_url",
        ]
    ] = Field(default_factory=list, max_length=16)
    # refused
    messages: Annotated[None, refused("expected input")] = None
    max_tokens: Annotated[None, refused("expected max_output_tokens")] = None
    max_completion_tokens: Annotated[None, refused("expected max_output_tokens")] = None
    response_format: Annotated[None, refused("expected text.format")] = None
    previous_response_id: Annotated[None, STATELESS] = None
    conversation: Annotated[None, STATELESS] = None
    prompt: Annotated[None, refused("the server stores no prompts: send instructions and input")] = None

    @model_validator(mode="after")
    def _can_be_repeated(self) -> Self:
        try:
            json.dumps(self.echo, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            where = "tools, text.format or metadata"
            raise ValueError(f"invalid JSON in {where}: expected finite numbers, Unicode text and little nesting") from None
        return self

    def chat(self) -> ChatBody:
        """Return the request as one of chat.

        Raises ``RequestValidationError`` for fields that cannot be combined, ``OutriderError`` if ``input`` has no messages.
        """
        given = self.sampling()
        tools = [
            _in_chat(namespace, function.name, **function.model_dump(include=SHOWN, exclude_none=True))
            for namespace, function in _functions(self.tools)
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = _in_chat(choice.namespace, choice.name)
        elif isinstance(choice, AllowedTools):
            allowed = [_in_chat(namespace, function.name) for namespace, function in _functions(choice.tools)]
            choice = {"type": choice.type, choice.type: {"mode": choice.mode, "tools": allowed}}
        form, messages = self.text.format, self._messages()
        if not messages:
            raise OutriderError("input has no text: expected at least one message, call or reasoning item with text")
        if isinstance(form, SchemaFormat):
            schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            given["response_format"] = {"type": form.type, "json_schema": schema}
        elif form.type != "text":
            given["response_format"] = {"type": form.type}
        given |= {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "tools": tools or None,
            "tool_choice": choice,
        }
        return as_chat(given, "input", NAMES)

    @property
    def names(self) -> dict[str, dict[str, str]]:
        """The names of the functions in namespaces, by their names in chat."""
        pairs = [(namespace, function.name) for namespace, function in _functions(self.tools) if namespace is not None]
        return {_name_in_chat(namespace, name): {"namespace": namespace, "name": name} for namespace, name in pairs}

    def _messages(self) -> list[dict[str, Any]]:
        """Return the conversation as messages of chat; one system message has the instructions, as templates expect."""
        if isinstance(self.input, str):
            messages: list[dict[str, Any]] = [{"role": "user", "content": self.input}]
        else:
            messages = _items_as_messages(self.input)
        if self.instructions:
            first = [message["content"] for message in takewhile(lambda message: message["role"] in SYSTEM, messages)]
            messages[: len(first)] = [{"role": "system", "content": "\n\n".join([self.instructions, *first])}]
        return messages

    @cached_property
    def echo(self) -> dict[str, Any]:
        """The settings, which a response repeats."""
        choice = self.tool_choice
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice.model_dump(exclude_none=True) if isinstance(choice, Body) else choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools],
            "top_p": self.top_p,
            "truncation": "disabled",
        }


def _functions(tools: Sequence[Body]) -> list[tuple[str | None, FunctionTool]]:
    """Return the functions among tools, each after its namespace."""
    found: list[tuple[str | None, FunctionTool]] = []
    for tool in tools:
        if isinstance(tool, Namespace):
            found += [(tool.name, function) for function in tool.tools]
        elif isinstance(tool, FunctionTool):
            found.append((None, tool))
    return found


def _in_chat(namespace: str | None, name: str, **more: Any) -> dict[str, Any]:
    """Return a function as a tool of chat."""
    return {"type": "function", "function": {**more, "name": _name_in_chat(namespace, name)}}


def _name_in_chat(namespace: str | None, name: str) -> str:
    """Return the name of a function in chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def _items_as_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items as messages. Reasoning, texts and calls that follow each other are one message, as in answers of chat.

    Templates expect the results right after the message with the calls.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _joined(item.content)})
        elif isinstance(item, MessageItem):
            said = _joined(item.content)
            if messages and messages[-1]["role"] == "assistant":
                said = said.removeprefix("\n")  # ``merged`` puts one between texts
            messages.append({"role": "assistant", "content": said})
        elif isinstance(item, CallItem):
            function = {"name": _name_in_chat(item.namespace, item.name), "arguments": item.arguments}
            messages.append({"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]})
        elif isinstance(item, ReasoningItem) and (thoughts := _joined(item.content) or _joined(item.summary)):
            messages.append({"role": "assistant", "reasoning_content": thoughts})
    return merged(messages, ("assistant",))
