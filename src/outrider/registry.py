"""Names -> lazily imported factories. The one place, beside a method's own file, where its name may stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

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


PROPOSERS = Registry(
    "method",
    {
        "plain": "outrider.proposers.base:PlainProposer",
        "draft": "outrider.proposers.draft_model:DraftModelProposer",
        "ngram": "outrider.proposers.ngram:NgramProposer",
        "early-exit": "outrider.proposers.early_exit:EarlyExitProposer",
        "low-bit": "outrider.proposers.low_bit:LowBitProposer",
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
