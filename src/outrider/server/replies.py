"""Read chat replies while they are generated: reasoning, tool calls, and the text around them.

A response template of transformers (``transformers.utils.chat_parsing``) describes the form of a model's replies: the
tokenizer's own, or one of ``server.formats``. Nothing that a model writes is lost: a tool call that cannot be parsed is text.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import secrets
import string
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import load_response_template

from outrider.engine.prompts import check_takes_tools, template_of
from outrider.engine.templates import THINKING_VARIABLES
from outrider.runner.tokenizers import special_ids
from outrider.server.calls import as_json, flat, json_values, name_and_arguments, plain_json, python_calls
from outrider.server.formats import CALLS, END_REASONING, OPENINGS, PREAMBLES, REASONING, Preamble, form_of
from outrider.server.parameters import typed
from outrider.server.protocol import ChatBody
from outrider.types import OutriderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PREFIX_TOKENS = 256  # of the prompt's end, which may begin the reply, for example with <think>
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # chat templates of Mistral accept no other ids
MAX_QUOTED = 16  # markers in the strings of one call that are checked, which takes time
JSON_MARK = re.compile(r'[\\"\[\]{}]')
LISTED_CALL = re.compile(r'[\s,\[]*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:(?P<arguments>.*)\}', re.DOTALL)
UNKNOWN = "no tool-call format of this model is known: force a call with tool_choice"
NO_OPENING = (
    "JSON output cannot be combined with tools that may be called: this model's tool calls have no known opening that "
    "differs from JSON: force or forbid calls with tool_choice"
)


class Part:
    """A part of a reply: reasoning, content and tool calls, in the order of the text."""

    def __init__(self, content: str = "", reasoning: str = "", calls: Iterable[dict[str, Any]] = ()) -> None:
        """``calls`` have OpenAI's form for streams."""
        given = [("reasoning", reasoning), ("content", content), *(("call", call) for call in calls)]
        self.pieces: list[tuple[str, Any]] = [(kind, value) for kind, value in given if value]

    def add(self, later: Part) -> None:
        self.pieces += later.pieces

    def _all(self, wanted: str) -> list[Any]:
        return [value for kind, value in self.pieces if kind == wanted]

    @property
    def content(self) -> str:
        return "".join(self._all("content"))

    @property
    def reasoning(self) -> str:
        return "".join(self._all("reasoning"))

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self._all("call")

    def delta(self) -> dict[str, Any]:
        """Return the fields of a stream's ``delta``."""
        said = {"content": self.content, "reasoning_content": self.reasoning, "tool_calls": self.calls}
        return {name: value for name, value in said.items() if value}

    def message(self) -> dict[str, Any]:
        """Return the ``message`` of a whole reply."""
        calls = [{name: value for name, value in call.items() if name != "index"} for call in self.calls]
        message = {"role": "assistant", "content": None if calls else "", **self.delta()}
        return message | {"tool_calls": calls} if calls else message


class Reply:
    """Reader of one reply. This one takes all text as content."""

    num_calls = 0
    preamble: Preamble | None = None  # before JSON that a grammar forces
    is_one_call = False  # whether it consists of the arguments of one call, which it returns in parts
    may_reason = False  # whether the text may have reasoning

    @property
    def reasoning_spans(self) -> list[tuple[int, float]]:
        """The (start, end) of each reasoning in the text so far, in characters, without the markers around it."""
        return []

    def feed(self, text: str) -> Part:
        """Return what the next text of the reply completes."""
        return Part(text)

    def finish(self) -> Part:
        """Return what was held back. Must be the last call."""
        return Part()

    def _call(self, name: str, arguments: str, call_id: str | None = None) -> dict[str, Any]:
        call_id = call_id or "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
        self.num_calls += 1
        function = {"name": name, "arguments": arguments}
        return {"index": self.num_calls - 1, "id": call_id, "type": "function", "function": function}


