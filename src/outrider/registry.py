"""Names -> lazily imported factories. The one place, beside a method's own file, where its name may stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from outrider.types import OutriderError


class Registry:
    """Maps a name to ``module:attribute``, imported only when asked for, so that listing the names costs nothing."""

    def __init__(self, kind: str, entries: dict[str, str], joint: str | None = None) -> None:
        """``joint``: makes one factory of two, for names joined by "+"."""
        self.kind = kind
        self._entries = dict(entries)
        self._joint = joint

    def register(self, name: str, factory: str | Callable[..., Any]) -> None:
        """Adds a name: ``"package.module:Class"`` or the factory itself. Raises ``OutriderError`` where it is taken."""
        if name in self._entries:
            raise OutriderError(f"{self.kind} {name!r} is registered already")
        self._entries[name] = factory  # type: ignore[assignment]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> Any:
        """The factory of that name. Raises ``OutriderError`` naming the known ones."""
        first, plus, second = name.partition("+")
        if plus and self._joint is not None:
            return _imported(self._joint)(self.get(first), self.get(second))
        if name not in self._entries:
            raise OutriderError(f"unknown {self.kind} {name!r}; known: {', '.join(self._entries)}")
        entry: Any = self._entries[name]
        return _imported(entry) if isinstance(entry, str) else entry


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def split_method(text: str) -> tuple[str, dict[str, str]]:
    """``"name:option=value:option=value"`` -> the name and its options. Raises ``OutriderError`` if malformed."""
    name, *parts = text.split(":")
    options = {}
    for part in parts:
        option, is_there, value = part.partition("=")
        if not is_there or not option:
            raise OutriderError(f"{text!r}: write options as {name}:option=value")
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
    """``"draft,eagle:hidden_states=2,4,6"`` -> its two methods: what begins with a number goes on with a value."""
    return re.split(r",(?=\s*[^\s\d.,-])", text)


PROPOSERS = Registry(
    "method",
    {
        "plain": "outrider.proposers.base:PlainProposer",
        "draft": "outrider.proposers.draft_model:DraftModelProposer",
        "cross-tokenizer": "outrider.proposers.cross_tokenizer:CrossTokenizerProposer",
        "ngram": "outrider.proposers.ngram:NgramProposer",
        "suffix": "outrider.proposers.suffix:SuffixProposer",
        "early-exit": "outrider.proposers.early_exit:EarlyExitProposer",
        "low-bit": "outrider.proposers.low_bit:LowBitProposer",
        "medusa": "outrider.proposers.medusa:MedusaProposer",
        "eagle": "outrider.proposers.eagle:EagleProposer",
    },
    joint="outrider.proposers.combined:Joint",
)

VERIFIERS = Registry(
    "verifier",
    {
        "rejection": "outrider.verifiers.rejection:RejectionVerifier",
        "block": "outrider.verifiers.block:BlockVerifier",
        "exact": "outrider.verifiers.exact:ExactMatchVerifier",
        "typical": "outrider.verifiers.typical:TypicalVerifier",  # lossy
    },
)

# What a user gets who names no method: with a draft to use, with one that has another tokenizer, and without one.
DEFAULT_METHOD_WITH_DRAFT = "draft"
DEFAULT_METHOD_WITH_FOREIGN_DRAFT = "cross-tokenizer"
DEFAULT_METHOD = "ngram"
