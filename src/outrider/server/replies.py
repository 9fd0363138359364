"""Read chat replies while they are generated: reasoning, tool calls, and the text around them.

A response template of transformers (``transformers.utils.chat_parsing``) describes the form of a model's replies: the
tokenizer's own, or one of ``server.formats``. Nothing that a model writes is lost: a tool call that cannot be parsed is text.
"""

from __future__ import annotations

import json
import logging
import secrets
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from outrider.engine.prompts import arguments_of, check_takes_tools, template_of
from outrider.runner.tokenizers import special_ids
from outrider.server.formats import CALLS, FORMATS, REASONING
from outrider.types import OutriderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.server.protocol import ChatBody

logger = logging.getLogger(__name__)

PREFIX_TOKENS = 256  # of the prompt's end, which may begin the reply, for example with <think>
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # chat templates of Mistral accept no other ids
DECODER = json.JSONDecoder()
UNKNOWN = 'no tool-call format of this model is known: set tool_choice to "required" or to a function'


@dataclass
class Part:
    """A part of a reply. ``calls`` have OpenAI's form for streams."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, later: Part) -> None:
        self.content += later.content
        self.reasoning += later.reasoning
        self.calls += later.calls

    def delta(self) -> dict[str, Any]:
        """Return the fields of a stream's ``delta``."""
        said = {"content": self.content, "reasoning_content": self.reasoning, "tool_calls": self.calls}
        return {name: value for name, value in said.items() if value}

    def message(self) -> dict[str, Any]:
        """Return the ``message`` of a whole reply."""
        calls = [{name: value for name, value in call.items() if name != "index"} for call in self.calls]
        content = self.content or (None if calls else "")
        return {"role": "assistant", "content": content, **Part("", self.reasoning, calls).delta()}


class Reply:
    """Reader of one reply. This one takes all text as content."""

    num_calls = 0
    ends_with_calls = True  # whether the finish reason of a complete reply with calls is "tool_calls"

    def feed(self, text: str) -> Part:
        """Return what the next text of the reply completes."""
        return Part(text)

    def finish(self) -> Part:
        """Return what was held back. Must be the last call."""
        return Part()

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        call_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
        self.num_calls += 1
        function = {"name": name, "arguments": arguments}
        return {"index": self.num_calls - 1, "id": call_id, "type": "function", "function": function}


class ArgumentsReply(Reply):
    """Reply that consists of the arguments of one function."""

    ends_with_calls = False  # as in OpenAI's API

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, text: str) -> Part:
        if not text:
            return Part()
        if self.num_calls:
            return Part(calls=[{"index": 0, "function": {"arguments": text}}])
        return Part(calls=[self._call(self._name, text)])


