"""Describe what is wrong with a request body in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, ValidationError
from pydantic_core import PydanticCustomError

from outrider.options import shown
from outrider.server.protocol import Body, ChatBody

# Parts of an error location that pydantic adds for unions of types, such as function-after[_unicode(), constrained-str].
PYDANTIC_TYPE = re.compile(r"^(constrained|function|nullable|tagged|lax|json)-|^[a-z-]+\[.*\]$")
WORDS = {
    "Input should be greater": "expected a value greater",
    "Input should be less": "expected a value less",
    "Input should be": "expected",
    "Field required": "missing",
}
INSTEAD = {
    "functions": ": use tools",
    "function_call": ": use tool_choice",
    "guided_json": ": use response_format",
    "structured_outputs": ": use response_format",
    "system": ': send a message with "role": "system"',
}
MAX_ERRORS = 32  # of pydantic's that are read
MAX_DETAIL = 200  # characters of one of pydantic's errors, which may quote the client's value


def mistakes(errors: Sequence[Any]) -> str:
    """Format pydantic's errors as one line. Their locations are those inside the body."""
    found = dict.fromkeys((_place(error), _what(error)) for error in errors[:MAX_ERRORS])
    outer = {place[:index] for place, _ in found for index, letter in enumerate(place) if letter == "."}  # of a union, say
    lines = [" ".join(f"{place}: {what}".removeprefix(": ").split()) for place, what in found if place not in outer]
    return "; ".join(line if len(line) <= MAX_DETAIL else line[: MAX_DETAIL - 3] + "..." for line in lines[:3])


def unreadable(cause: BaseException | None) -> str:
    """Describe why a body could not be parsed although its JSON has no syntax error."""
    if isinstance(cause, RecursionError):
        return "invalid JSON: nested too deeply: expected little nesting"
    if isinstance(cause, ValueError) and not isinstance(cause, UnicodeError):
        return "invalid JSON: a number has too many digits"
    return "invalid JSON: expected text in UTF-8"


def _place(error: Any) -> str:
    """Return the place of an error without the parts that are not the client's, its beginning if it is long."""
    where, kinds = error["loc"], {kind.__name__ for kind in Body.__subclasses__()}
    if error["type"] == "json_invalid":
        return ""
    if where[:1] == ("response_format",):
        where = where[:1] + where[2:]  # without the value of its "type"
    if where[:2] == ("text", "format"):
        where = where[:2] + where[3:]
    name = where[-1:] if error["type"] == "extra_forbidden" else ()  # the client's, which may be anything
    parts = map(str, where[: len(where) - len(name)])
    named = [part for part in parts if not PYDANTIC_TYPE.search(part) and part not in kinds]
    return ".".join([*named, *name])[:MAX_DETAIL]


def _what(error: Any) -> str:
    kind, where = error["type"], error["loc"]
    if kind == "extra_forbidden":
        return f"unknown field{INSTEAD.get(where[-1], '')}"
    if kind in ("missing", "model_attributes_type") and not where:
        return "expected a JSON object, sent with the header Content-Type: application/json"
    if kind == "json_invalid" and where:  # FastAPI's, whose message does not give the reason
        return f"invalid JSON at character {where[-1]}: {error['ctx']['error']}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return "expected a JSON object"
    words = str(error["msg"]).removeprefix("Value error, ")
    for pydantics, plain in WORDS.items():
        words = words.replace(pydantics, plain)
    return words


def refused(why: str, allowed: Any = None, details: Mapping[str, Any] | None = None) -> BeforeValidator:
    """Refuse a field that this server cannot support, unless it has the value that changes nothing.

    ``details``: those of the error in Anthropic's format, which its clients read.
    """

    def refuse(given: Any) -> Any:
        if given is not allowed:
            raise PydanticCustomError("refused", why, {"details": details})
        return given

    return BeforeValidator(refuse)


def type_of(given: Mapping[str, Any], default: str | None = None) -> Any:
    """Return the type of an object; null counts as absent."""
    kind = given.get("type")
    return default if kind is None else kind


def known(what: str, kinds: Sequence[str], expected: str, default: str | None = None, words: bool = False) -> BeforeValidator:
    """Refuse an object of another type in one line, instead of one error for each type of a union.

    ``kinds``: patterns of types. ``default``: the type of an object without one. ``words``: whether text is left to others.
    """
    pattern = re.compile("|".join(kinds))

    def check(given: Any) -> Any:
        if words and isinstance(given, str):
            return given
        if not isinstance(given, dict):
            raise ValueError("expected a JSON object")
        kind = type_of(given, default)
        if not isinstance(kind, str) or not pattern.fullmatch(kind):
            raise ValueError(f"unsupported {what} {shown(kind)}: expected {expected}")
        return given

    return BeforeValidator(check)


def as_chat(given: Mapping[str, Any], messages: str, names: Mapping[str, str]) -> ChatBody:
    """Return a request of another API as one of chat. ``messages`` and ``names``: what that API calls fields of chat.

    Raises ``RequestValidationError``, with the names of that API, for fields that cannot be combined.
    """
    try:
        return ChatBody.model_validate(given)
    except ValidationError as error:  # about several fields: each one alone is valid
        found: list[Any] = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
    for each in found:
        for name, own in names.items():
            each["msg"] = each["msg"].replace(name, own)
        if each["loc"][1:2] == ("messages",):  # its places are not those of the client's list
            each["loc"] = ("body", messages)
    raise RequestValidationError(found)
