"""Which methods are audited, by their names on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.engine import LLM
from outrider.engine.config import build_proposer
from outrider.proposers.base import PlainProposer, Proposer
from outrider.registry import PROPOSERS, split_method
from outrider.types import OutriderError
from outrider.verifiers.base import Verifier

ALL = "all"


def chosen_methods(names: Sequence[str]) -> list[str]:
    """The methods named; ``"all"`` stands for every one that is not. Raises ``OutriderError`` for an unknown one."""
    named = [name for name in names if name != ALL]
    for name in named:
        if PROPOSERS.get(split_method(name)[0]) is PlainProposer:
            raise OutriderError("plain decoding is what the others are held against: name a method that drafts")
    if ALL in names:
        known = {split_method(name)[0] for name in named} | {PlainProposer.name}
        named += [name for name in PROPOSERS if name not in known]
    return named


def load_methods(
    llm: LLM, names: Sequence[str], draft: str | None, verifier: Verifier
) -> tuple[dict[str, Proposer], dict[str, str]]:
    """Proposers by method, and of the methods that target and verifier cannot have the reason why.

    ``draft``: for the methods that take one and name none of their own.
    """
    proposers: dict[str, Proposer] = {}
    reasons: dict[str, str] = {}
    for name in names:
        if PROPOSERS.get(split_method(name)[0]).drafts_trees and not verifier.handles_trees:
            reasons[name] = f"it drafts trees, and {type(verifier).__name__} judges chains"
            continue
        try:
            proposers[name] = build_proposer(
                replace(llm.speculation, draft=draft, method=name, proposer=None), llm.runner, llm.tokenizer
            )
        except OutriderError as error:
            reasons[name] = str(error)
    return proposers, reasons