class ArgumentsReply(Reply):
    """Reply that consists of the arguments of one function."""

    is_one_call = True

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, text: str) -> Part:
        if not text:
            return Part()
        if self.num_calls:
            return Part(calls=[{"index": 0, "function": {"arguments": text}}])
        return Part(calls=[self._call(self._name, text)])


class ListReply(Reply):
    """Reply that is a JSON list of calls, whose form the grammar of ``ChatBody.output_schema`` forces.

    The arguments are cut out of the text: decoding and encoding them would change numbers.
    """

    def __init__(self) -> None:
        self._text, self._start, self._read = "", 0, 0  # start of the next call, and of what has not been read
        self._depth, self._is_string, self._escaped = 0, False, -1  # position of the character after a backslash

    def feed(self, text: str) -> Part:
        self._text += text
        part = Part()
        for match in JSON_MARK.finditer(self._text, self._read):
            if match.start() == self._escaped:
                continue
            mark = match[0]
            if mark == "\\":
                self._escaped = match.end()
            elif mark == '"':
                self._is_string = not self._is_string
            elif not self._is_string:
                self._depth += 1 if mark in "[{" else -1
                if mark == "}" and self._depth == 1:
                    self._end_call(part, match.end())
        self._read = len(self._text)
        return part

    def _end_call(self, part: Part, end: int) -> None:
        call = LISTED_CALL.fullmatch(self._text, self._start, end)
        if call is not None:
            part.add(Part(calls=[self._call(call["name"], call["arguments"].strip())]))
            self._start = end

    def finish(self) -> Part:
        rest = self._text[self._start :].lstrip(", \n")
        return Part(rest if rest.strip("] \n") else "")


