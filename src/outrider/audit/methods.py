"""Which methods are audited: names as on the command line, each with its own draft where it needs another than the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.engine import LLM
from outrider.engine.config import build_proposer
from outrider.proposers.base import PlainProposer, Proposer
from outrider.registry import PROPOSERS, split_method
from outrider.types import OutriderError
from outrider.verifiers.base import Verifier

ALL = "all"


@dataclass(frozen=True)
class Method:
    """A method with its options, and the draft or heads that it drafts with."""

    name: str
    draft: Any = None


def parse_methods(texts: Sequence[str], draft: Any = None) -> list[Method]:
    """``"name"``, ``"name@folder"`` (of its own draft or heads), or ``"all"`` for every one that is not named.

    ``draft`` is what those without a folder of their own draft with. Raises ``OutriderError`` for an unknown one.
    """
    named = [Method(name, folder or draft) for name, _, folder in (text.partition("@") for text in texts) if name != ALL]
    for method in named:
        if PROPOSERS.get(split_method(method.name)[0]) is PlainProposer:
            raise OutriderError("plain decoding is what the others are held against: name a method that drafts")
    if ALL in texts:
        known = {split_method(method.name)[0] for method in named} | {PlainProposer.name}
        named += [Method(name, draft) for name in PROPOSERS if name not in known]
    return named


def load_methods(llm: LLM, methods: Sequence[Method], verifier: Verifier) -> tuple[dict[str, Proposer], dict[str, str]]:
    """Proposers by method, and of the methods that target and verifier cannot have the reason why."""
    proposers: dict[str, Proposer] = {}
    reasons: dict[str, str] = {}
    for method in methods:
        kind = PROPOSERS.get(split_method(method.name)[0])
        if kind.drafts_trees and not verifier.handles_trees:
            reasons[method.name] = f"it drafts trees, and {type(verifier).__name__} judges chains"
            continue
        chosen = replace(llm.speculation, draft=method.draft, method=method.name, proposer=None)
        try:
            proposers[method.name] = build_proposer(chosen, llm.runner, llm.tokenizer)
        except OutriderError as error:
            reasons[method.name] = str(error)
    return proposers, reasons
