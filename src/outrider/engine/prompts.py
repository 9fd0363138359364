"""Validate and normalise prompts, chat messages and sampling parameters given by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

from outrider.chat import for_template
from outrider.engine.templates import as_read_by, variables_for
from outrider.errors import first_line
from outrider.options import as_sequence, scalar, shown, whole_numbers
from outrider.types import OutriderError, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Array(Protocol):
    """A numpy array or a tensor."""

    def tolist(self) -> Any:
        """Return the numbers as nested lists."""
        ...


GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # tags of transformers
Prompt = str | Sequence[int] | Array
Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[Array]
EXPECTED = "text, token ids (a list, 1-d array or 1-d tensor of integers), or a list of either"


def as_prompts(given: Any) -> list[Any]:
    """Return one or several prompts as a list of prompts. Raises ``OutriderError`` for anything else."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, Mapping) and "input_ids" in given:
        return _without_padding(given)
    try:
        prompts = as_sequence(given)
        is_one = len(prompts) > 0 and isinstance(scalar(prompts[0]), Integral)
    except (TypeError, ValueError, RuntimeError):
        raise OutriderError(f"invalid prompt {shown(given)}: expected {EXPECTED}") from None
    return [prompts] if is_one else list(prompts)


def _without_padding(encoding: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a tokenizer's output. Padding, which its attention mask marks, is not part of a prompt."""
    prompts = as_prompts(encoding["input_ids"])
    if "attention_mask" not in encoding:
        return prompts
    masks = as_prompts(encoding["attention_mask"])
    try:
        return [
            [token for token, is_read in zip(as_sequence(prompt), as_sequence(mask), strict=True) if is_read]
            for prompt, mask in zip(prompts, masks, strict=True)
        ]
    except (TypeError, ValueError, RuntimeError):
        raise OutriderError("invalid prompt: expected an attention_mask with the shape of input_ids") from None


def as_token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Convert token ids to Python integers. Raises ``OutriderError`` for another type and for ids outside the vocabulary."""
    try:
        token_ids = whole_numbers(prompt)
    except (TypeError, ValueError, RuntimeError):
        raise OutriderError(f"invalid prompt {shown(prompt)}: expected {EXPECTED}") from None
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            where = f"at index {index} of the prompt"
            raise OutriderError(f"invalid token id {shown(token)} {where}: expected 0 to {vocab_size - 1}")
    return token_ids


def as_messages(given: Any) -> list[dict[str, Any]]:
    """Convert messages to plain dicts for a chat template; a list of text parts becomes one string.

    Raises ``OutriderError`` unless all of them have a role, and text as their content.
    """
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        found = [message for message in given if isinstance(message, Mapping) and isinstance(message.get("role"), str)]
        if found and len(found) == len(given):
            return [for_template(message) for message in found]
    raise OutriderError(f'invalid messages {shown(given)}: expected a list of {{"role": ..., "content": ...}}')


def shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's format with the fields that may be omitted there; many chat templates fail without them."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    given = {name: value for name, value in function.items() if value is not None}
    parameters = given.get("parameters", {})
    if isinstance(parameters, Mapping):
        given["parameters"] = {"type": "object", "properties": {}, **parameters}
    return {**tool, "function": {"name": "", "description": "", **given}}


def template_of(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> str | None:
    """Return the chat template, or the one for requests with tools; None if there is none."""
    try:
        return str(tokenizer.get_chat_template(tools=[] if with_tools else None)) if tokenizer.chat_template else None
    except ValueError:  # several templates without a default
        return None


@lru_cache(maxsize=16)
def takes_tools(template: str | None) -> bool:
    """Return whether a chat template reads the variable ``tools``. Some only mention tools, or read them from elsewhere."""
    from jinja2 import Environment, TemplateError, meta

    text = GENERATION.sub("", template or "")
    try:
        return "tools" in meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text))
    except TemplateError:
        return "tools" in text


def check_takes_tools(template: str | None) -> None:
    """Raise ``OutriderError`` if a chat template ignores tools."""
    if not takes_tools(template):
        raise OutriderError("the model's chat template has no place for tools: use a model with tool calling")


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Convert messages to token ids with the tokenizer's chat template. Raises ``OutriderError`` if it rejects them."""
    template = template_of(tokenizer, with_tools=bool(tools))
    if tools:
        check_takes_tools(template)
    shown_tools: list[Any] | None = [shown_tool(tool) for tool in tools] if tools else None
    try:
        text = tokenizer.apply_chat_template(
            as_read_by(template, messages),
            tools=shown_tools,
            tokenize=False,
            **{"add_generation_prompt": True, **variables_for(template, variables)},
        )
    except Exception as error:  # templates can raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise OutriderError(f"the chat template rejects these messages ({roles}): {first_line(error)}") from error
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def as_params(given: Any, count: int) -> list[SamplingParams]:
    """Return sampling parameters for each of ``count`` prompts. Raises ``OutriderError`` for a wrong type or number."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in given):
        raise OutriderError(
            f"invalid sampling parameters {shown(given)}: expected SamplingParams, or a list with one per prompt"
        )
    if len(given) != count:
        raise OutriderError(f"{count} prompts, but {len(given)} sampling parameters: give one, or one per prompt")
    return list(given)
