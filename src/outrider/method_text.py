"""How methods are written: ``name:option=value``, ``first+second``, and lists of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from outrider.errors import OutriderError


def split_method(text: str) -> tuple[str, dict[str, str]]:
    """``"name:option=value:option=value"`` -> the name and its options. Raises ``OutriderError`` if malformed."""
    name, *parts = text.split(":")
    options = {}
    for part in parts:
        option, is_there, value = part.partition("=")
        if not is_there or not option:
            raise OutriderError(f"invalid method {text!r}: write options as {name}:option=value")
        options[option] = value
    return name, options


def join_method(name: str, options: Mapping[str, object]) -> str:
    """The inverse of ``split_method``."""
    return ":".join([name, *(f"{option}={value}" for option, value in options.items())])


def in_turn(first: str, second: str) -> str:
    """Two methods as one that takes turns: ``first+second``, each option behind the name of the method that it is for."""
    parts = [split_method(method) for method in (first, second)]
    options = {f"{name}.{option}": value for name, given in parts for option, value in given.items()}
    return join_method("+".join(name for name, _ in parts), options)


def options_by_part(joined: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of ``first+second`` by the name of the method that they are for; the empty name: of the two together.

    Raises ``OutriderError`` for one that is for neither.
    """
    names = joined.split("+")
    found: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in names}}
    for key, value in options.items():
        whose, _, option = key.rpartition(".")
        if whose not in found:
            raise OutriderError(f"{key}: options of {joined} begin with {' or '.join(names)}")
        found[whose][option] = value
    return found


def with_drafts(method: str, find: Callable[[str], str]) -> str:
    """A method whose options name drafts, each where ``find`` says that it is."""
    name, options = split_method(method)
    return join_method(name, {key: find(value) if key.split(".")[-1] == "draft" else value for key, value in options.items()})


def split_methods(text: str) -> list[str]:
    """``"draft, eagle:hidden_states=2,4,6"`` -> its two methods: what begins with a number goes on with a value."""
    return [method.strip() for method in re.split(r",(?=\s*[^\s\d.,-])", text)]
