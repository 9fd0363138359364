"""Request bodies of OpenAI's API, extended by the engine's sampling parameters. Unknown fields are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator

from outrider.chat import arguments_of, for_template
from outrider.engine.options import Speculation
from outrider.engine.prompts import shown_tool
from outrider.engine.templates import OWN_VARIABLES, requested_variables
from outrider.options import INT32, declared, shown
from outrider.registry import PLAIN
from outrider.server.formats import MAX_NAME
from outrider.server.parameters import calls_schema, levels
from outrider.types import Grammar, OutriderError, SamplingParams

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_FIELDS = 128  # fields per object: each wrong one adds an error
MAX_BIASES = 4096
MAX_MESSAGES = 4096  # of a conversation, and parts of a message
MAX_TOOLS = 256  # of a call, and tool calls of a message
MAX_DEPTH = 64  # of parameters and arguments of tools


def _unicode(text: str) -> str:
    """Validate that a string has no unpaired surrogates, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("invalid Unicode: unpaired surrogate") from None
    return text


def at_most(limit: int, what: str) -> BeforeValidator:
    """Limit the size of a dict or list before its elements are validated, which takes longer."""

    def check(given: Any) -> Any:
        if isinstance(given, (dict, list)) and len(given) > limit:
            raise ValueError(f"too many {what}: the limit is {limit}")
        return given

    return BeforeValidator(check)


def check_json(value: Any) -> Any:
    """Validate that JSON is not nested so deeply that a library could fail, and that its strings are valid Unicode."""
    for depth, _ in enumerate(levels(value)):
        if depth == MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    _unicode(json.dumps(value, ensure_ascii=False))
    return value


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Validate that the schema describes an object, because arguments have names."""
    if schema.get("type", "object") != "object":
        raise ValueError(f"invalid type {shown(schema['type'])}: expected 'object', because arguments have names")
    return schema


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    """Validate the variables for a chat template."""
    for name in given:
        if name in OWN_VARIABLES:
            raise ValueError(f"{name!r} is set by the server: expected other variables of the chat template")
    return given


def _arguments(text: str) -> str:
    """Replace the arguments of a call that no template can show, such as truncated ones, by none."""
    try:
        check_json(arguments_of(text))
    except (OutriderError, ValueError):
        return "{}"
    return text


Text = Annotated[str, AfterValidator(_unicode)]
Stop = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]  # report the first error only
Bias = Annotated[float, Field(ge=-100, le=100)]
Variables = Annotated[dict[Text, Any], AfterValidator(check_json), AfterValidator(_variables)]
Identifier = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME}}}$")]  # name of a function
Parameters = Annotated[dict[str, Any], AfterValidator(check_json), AfterValidator(_of_object)]  # JSON schema of arguments
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def sampling_field(name: str) -> Any:
    """Return a field with the default, bounds and help of the same field of ``SamplingParams``."""
    option = declared(SamplingParams)[name]
    return Field(getattr(SamplingParams(), name), description=option.help, **option.kind.bounds)


class Body(BaseModel):
    """Base class of all bodies. Unknown fields are refused: ignoring one silently would give a wrong result."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()  # names of fields that are accepted without effect on the answer

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        """Drop fields that are ignored, and those that are null: many clients send every field they know."""
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise ValueError(f"too many fields in an object: the limit is {MAX_FIELDS}")
        return {name: value for name, value in body.items() if value is not None and name not in cls.ignored}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the OpenAPI document, which allows the ignored fields, too."""
        found = handler.resolve_ref_schema(handler(schema))
        found["properties"] = {name: {} for name in sorted(cls.ignored)} | found.get("properties", {})
        return found


class StreamOptions(Body):
    ignored = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's extension: token counts in every chunk


class PromptCacheOptions(Body):
    """Options of OpenAI's prompt cache, which have no effect on this server's."""

    ignored = frozenset({"mode", "ttl", "comparison_response_id"})
    prewarm: Literal[False] = False  # true asks for no answer


class Speculative(Body):
    """Drafting options of this request. They do not change the output's distribution."""

    method: Text | None = Field(None, description="The served method, or plain for no drafts.")
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = Field(
        "auto", description=declared(Speculation)["num_draft_tokens"].help
    )


class SimpleFormat(Body):
    type: Literal["text", "json_object"]


class JsonSchema(Body):
    name: Text = "answer"
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # None: any object
    strict: bool | None = None  # always strict


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[SimpleFormat | JsonSchemaFormat, Field(discriminator="type")]


