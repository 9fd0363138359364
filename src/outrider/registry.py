"""Names -> lazily imported factories. The one place, beside a method's own file, where its name may stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, get_args, get_type_hints

from outrider.types import OutriderError


class Registry:
    """Maps a name to ``module:attribute``, imported only when asked for, so that listing the names costs nothing."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

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
        if name not in self._entries:
            raise OutriderError(f"unknown {self.kind} {name!r}; known: {', '.join(self._entries)}")
        entry: Any = self._entries[name]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        return getattr(import_module(module), attribute)

    def choice(self, text: str) -> tuple[Any, dict[str, str]]:
        """``"name:option=value:option=value"`` -> the factory and its options as text. Raises ``OutriderError`` if odd."""
        name, *parts = text.split(":")
        options = {}
        for part in parts:
            option, is_there, value = part.partition("=")
            if not is_there or not option:
                raise OutriderError(f"{self.kind} {text!r}: write options as {name}:option=value")
            options[option] = value
        return self.get(name), options


def parse_options(name: str, kind: Any, given: Mapping[str, str]) -> Any:
    """Text options -> the dataclass ``kind`` that holds a factory's options; None where nothing is given.

    Raises ``OutriderError`` for an unknown option and a value that does not fit its type.
    """
    if not given:
        return None
    known = get_type_hints(kind) if kind is not None else {}
    values: dict[str, Any] = {}
    for option, text in given.items():
        if option not in known:
            raise OutriderError(f"{name} has no option {option!r}; known: {', '.join(known) or 'none'}")
        types = get_args(known[option]) or (known[option],)
        values[option] = _parsed(f"{name}:{option}={text}", text, types)
    return kind(**values)


def _parsed(where: str, text: str, types: tuple[Any, ...]) -> Any:
    """The text as the first of the types that takes it."""
    if bool in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if type(None) in types and text.lower() in ("auto", "none"):
        return None
    for kind in (int, float, str):
        if kind in types:
            try:
                return kind(text)
            except ValueError:
                continue
    raise OutriderError(f"{where}: the value does not fit")


PROPOSERS = Registry(
    "method",
    {
        "plain": "outrider.proposers.base:PlainProposer",
        "draft": "outrider.proposers.draft_model:DraftModelProposer",
        "ngram": "outrider.proposers.ngram:NgramProposer",
        "early-exit": "outrider.proposers.early_exit:EarlyExitProposer",
    },
)

VERIFIERS = Registry(
    "verifier",
    {
        "rejection": "outrider.verifiers.rejection:RejectionVerifier",
        "block": "outrider.verifiers.block:BlockVerifier",
        "exact": "outrider.verifiers.exact:ExactMatchVerifier",
    },
)

# What a user gets who names no method: with a draft to use, and without one.
DEFAULT_METHOD_WITH_DRAFT = "draft"
DEFAULT_METHOD = "ngram"
