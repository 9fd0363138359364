"""Resolve method names to proposers for a target, with the reason for each method that does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.engine.config import build_proposer, reason_of
from outrider.engine.finding import MethodChoice, choices, target_files
from outrider.engine.options import Speculation
from outrider.method_text import split_method, split_methods
from outrider.proposers.base import Proposer
from outrider.registry import AUTO, PROPOSERS
from outrider.types import OutriderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.runner import ModelRunner

logger = logging.getLogger(__name__)

ALL = "all"


def auto_choice(
    target: object, draft: object, drafts: Mapping[str, object], download: bool = False, trusts_code: bool = False
) -> MethodChoice:
    """Return and log the choice of method ``auto`` for a target that is not loaded."""
    choice = next(choices(target_files(target, trusts_code), draft, drafts, download))
    logger.info("method auto: %s", choice.what)
    return choice


def methods_in(text: str, auto: Callable[[], MethodChoice]) -> list[str]:
    """Split a comma-separated list of methods, without duplicates; ``auto`` is replaced by the method that it chooses."""
    named = (auto().text if method == AUTO else method for method in split_methods(text))
    return list(dict.fromkeys(named))


def chosen_methods(names: Sequence[str]) -> list[str]:
    """Expand method names; ``"all"`` adds every other method. Raises ``OutriderError`` for an unknown name."""
    named = [name for name in dict.fromkeys(names) if name != ALL]
    for name in named:
        if not PROPOSERS.get(split_method(name)[0]).max_drafts:
            raise OutriderError("'plain' is the baseline and always included: name a method that drafts")
    if ALL in names:
        known = {split_method(name)[0] for name in named}
        named += [name for name in PROPOSERS if name not in known and PROPOSERS.get(name).max_drafts]
    return named


def fitting_proposers(
    speculation: Speculation,
    runner: ModelRunner,
    tokenizer: PreTrainedTokenizerBase | None,
    methods: Sequence[str],
) -> tuple[dict[str, Proposer], dict[str, str]]:
    """Return proposers by method, and the reason for each method that does not fit this target.

    ``speculation.draft`` is used by methods that take a draft and name none themselves.
    """
    proposers: dict[str, Proposer] = {}
    reasons: dict[str, str] = {}
    for method in methods:
        try:
            proposers[method] = build_proposer(replace(speculation, method=method, proposer=None), runner, tokenizer)
        except Exception as misfit:  # for example out of memory; the others may still fit
            reasons[method] = reason_of(misfit)
    return proposers, reasons