class SamplingFields(Body):
    """Fields common to both kinds of completion. The defaults are those of ``SamplingParams``."""

    ignored = frozenset({
        "user", "metadata", "store", "service_tier", "safety_identifier", "prediction",
        "prompt_cache_key", "prompt_cache_retention",
    })  # fmt: skip
    model: Text | None = None
    temperature: float = sampling_field("temperature")
    top_p: float = sampling_field("top_p")
    n: int = sampling_field("n")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = sampling_field("seed")
    presence_penalty: float = sampling_field("presence_penalty")
    frequency_penalty: float = sampling_field("frequency_penalty")
    logit_bias: Annotated[dict[TokenId, Bias], at_most(MAX_BIASES, "logit biases")] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # extensions of OpenAI's API
    top_k: int = sampling_field("top_k")
    min_p: float = sampling_field("min_p")
    repetition_penalty: float = sampling_field("repetition_penalty")
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    banned_token_ids: TokenIds = Field(default_factory=list)
    min_tokens: int = sampling_field("min_tokens")
    ignore_eos: bool = sampling_field("ignore_eos")
    include_stop_str_in_output: bool = sampling_field("include_stop_str_in_output")
    skip_special_tokens: bool = sampling_field("skip_special_tokens")
    speculative: Speculative | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def is_json(self) -> bool:
        """Whether the output must be JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def output_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the output, or None."""
        wanted = self.response_format
        return wanted.json_schema.schema_ if isinstance(wanted, JsonSchemaFormat) else None

    def params(self, max_tokens: int, logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
        """Return the engine's sampling parameters. Raises ``OutriderError`` for invalid values."""
        shared = declared(SamplingParams).keys() & SamplingFields.model_fields.keys()
        given = {name: value for name in shared if (value := getattr(self, name)) is not None}
        many = given.keys() & {"allowed_token_ids", "banned_token_ids"}  # a body may repeat an id a million times
        given |= {name: set(given[name]) for name in many}
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)

    def num_drafts(self, served: str) -> int | None:
        """Return the requested drafts per round, or None for the server's default. ``served``: name of the served method.

        Raises ``OutriderError`` if the request names another method.
        """
        wanted = self.speculative
        if wanted is None:
            return None
        if wanted.method not in (None, served, PLAIN):
            raise OutriderError(f"method {wanted.method!r} is not served: expected {served!r} or {PLAIN!r}")
        if wanted.method == PLAIN:
            return 0
        k = wanted.num_draft_tokens
        return k if isinstance(k, int) else None


class TranslatedFields(SamplingFields):
    """Fields of APIs whose requests are translated into chat."""

    # extensions of those APIs
    include_reasoning: bool = True
    chat_template_kwargs: Variables = Field(default_factory=dict)
    n: Literal[1] = 1  # accepted with the only value that changes nothing

    def sampling(self) -> dict[str, Any]:
        """Return the given fields that chat has in the same form."""
        return self.model_dump(include=TranslatedFields.model_fields.keys() - {"stream_options"}, exclude_unset=True)


class TextPart(Body):
    ignored = frozenset({"cache_control", "prompt_cache_breakpoint"})  # hints of Anthropic's and OpenAI's API
    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise ValueError(f'unsupported part {shown(part["type"])}: expected {{"type": "text", "text": ...}}')
        return part