class ListReply(Reply):
    """Reply that is a JSON list of calls."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Part:
        self._rest += text
        part = Part()
        while "}" in text:
            rest = self._rest.lstrip("[, \n")
            try:
                call, end = DECODER.raw_decode(rest)
                part.calls.append(self._call(call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
            except (ValueError, TypeError, KeyError):  # incomplete, or the end of the list
                break
            self._rest = rest[end:]
        return part

    def finish(self) -> Part:
        rest = self._rest.lstrip(", \n")
        return Part(rest if rest.strip("] \n") else "")


class ParsedReply(Reply):
    """Reply with the form of a response template.

    It differs from transformers' ``ResponseParser``, which raises if a call cannot be parsed and does not return its text.
    """

    def __init__(self, form: Any, special: Any, prompt_end: str, tools: list[Any]) -> None:
        """``form``: the loaded template; ``special``: pattern of special tokens, which are left out of the text, or None.

        ``prompt_end`` is the end of the prompt; without ``tools`` calls are text.
        """
        self._form, self._tools = form, tools
        self._opening = [each for name, each in form.fields.items() if each.open_re is not None and (tools or name != CALLS)]
        end_of_turn = form.fields[form.implicit].close_re if form.implicit is not None else None
        self._dropped = [pattern for pattern in (end_of_turn, special) if pattern is not None]
        self._field: Any = None  # field whose text follows; None outside of fields
        self._is_fresh = False  # no text of this field yet: whitespace after a delimiter is dropped
        self._separator = ""  # between two parts of the content
        begun = [match.end() for match in form.start_anchor_re.finditer(prompt_end)]
        self._text = prompt_end[begun[-1] :] if begun else ""
        self._position = self._field_start = 0
        self._read(is_end=True)

    def feed(self, text: str) -> Part:
        self._text += text
        return self._read(is_end=False)

    def finish(self) -> Part:
        part = self._read(is_end=True)
        if self._is_call:  # JSON shows whether it is complete; in other formats an argument may be missing
            self._end_call(part, self._text[self._field_start :], is_complete=self._field.content == "json")
        return part

    @property
    def _is_call(self) -> bool:
        return self._field is not None and self._field.name == CALLS

    def _read(self, is_end: bool) -> Part:
        """Read the text up to a possible delimiter that is incomplete."""
        part = Part()
        while True:
            match, following, text_end = self._next_delimiter(is_end)
            self._add_text(part, self._text[self._position : text_end])
            self._position = text_end if match is None else match.end()
            if match is None or (following is self._field and match.end() == match.start()):
                return part
            if following is self._field:  # a dropped token
                continue
            call = self._text[self._field_start : self._position] if self._is_call else None
            self._field, self._field_start, self._is_fresh = following, match.start(), True
            if call is not None:
                self._end_call(part, call, is_complete=True)

    def _next_delimiter(self, is_end: bool) -> tuple[Any, Any, int]:
        """Return the match of the next delimiter, or None, the field that follows it, and the end of the text before it."""
        found, following, held_from = None, None, len(self._text)
        for pattern, after in self._delimiters():
            match = pattern.search(self._text, self._position, partial=not is_end)
            if match is None:
                continue
            if not is_end and (match.partial or match.end() == len(self._text)):  # it may be longer
                held_from = min(held_from, match.start())
            elif found is None or match.start() < found.start():
                found, following = match, after
        if found is None or found.start() >= held_from:
            return None, None, held_from
        return found, following, found.start()

    def _delimiters(self) -> list[tuple[Any, Any]]:
        """Return each pattern that may come next with the field that follows it."""
        dropped = [(pattern, self._field) for pattern in self._dropped]
        if self._field is None:
            return [(each.open_re, each) for each in self._opening] + dropped
        closing = [(self._field.close_re, None)] if self._field.close_re is not None else []
        return closing if self._is_call else closing + dropped

    def _add_text(self, part: Part, text: str) -> None:
        name = self._form.implicit if self._field is None else self._field.name
        if self._is_call or name is None:  # a template without such a field drops the text between fields
            return
        was_fresh = self._is_fresh
        if was_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        if name in REASONING:
            part.reasoning += text
        elif text:
            part.content += self._separator + text if was_fresh else text
            self._separator = "\n"

    def _end_call(self, part: Part, text: str, is_complete: bool) -> None:
        """Add the calls that a text contains, or the text if it cannot be parsed."""
        calls = []
        with suppress(Exception):  # models write anything
            message = parse_response(text, self._form, prefix="", tools=self._tools) if is_complete else {}
            calls = [_name_and_arguments(call) for call in _flat(message.get(CALLS, []))]
        part.calls += [self._call(*call) for call in calls]
        if not calls:
            part.content += text
            self._is_fresh = False


def _flat(calls: Any) -> list[Any]:
    """Return the calls of a field, which may repeat and contain lists."""
    return [each for call in calls for each in _flat(call)] if isinstance(calls, list) else [calls]


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return a parsed call's name, and its arguments as JSON text. Raises if it has another form."""
    function = call["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise TypeError("expected a name and an object")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def response_template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the loaded response template for a model's replies, or None if their form is unknown."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        try:
            return load_response_template(own)
        except Exception as error:
            logger.warning("the tokenizer's response_template is not used: %s", error)
    template = template_of(tokenizer, with_tools=True) or ""
    spec = next((spec for markers, spec in FORMATS if all(marker in template for marker in markers)), None)
    return None if spec is None else load_response_template(spec)


class Replies:
    """Creates the reader of each reply of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._tool_template = None if tokenizer is None else template_of(tokenizer, with_tools=True)
        self._form = None if tokenizer is None else response_template(tokenizer)
        self._special: Any = None
        names = [] if tokenizer is None else tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))
        if names:  # a template compiles the pattern that finds parts of them, too
            fields = {"special": {"open": names}}
            self._special = load_response_template({"start_anchor": " ", "fields": fields}).fields["special"].open_re

    def check(self, body: ChatBody) -> None:
        """Raise ``OutriderError`` if the model cannot take the tools of a request, or its calls cannot be read."""
        if not body.offered:
            return
        check_takes_tools(self._tool_template)
        if not body.is_json and (self._form is None or CALLS not in self._form.fields):
            raise OutriderError(UNKNOWN)

    def is_parsed(self, body: ChatBody) -> bool:
        """Return whether the reply is read with the model's format."""
        return self._form is not None and not body.is_json

    def readers(self, body: ChatBody, prompt_ids: Sequence[int]) -> list[Reply]:
        """Return a reader for each choice of a call. Uses the tokenizer."""
        if body.named is not None:
            return [ArgumentsReply(body.named) for _ in range(body.n)]
        if body.tool_choice == "required":
            return [ListReply() for _ in range(body.n)]
        if self._tokenizer is None or not self.is_parsed(body):
            return [Reply() for _ in range(body.n)]
        end = self._tokenizer.decode(list(prompt_ids[-PREFIX_TOKENS:]), clean_up_tokenization_spaces=False)
        special = self._special if body.skip_special_tokens else None
        return [ParsedReply(self._form, special, str(end), body.offered) for _ in range(body.n)]