class ParsedReply(Reply):
    """Reply with the form of a response template.

    It differs from transformers' ``ResponseParser``, which raises if a call cannot be parsed and does not return its text.
    """

    def __init__(self, form: Any, prompt_end: str, body: ChatBody) -> None:
        """``form``: the loaded template; ``prompt_end``: end of the prompt. Without tools in ``body`` calls are text."""
        self._form, self._body = form, body
        fields, has_calls = form.fields.items(), body.may_call
        self._openings = [each for name, each in fields if each.open_re is not None and (has_calls or name != CALLS)]
        self._end_reasoning = [each for each in self._openings if each.name == CALLS and each.open_re.pattern in END_REASONING]
        self._end_of_turn = form.fields[form.implicit].close_re if form.implicit is not None else None
        self._field: Any = None  # field whose text follows; None outside of fields
        self._opening: Any = None  # match of the delimiter before it
        self._is_fresh = False  # no text of this field yet: whitespace after a delimiter is dropped
        self._num_quoted = 0  # markers of the end of a call that were found in its strings
        self._separator = ""  # between two parts of the content
        self._ids = set[str | None]()  # of calls, as the model wrote them: it may repeat one
        begun = [match.end() for match in form.start_anchor_re.finditer(prompt_end)]
        self._text = prompt_end[begun[-1] :] if begun else ""
        self._position, self._spans = 0, list[tuple[int, float]]()  # in the text of the prompt and the reply
        self._read(is_end=True)
        self._num_prompt = len(self._text)
        self._spans = [(self._num_prompt, math.inf)] if self._is_reasoning else []
        self._is_finished, self.may_reason = False, not form.fields.keys().isdisjoint(REASONING)

    def feed(self, text: str) -> Part:
        self._text += text
        return self._read(is_end=False)

    def finish(self) -> Part:
        part, self._is_finished = self._read(is_end=True), True
        if self._is_call:  # JSON and Python show whether a call is complete; in tags an argument may be missing
            end = len(self._text)
            self._end_call(part, self._opening, None if self._field.content == "xml-inline" else end, end)
        return part

    @property
    def reasoning_spans(self) -> list[tuple[int, float]]:
        most = math.inf if self._is_finished else self._position  # what follows may be a marker
        return [(start - self._num_prompt, min(end, most) - self._num_prompt) for start, end in self._spans]

    @property
    def _is_call(self) -> bool:
        return self._field is not None and self._field.name == CALLS

    @property
    def _is_reasoning(self) -> bool:
        return self._field is not None and self._field.name in REASONING

    def _read(self, is_end: bool) -> Part:
        """Read the text up to a possible delimiter that is incomplete."""
        part = Part()
        while True:
            match, following, text_end = self._next_delimiter(is_end)
            self._add_text(part, self._text[self._position : text_end])
            self._position = text_end if match is None else match.end()
            if match is None or (following is self._field and match.end() == match.start()):
                return part
            if following is self._field:  # the end of the turn
                continue
            was_call, opening = self._is_call, self._opening
            if self._is_reasoning:
                end = match.end() - len(match[0].lstrip())
                self._spans[-1] = self._spans[-1][0], end
            self._field, self._opening, self._is_fresh, self._num_quoted = following, match, True, 0
            if self._is_reasoning:
                self._spans.append((match.end(), math.inf))
            if was_call:
                self._end_call(part, opening, match.start(), match.end())

    def _next_delimiter(self, is_end: bool) -> tuple[Any, Any, int]:
        """Return the match of the next delimiter, or None, the field that follows it, and the end of the text before it."""
        found, following, held_from = None, None, len(self._text)
        for pattern, after in self._delimiters():
            match = pattern.search(self._text, self._position, partial=not is_end)
            while match is not None and not match.partial and self._is_text(match, after):
                match = pattern.search(self._text, match.start() + 1, partial=not is_end)
            if match is None:
                continue
            if not is_end and (match.partial or match.end() == len(self._text)):  # it may be longer
                held_from = min(held_from, match.start())
            elif found is None or match.start() < found.start():
                found, following = match, after
        if found is None or found.start() >= held_from:
            return None, None, held_from
        return found, following, found.start()

    def _is_text(self, match: Any, following: Any) -> bool:
        """Return whether a delimiter is text: in a string of a call, or in reasoning a call without a marker around it."""
        if self._is_reasoning and following in self._end_reasoning:
            return not match[0].strip()
        return self._is_quoted(match.start())

    def _is_quoted(self, end: int) -> bool:
        """Return whether a string of a call in JSON, otherwise valid so far, continues at ``end``."""
        if not self._is_call or self._field.content != "json" or self._num_quoted == MAX_QUOTED:
            return False
        try:
            json_values(plain_json(self._text[self._opening.end() : end], self._field.content_args))
        except json.JSONDecodeError as error:
            is_open = error.msg.startswith("Unterminated string")
            self._num_quoted += is_open
            return is_open
        except RecursionError:
            pass
        return False

    def _delimiters(self) -> list[tuple[Any, Any]]:
        """Return each pattern that may come next with the field that follows it."""
        if self._field is None:
            found = [(each.open_re, each) for each in self._openings]
        else:
            found = [(self._field.close_re, None)] if self._field.close_re is not None else []
            found += [(each.open_re, each) for each in self._end_reasoning if self._is_reasoning]
        return found if self._is_call or self._end_of_turn is None else [*found, (self._end_of_turn, self._field)]

    def _add_text(self, part: Part, text: str) -> None:
        name = self._form.implicit if self._field is None else self._field.name
        if self._is_call or name is None:  # a template without such a field drops the text between fields
            return
        was_fresh = self._is_fresh
        if was_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        if name in REASONING:
            part.add(Part(reasoning=text if self._body.include_reasoning else ""))
        elif text:
            part.add(Part(self._separator + text if was_fresh else text))
            self._separator = "\n"

    def _end_call(self, part: Part, opening: Any, end: int | None, text_end: int) -> None:
        """Add the calls between a delimiter and ``end``; if they cannot be parsed, the text up to ``text_end``."""
        calls: list[tuple[str, str]] = []
        with suppress(Exception):  # models write anything
            captures = {name: value for name, value in opening.groupdict().items() if value is not None}
            calls = self._parsed(self._text[opening.end() : end], captures) if end is not None else []
        kept = calls[: None if self._body.parallel_tool_calls else 1 - self.num_calls]
        given = opening.groupdict().get("id")
        for call in kept:
            part.add(Part(calls=[self._call(*call, None if given in self._ids else given)]))
            self._ids.add(given)
        if not calls:
            part.add(Part(self._text[opening.start() : text_end]))
            self._is_fresh = False

    def _parsed(self, text: str, captures: dict[str, str]) -> list[tuple[str, str]]:
        """Return the name and the arguments of each call in a field. Raises if they have another form."""
        calls, texts = self._form.fields[CALLS], [text]
        if calls.content == "text":
            return [(name, as_json(arguments)) for name, arguments in python_calls(text)]
        if calls.content == "json":  # transformers reads dialects slowly, and changes strings that look like keys
            texts, calls = json_values(plain_json(text, calls.content_args)), replace(calls, content_args={})
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self._body.tools or ()}
        found = []
        for call in flat([process_field(each, calls, captures) for each in texts]):
            name, arguments = name_and_arguments(call, schemas)
            if calls.content != "json":
                arguments = typed(arguments, schemas.get(name, {}))
            found.append((name, as_json(arguments)))
        return found


