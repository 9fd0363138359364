"""Read the text of tool calls, in JSON, its dialects and Python, as names and arguments."""

from __future__ import annotations

import ast
import io
import json
import keyword
import re
import tokenize
from collections.abc import Container, Mapping
from typing import Any

from outrider.chat import arguments_of
from outrider.server.parameters import PYTHONIC

DECODER = json.JSONDecoder()
NOT_SEPARATOR = re.compile(r"[^;\s]")
LITERALS = {value: name for name, value in PYTHONIC.items()}
RESERVED = "reserved_"  # put before an argument whose name is a keyword of Python, such as "from"


def json_values(text: str) -> list[str]:
    """Return the JSON values in a text, which semicolons or white space separate. Raises if there is anything else."""
    found, end = [], 0
    while (start := NOT_SEPARATOR.search(text, end)) is not None:
        _, end = DECODER.raw_decode(text, start.start())
        found.append(text[start.start() : end])
    return found


def plain_json(text: str, dialect: Mapping[str, Any]) -> str:
    """Return a dialect of JSON, described by ``content_args`` of a response template, as JSON."""
    strings = [rf"{re.escape(opening)}(?s:(.*?)){re.escape(closing)}" for opening, closing in dialect.get("string_delims", [])]
    keys = [r"(?<![\w.-])([\w.-]+)(?=\s{0,8}:)"] if dialect.get("unquoted_keys") else []
    if not strings and not keys:
        return text
    # A string that is not closed is consumed, too: the search would begin again at each of its escaped quotes.
    pattern = "|".join([*strings, r'"(?:[^"\\]|\\(?s:.))*+"?', *keys, *(rf"\b{name}\b" for name in PYTHONIC)])
    return re.sub(pattern, lambda match: json.dumps(match[match.lastindex]) if match.lastindex else _plain(match[0]), text)


def _plain(value: str) -> str:
    return PYTHONIC.get(value, value)


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and arguments of calls in Python: a list, or one on each line. Raises if there is anything else."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text.strip()).readline))
    written = []
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        is_argument = token.type == tokenize.NAME and following.string == "="
        name = RESERVED + token.string if is_argument and keyword.iskeyword(token.string) else token.string
        written.append((token.type, name if is_argument else LITERALS.get(name, name)))
    calls: list[ast.AST] = []
    for statement in ast.parse(tokenize.untokenize(written)).body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        calls += value.elts if isinstance(value, ast.List) else [value]
    return [_python_call(call) for call in calls]


def _python_call(call: ast.AST) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, ast.Call) or call.args or not all([each.arg for each in call.keywords]):
        raise TypeError("expected a call with named arguments")
    arguments = {str(each.arg).removeprefix(RESERVED): ast.literal_eval(each.value) for each in call.keywords}
    return ast.unparse(call.func), arguments


def flat(calls: Any) -> list[Any]:
    """Return the calls of a field, which may contain lists, or be a call of a list of functions."""
    if isinstance(calls, list):
        return [each for call in calls for each in flat(call)]
    functions = calls["function"]
    return [calls | {"function": each} for each in functions] if isinstance(functions, list) else [calls]


def name_and_arguments(call: Mapping[str, Any], known: Container[str]) -> tuple[str, dict[str, Any]]:
    """Return a parsed call's name and arguments. Raises if it has another form.

    Only a call of a ``known`` function may lack arguments, and only if it does not have them under another name.
    """
    function = call["function"]
    name, arguments = function["name"], function.get("arguments")
    if arguments is None:
        arguments = function.get("parameters")
    if arguments is None and name in known and function.keys() <= {"name", "type", "arguments", "parameters"}:
        arguments = {}
    if isinstance(arguments, str):
        arguments = arguments_of(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise TypeError("expected a name and an object")
    name.encode()  # raises for an unpaired surrogate
    return name, arguments


def as_json(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate stays an escape
        text = json.dumps(arguments)
    return text
