"""Names of methods and verifiers, imported on first use. Source code names a method only here and in the method's own file."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from outrider.errors import OutriderError

PLAIN = "plain"  # the method without drafts
SPECULATIVE = "speculative"  # in comparisons with it: any other method
AUTO = "auto"  # choose the method, or the number of drafts, automatically


class Registry:
    """Maps names to ``module:attribute``, imported on first use, so that listing names is fast."""

    def __init__(self, kind: str, entries: dict[str, str], joint: str | None = None) -> None:
        """``kind``: for errors. ``joint``: ``module:attribute`` that combines two entries, for names joined by "+"."""
        self.kind = kind
        self._entries = dict(entries)
        self._joint = joint

    def register(self, name: str, entry: Any) -> None:
        """Add a name: ``"package.module:attribute"`` or the object itself. Raises ``OutriderError`` if the name is taken."""
        if name in self._entries:
            raise OutriderError(f"{self.kind} {name!r} is already registered")
        self._entries[name] = entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> Any:
        """Return the entry of a name. Raises ``OutriderError``, which lists the known names, for an unknown one."""
        first, plus, second = name.partition("+")
        if plus and self._joint is not None:
            if not first or not second:
                where = "after" if first else "before"
                raise OutriderError(f"invalid combination {name!r}: a {self.kind} is missing {where} the plus")
            if first == second or "+" in second:
                raise OutriderError(f"invalid combination {name!r}: expected two different methods, such as suffix+draft")
            return _imported(self._joint)(self.get(first), self.get(second))
        if name not in self._entries:
            hint = "".join(f" (did you mean {close}?)" for close in get_close_matches(name, self._entries, n=1))
            raise OutriderError(f"unknown {self.kind} {name!r}{hint}; known: {', '.join(self._entries)}")
        entry: Any = self._entries[name]
        return _imported(entry) if isinstance(entry, str) else entry


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


PROPOSERS = Registry(
    "method",
    {
        PLAIN: "outrider.proposers.plain:METHOD",
        "draft": "outrider.proposers.draft_model:METHOD",
        "cross-tokenizer": "outrider.proposers.cross_tokenizer:METHOD",
        "ngram": "outrider.proposers.ngram:METHOD",
        "suffix": "outrider.proposers.suffix:METHOD",
        "early-exit": "outrider.proposers.early_exit:METHOD",
        "low-bit": "outrider.proposers.low_bit:METHOD",
        "medusa": "outrider.proposers.medusa:METHOD",
        "eagle": "outrider.proposers.eagle:METHOD",
        "mtp": "outrider.proposers.mtp:METHOD",
        "dflash": "outrider.proposers.dflash:METHOD",
    },
    joint="outrider.proposers.combined:CombinedMethod",
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

# The methods of AUTO: with a draft model, with one that has another tokenizer, and without a drafter.
DEFAULT_METHOD_WITH_DRAFT = "draft"
DEFAULT_METHOD_WITH_FOREIGN_DRAFT = "cross-tokenizer"
DEFAULT_METHOD = "suffix"