def refusal_as(kind: str) -> BeforeValidator:
    """Read a refusal in an assistant's message as a text of type ``kind``: the model is shown what was said."""

    def renamed(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "refusal":
            return part
        return {"text" if name == "refusal" else name: value for name, value in part.items()} | {"type": kind}

    return BeforeValidator(renamed)


class CalledFunction(Body):
    ignored = frozenset({"parsed_arguments"})  # OpenAI's client adds it to answers
    name: Text
    arguments: Annotated[Text, AfterValidator(_arguments)]


class ToolCall(Body):
    ignored = frozenset({"index"})  # some clients keep it from a stream
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


Parts = Annotated[list[Annotated[TextPart, refusal_as("text")]], Field(fail_fast=True)]


class Message(Body):
    ignored = frozenset({"annotations", "parsed", "cache_control"})  # clients send answers back as they came
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | Parts, at_most(MAX_MESSAGES, "parts")] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), at_most(MAX_TOOLS, "tool calls")] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # the same under vLLM's name
    refusal: Text | None = None  # instead of content

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is missing: a message with role tool needs the id of its call")
        if self.role == "assistant" and self.refusal and not self.content:
            self.content = self.refusal  # the model is shown what was said
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.thoughts)):
            names = "tool_calls, reasoning_content or refusal"
            raise ValueError(f"content is missing: only an assistant's message with {names} may lack it")
        return self

    @property
    def thoughts(self) -> str | None:
        """The reasoning, under either name."""
        return self.reasoning_content or self.reasoning

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template."""
        shown = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
        message = self.model_dump(include={*shown})
        message["reasoning_content"] = self.thoughts
        return for_template({name: message[name] for name in shown if message[name] or name == "content"})


class Function(Body):
    name: Identifier
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = None  # forced calls always match the parameters


class Tool(Body):
    ignored = frozenset({"cache_control"})
    type: Literal["function"]
    function: Function

    def arguments_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        given = self.function.parameters or {"properties": {}}
        has_none = given.get("properties") == {}
        schema = {"type": "object", **({"additionalProperties": False} if has_none else {}), **given}
        schema.pop("$id", None)  # otherwise references would be relative to it
        return schema


class HostedTool(Body, extra="allow"):
    """A tool that the API's own servers would run. It is not shown to the model, which therefore does not call it."""

    type: Text


class FunctionName(Body):
    name: Text


Messages = Annotated[list[Message], Field(fail_fast=True), at_most(MAX_MESSAGES, "messages"), Field(min_length=1)]
Tools = Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS, "tools")]


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Tools


class ToolChoice(Body):
    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def check(self, tools: Sequence[str]) -> None:
        """Raise ``ValueError`` unless the choice is one of ``tools``, or some of them."""
        if self.model_fields_set != {"type", self.type}:
            raise ValueError(f"tool_choice: expected the fields type and {self.type}")
        if not self.names:
            raise ValueError("tool_choice: no function is allowed: expected at least one")
        unknown = next((name for name in self.names if name not in tools), None)
        if unknown is not None:
            raise ValueError(f"tool_choice: unknown tool {unknown!r}: expected one of {', '.join(tools)}")

    @property
    def names(self) -> list[str]:
        """The names of the functions that may be called."""
        if self.function is not None:
            return [self.function.name]
        return [tool.function.name for tool in self.allowed_tools.tools] if self.allowed_tools else []


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools for the chat template."""
    return [shown_tool(tool.model_dump(exclude_none=True)) for tool in tools]


class ChatBody(SamplingFields):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=INT32)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32)
    logprobs: bool = False
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: Variables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_call(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"tools: {twice!r} occurs more than once")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, ToolChoice):
            self.tool_choice.check(names)
            self._allow(self.tool_choice)
        return self

    def _allow(self, choice: ToolChoice) -> None:
        """Leave out the tools that may not be called: the model does not call what it is not shown."""
        if choice.allowed_tools is not None:
            self.tools = [tool for tool in self.tools or () if tool.function.name in choice.names]
            self.tool_choice = choice.allowed_tools.mode

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        most = getattr(self, name)
        if most is not None and self.min_tokens > most:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds {name}={most}: lower min_tokens or raise {name}")
        return self

    @property
    def named(self) -> str | None:
        """The name of the function that must be called, or None."""
        return self.tool_choice.names[0] if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def is_forced(self) -> bool:
        """Whether the reply must be a call."""
        return self.named is not None or self.tool_choice == "required"

    @property
    def may_call(self) -> bool:
        """Whether the model decides to call tools or not."""
        return bool(self.template_tools) and not self.is_forced

    @cached_property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools for the chat template."""
        return [] if self.tool_choice == "none" else shown_tools(self.tools or [])

    @property
    def variables(self) -> dict[str, Any]:
        """The variables for the chat template."""
        return requested_variables(self.reasoning_effort, self.verbosity, self.chat_template_kwargs)

    @property
    def is_json(self) -> bool:
        return self.is_forced or super().is_json

    @property
    def output_schema(self) -> dict[str, Any] | None:
        schemas = {tool.function.name: tool.arguments_schema() for tool in self.tools or ()}
        if self.named is not None:
            return schemas[self.named]
        return calls_schema(schemas, self.parallel_tool_calls) if self.tool_choice == "required" else super().output_schema

    def num_logprobs(self) -> int | None:
        """Return the engine's ``logprobs``. Raises ``OutriderError`` for ``top_logprobs`` without ``logprobs``."""
        if self.top_logprobs is not None and not self.logprobs:
            raise OutriderError("top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None