class PreambleReply(ParsedReply):
    """Reply with a preamble, read like other replies, then JSON, which is left to another reader, or calls."""

    def __init__(self, form: Any, prompt_end: str, body: ChatBody, inner: Reply, preamble: Preamble) -> None:
        self._inner, self._is_json, self._has_calls = Reply(), False, False  # for the prompt
        # A form may know other ends of reasoning, which are text for a grammar.
        self._closing, self._resumed = regex.compile(rf"\s{{0,8}}{re.escape(preamble.closing)}"), preamble.resumed
        super().__init__(form, prompt_end, body)
        self._inner, self._is_json, self._is_fresh = inner, False, True
        self.is_one_call = inner.is_one_call
        is_disabled = any(body.variables.get(name) is False for name in THINKING_VARIABLES)
        if self._is_reasoning:
            preamble = preamble._replace(opening="")
        elif self._field is not None:  # the prompt ends with the heading
            preamble = Preamble("", "")
        elif is_disabled or prompt_end.rstrip().endswith(preamble.closing):
            preamble = preamble._replace(opening="", closing="", resumed="")
        self.preamble = preamble if any(preamble) else None

    def finish(self) -> Part:
        part = super().finish()
        part.add(self._inner.finish())
        return part

    def _next_delimiter(self, is_end: bool) -> tuple[Any, Any, int]:
        """Return the next delimiter unless text comes before it, which begins the JSON: then nothing is one.

        What is still held back at the end is an incomplete delimiter, not JSON. From the opening of a call on, a grammar
        allows everything, and the reply is read like others.
        """
        if self.preamble is not None and not (self._is_json or self._is_reasoning or self._has_calls):
            begun = self._text[self._position :].lstrip().removeprefix(self._resumed).lstrip()
            self._has_calls = begun.startswith(self.preamble.calls)
        if self._has_calls:
            return super()._next_delimiter(is_end)
        found = super()._next_delimiter(is_end) if not self._is_json else (None, None, 0)
        self._is_json |= not is_end and not self._is_reasoning and bool(self._text[self._position : found[2]].strip())
        return (None, None, len(self._text)) if self._is_json else found

    def _delimiters(self) -> list[tuple[Any, Any]]:
        return [(self._closing, None)] if self._is_reasoning and not self._has_calls else super()._delimiters()

    def _add_text(self, part: Part, text: str) -> None:
        if self._is_reasoning or self._has_calls:
            super()._add_text(part, text)
        elif self._is_json:
            part.add(self._inner.feed(text.lstrip() if self._is_fresh else text))
            self._is_fresh, self.num_calls = False, self._inner.num_calls


