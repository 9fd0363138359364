"""Syntax of ``--method``: ``name:option=value``, ``first+second``, and comma-separated lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from outrider.errors import OutriderError


def split_method(text: str) -> tuple[str, dict[str, str]]:
    """Split ``"name:option=value:option=value"`` into name and options.

    Only a colon before ``option=`` separates, so that values may contain colons: ``draft:draft=owner/name:Q4_K_M``. Raises
    ``OutriderError`` if malformed, and for a repeated option.
    """
    name, *parts = re.split(r":(?=[^:=]*=)", text)
    options = dict(part.split("=", 1) for part in parts)
    if ":" in name or "" in options:
        name = name.partition(":")[0]
        raise OutriderError(f"invalid method {text!r}: write options as {name}:option=value")
    if len(options) < len(parts):
        raise OutriderError(f"invalid method {text!r}: repeated option; give each option once")
    return name, options


def join_method(name: str, options: Mapping[str, object]) -> str:
    """Format a method with options: the inverse of ``split_method``."""
    return ":".join([name, *(f"{option}={value}" for option, value in options.items())])


def combined(first: str, second: str) -> str:
    """Combine two methods into ``first+second``, with options written as ``name.option=value``."""
    parts = [split_method(method) for method in (first, second)]
    options = {f"{name}.{option}": value for name, given in parts for option, value in given.items()}
    return join_method("+".join(name for name, _ in parts), options)


def options_by_part(joined: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group the options of ``first+second`` by method name; options of the combination itself have the empty name.

    Raises ``OutriderError`` for an option of another method.
    """
    names = joined.split("+")
    found: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in names}}
    for key, value in options.items():
        owner, _, option = key.rpartition(".")
        if owner not in found:
            expected = " or ".join(f"{name}.option" for name in names)
            raise OutriderError(f"invalid option {key!r} of {joined}: expected {expected}")
        found[owner][option] = value
    return found


def is_draft_option(name: str) -> bool:
    """Return whether an option, also of a part of ``first+second``, names a draft."""
    return name.rpartition(".")[2] == "draft"


def with_drafts(method: str, find: Callable[[str], str]) -> str:
    """Apply ``find`` to the drafts named in a method's options, such as to resolve relative paths."""
    name, options = split_method(method)
    return join_method(name, {key: find(value) if is_draft_option(key) else value for key, value in options.items()})


def split_methods(text: str) -> list[str]:
    """Split a list such as ``"draft, eagle:hidden_states=2,4,6"``; a comma before a number belongs to a value."""
    return [method.strip() for method in re.split(r",(?=\s*[^\s\d.,-])", text)]
