"""JSON schemas of the parameters of tools: insert them in another schema, and give values that are text their type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

KINDS: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
PYTHONIC = {"True": "true", "False": "false", "None": "null"}  # models write these, too
MAX_ALTERNATIVES = 64  # schemas that are read for the types of one value


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values of JSON at each depth, the whole first. Each level is read when it is asked for."""
    level = [value]
    while level:
        yield level
        inside = [outer.values() if isinstance(outer, dict) else outer for outer in level if isinstance(outer, (dict, list))]
        level = [inner for values in inside for inner in values]


def rebase_references(schema: Any, place: str) -> Any:
    """Return a schema whose references into itself (``#`` or a path) are valid at ``place`` in another schema."""
    if isinstance(schema, list):
        return [rebase_references(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:] if _is_path(key, value) else rebase_references(value, place) for key, value in schema.items()
    }


def calls_schema(functions: Mapping[str, Any], is_parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls. ``functions``: the schema of each function's arguments."""
    calls = []
    for index, (name, schema) in enumerate(functions.items()):
        arguments = rebase_references(schema, f"#/items/anyOf/{index}/properties/arguments")
        properties = {"name": {"const": name}, "arguments": arguments}
        calls.append({"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False})
    most = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def _is_path(key: str, value: Any) -> bool:
    return key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))


def typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments given as text to the types of their JSON schema; text that has none of these types stays text."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {
        name: _typed(value, _types(known[name], schema)) if isinstance(value, str) and name in known else value
        for name, value in arguments.items()
    }


def _typed(text: str, types: set[str]) -> Any:
    stripped = text.strip()
    try:
        value = json.loads(PYTHONIC.get(stripped, stripped), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):  # models write strings without quotes: these are part of the text
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    is_number = type(value) is int and "number" in types
    return value if is_number or KINDS[type(value)] in types else text


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)  # too large: JSON has no infinity


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a part of the schema ``root`` allows."""
    found: set[str] = set()
    pending, read = [schema], 0
    while pending and read < MAX_ALTERNATIVES:
        each, read = pending.pop(), read + 1
        if not isinstance(each, dict):
            continue
        declared = each.get("type", [])
        found.update(str(kind) for kind in (declared if isinstance(declared, list) else [declared]))
        values = [*_list(each.get("enum")), *([each["const"]] if "const" in each else [])]
        found.update(KINDS[type(value)] for value in values)
        found.update(["null"] if each.get("nullable") is True else [])
        pending += [inner for key in ("anyOf", "oneOf", "allOf") for inner in _list(each.get(key))]
        pending += [_at(root, each["$ref"])] if _is_path("$ref", each.get("$ref")) else []
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(root: Any, path: str) -> Any:
    """Return the part of a schema that a reference names, or None."""
    for step in path.split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