def response_template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the loaded response template for a model's replies."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        try:
            return load_response_template(own)
        except Exception as error:
            logger.warning("the tokenizer's response_template is not used: %s", error)
    return load_response_template(form_of(template_of(tokenizer, with_tools=True) or ""))


def _delimiters(form: Any) -> str:
    """Return the delimiters of a response template, without the escapes of patterns."""
    patterns = [pattern.pattern for field in form.fields.values() for pattern in (field.open_re, field.close_re) if pattern]
    written = [*patterns, *(json.dumps(field.content_args) for field in form.fields.values())]
    return re.sub(r"\\+(\W)", r"\1", " ".join(written))


def preamble_of(form: Any, written: str) -> Preamble | None:
    """Return what may come before JSON in a form of replies, if ``written``, a model's templates, has its markers."""
    fields = [field for name, field in form.fields.items() if name in REASONING and field.open_re and field.close_re]
    for one, preamble in itertools.product(fields, PREAMBLES):
        is_form = one.open_re.match(preamble.opening) and one.close_re.match(preamble.closing)
        if is_form and preamble.heading in written and any(marker.rstrip() in written for marker in preamble[:2]):
            return preamble
    return None


def openings_of(form: Any) -> tuple[str, ...]:
    """Return the openings that calls in a form of replies may begin with."""
    pattern = form.fields[CALLS].open_re if CALLS in form.fields else None
    return tuple(each for each in OPENINGS if pattern is not None and pattern.match(each, partial=True))


class Replies:
    """Creates the reader of each reply of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._tool_template = None if tokenizer is None else template_of(tokenizer, with_tools=True)
        self._form: Any = None
        self._delimiters = self._in_preambles = frozenset[int]()
        self._preamble: Preamble | None = None
        self._openings: tuple[str, ...] = ()
        if tokenizer is not None:
            self._form = response_template(tokenizer)
            self._openings = openings_of(self._form)
            ids = sorted(special_ids(tokenizer))
            text = _delimiters(self._form)
            named = list(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
            self._delimiters = frozenset(token for token, name in named if name in text)
            own = getattr(tokenizer, "response_template", None)
            self._preamble = preamble = preamble_of(self._form, f"{template_of(tokenizer)} {self._tool_template} {own}")
            self._in_preambles = frozenset(token for token, name in named if preamble and name in "".join(preamble.markers))

    def check(self, body: ChatBody) -> None:
        """Raise ``OutriderError`` if the model cannot take the tools of a request, or its calls cannot be read."""
        if not body.template_tools:
            return
        check_takes_tools(self._tool_template)
        if body.may_call and CALLS not in self._form.fields:
            raise OutriderError(UNKNOWN)
        if body.may_call and body.is_json and not self._openings:
            raise OutriderError(NO_OPENING)

    def delimiters(self, body: ChatBody) -> frozenset[int]:
        """Return the special tokens that the reader of a reply needs in its text."""
        return self._in_preambles if body.is_json and not body.may_call else self._delimiters

    def readers(self, body: ChatBody, prompt_ids: Sequence[int]) -> list[Reply]:
        """Return a reader for each choice of a call. Uses the tokenizer."""
        plain, preamble = [self._plain(body) for _ in range(body.n)], self._preamble
        if body.may_call:
            preamble = (preamble or Preamble("", ""))._replace(calls=self._openings)
        if self._tokenizer is None or (body.is_json and preamble is None):
            return plain
        end = str(self._tokenizer.decode(list(prompt_ids[-PREFIX_TOKENS:]), clean_up_tokenization_spaces=False))
        if body.is_json and preamble is not None:
            return [PreambleReply(self._form, end, body, each, preamble) for each in plain]
        return [ParsedReply(self._form, end, body) for _ in plain]

    @staticmethod
    def _plain(body: ChatBody) -> Reply:
        if body.named is not None:
            return ArgumentsReply(body.named)
        return ListReply() if body.tool_choice == "required" else Reply()
