"""Request bodies of OpenAI's API, extended by the engine's sampling parameters. Unknown fields are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from outrider.engine.options import Speculation
from outrider.options import declared
from outrider.registry import PLAIN
from outrider.types import Grammar, OutriderError, SamplingParams

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_SAMPLES = 128
MAX_FIELDS = 128  # fields per object: each wrong one adds an error
MAX_BIASES = 4096
MAX_MESSAGES = 4096  # of a conversation, and parts of a message
# Parts of an error location that pydantic adds for unions of types, such as function-after[_unicode(), constrained-str].
PYDANTIC_TYPE = re.compile(r"^(constrained|function|nullable|tagged|lax|json)-|^[a-z-]+\[.*\]$")
MAX_DETAIL = 200  # characters of one of pydantic's errors, which may quote the client's value


def _unicode(text: str) -> str:
    """Validate that a string has no unpaired surrogates, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("invalid Unicode: unpaired surrogate") from None
    return text


def _at_most(limit: int, what: str) -> BeforeValidator:
    """Limit the size of a dict or list before its elements are validated, which takes longer."""

    def check(given: Any) -> Any:
        if isinstance(given, (dict, list)) and len(given) > limit:
            raise ValueError(f"too many {what}: the limit is {limit}")
        return given

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_unicode)]
Stop = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]  # report the first error only
Bias = Annotated[float, Field(ge=-100, le=100)]


def like(name: str, **more: Any) -> Any:
    """Return a field with the default, bounds and help of the same field of ``SamplingParams``; ``more`` overrides them."""
    kind, default = declared(SamplingParams)[name].kind, getattr(SamplingParams(), name)
    bounds = {"ge": "at_least", "le": "at_most", "gt": "above"}
    given: dict[str, Any] = {bound: getattr(kind, attribute, None) for bound, attribute in bounds.items()}
    given |= more
    return Field(default, description=declared(SamplingParams)[name].help, **given)


class Body(BaseModel):
    """Base class of all bodies. Unknown fields are refused: ignoring one silently would give a wrong result."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        """Drop fields that are null: many clients send every field they know."""
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise ValueError(f"too many fields in an object: the limit is {MAX_FIELDS}")
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's extension: token counts in every chunk
    include_obfuscation: bool = False  # accepted and ignored, because some clients always send it


class Speculative(Body):
    """Drafting options of this request. They do not change the output's distribution."""

    method: Text | None = Field(None, description="The served method, or plain for no drafts.")
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = Field(
        "auto", description=declared(Speculation)["num_draft_tokens"].help
    )


class SimpleFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchema(Body):
    """The required form of the answer."""

    name: Text = "answer"
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # always strict


class JsonSchemaFormat(Body):
    """JSON with a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[SimpleFormat | JsonSchemaFormat, Field(discriminator="type")]


class SamplingFields(Body):
    """Fields common to both kinds of completion. The defaults are those of ``SamplingParams``."""

    model: Text | None = None
    temperature: float = like("temperature")
    top_p: float = like("top_p")
    n: int = like("n", le=MAX_SAMPLES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = like("seed")
    presence_penalty: float = like("presence_penalty")
    frequency_penalty: float = like("frequency_penalty")
    logit_bias: Annotated[dict[TokenId, Bias], _at_most(MAX_BIASES, "logit biases")] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # extensions of OpenAI's API
    top_k: int = like("top_k")
    min_p: float = like("min_p")
    repetition_penalty: float = like("repetition_penalty")
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    banned_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = like("ignore_eos")
    speculative: Speculative | None = None
    # accepted with the only value that changes nothing, which many clients send
    best_of: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    # accepted and ignored
    service_tier: Literal["auto", "default"] | None = None
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

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
    def schema_asked(self) -> dict[str, Any] | None:
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


class CompletionBody(SamplingFields):
    """Body of ``POST /v1/completions``."""

    echo: Literal[False] = False
    prompt: Text | TokenIds | Annotated[list[Text], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list of strings or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(Body):
    """One part of a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | Annotated[list[TextPart], Field(fail_fast=True)], _at_most(MAX_MESSAGES, "parts")]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """Return the message for a chat template."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ChatBody(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(fail_fast=True), _at_most(MAX_MESSAGES, "messages")] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def num_logprobs(self) -> int | None:
        """Return the engine's ``logprobs``. Raises ``OutriderError`` for ``top_logprobs`` without ``logprobs``."""
        if self.top_logprobs is not None and not self.logprobs:
            raise OutriderError("top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None


def mistakes(errors: Sequence[Any]) -> str:
    """Format pydantic's errors as one line. Their locations are those inside the body."""
    found = []
    for error in errors[:3]:
        is_unknown = error["type"] == "extra_forbidden"  # the location contains the client's field name
        where = error["loc"]
        if where[:1] == ("response_format",):
            where = where[:1] + where[2:]  # without the value of its "type"
        place = ".".join(str(part) for part in where if is_unknown or not PYDANTIC_TYPE.search(str(part)))
        what = error["msg"].removeprefix("Value error, ")
        if error["type"] in ("missing", "model_attributes_type") and not place:
            what = "expected a JSON object, sent with the header Content-Type: application/json"
        elif error["type"] == "json_invalid" and place:  # FastAPI's, whose message does not give the reason
            place, what = "", f"invalid JSON at character {place}: {error['ctx']['error']}"
        what = " ".join(f"{place}: {what}".removeprefix(": ").split())
        found.append(what if len(what) <= MAX_DETAIL else what[: MAX_DETAIL - 3] + "...")
    return "; ".join(dict.fromkeys(found))
