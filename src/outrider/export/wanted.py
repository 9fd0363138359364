"""Engine-independent content of a plan: models, method and number of drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outrider.engine.methods import auto_choice
from outrider.engine.plan import Plan, located, served_name
from outrider.method_text import split_method
from outrider.proposers.method import Setting
from outrider.proposers.portable import NoDrafts, Portable, SmallModel
from outrider.registry import AUTO, DEFAULT_METHOD_WITH_FOREIGN_DRAFT, PROPOSERS, VERIFIERS
from outrider.types import OutriderError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Wanted:
    """Models, method and settings of a plan."""

    target: str  # folder or hub id
    name: str  # model name for clients
    method: str  # Outrider's name, options included
    kind: Portable
    k: int  # drafts per round
    has_own_k: bool  # whether the plan sets k; otherwise it is a typical number
    verifier: str
    reads_text_only: bool  # whether Outrider's proposer can be exported
    plan: Plan  # with the other options

    def given(self, key: str) -> Any:
        """Return an option of the plan, or None if it is missing or ``auto``."""
        value = self.plan.given(key)
        return None if value == AUTO else value

    @cached_property
    def config(self) -> PreTrainedConfig:
        """Return the target's text config."""
        from outrider.runner.loading import load_config, text_config

        return text_config(load_config(self.target))

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Return the tokens at which Outrider ends a text, in order."""
        from transformers import GenerationConfig

        from outrider.engine.config import load_tokenizer, united_eos
        from outrider.runner.loading import load_config

        sources: list[object] = [load_config(self.target), self.config]
        with suppress(OSError, ValueError):  # not every model has this file
            sources.append(GenerationConfig.from_pretrained(self.target))
        with suppress(OutriderError):
            sources.append(load_tokenizer(self.target))
        return sorted(united_eos(sources))


def wanted(plan: Plan, check: Callable[[str], None] = lambda source: None) -> Wanted:
    """Read a plan. ``check``: raises for a source that is neither a folder nor a hub id.

    Raises ``OutriderError`` for missing models, and for invalid options or drafts.
    """
    from outrider.family import TARGET, drafts

    target, drafts_there = plan.given("target"), {}
    if target is None:
        drafts_there = {name: str(folder) for name, folder in drafts().items()}
    name = served_name(target)
    target, draft = located(target or str(TARGET)), plan.given("draft")
    check(target)
    verifier = plan.given("verifier") or "rejection"  # supported by all engines, with the same output distribution
    VERIFIERS.get(verifier)
    named = plan.given("method") not in (None, AUTO)
    method = (
        plan.given("method") if named else auto_choice(target, draft, drafts_there, bool(plan.given("download_draft"))).text
    )
    named_method, options = split_method(method)
    for source in PROPOSERS.get(named_method).drafts_in(options, draft, drafts_there):
        check(located(str(source)))
    kind = _kind(method, draft, drafts_there)
    if isinstance(kind, SmallModel) and not kind.other_tokenizer and _tokenizers_differ(target, kind.source):
        if named:
            raise OutriderError(f"{kind.source} has another tokenizer than the target: remove the method from the plan")
        method = DEFAULT_METHOD_WITH_FOREIGN_DRAFT
        kind = _kind(method, draft, drafts_there)
    k = plan.given("num_draft_tokens")
    if k == 0:
        kind = NoDrafts()
    return Wanted(
        target,
        name,
        method,
        kind,
        k if isinstance(k, int) else kind.usual_k,
        isinstance(k, int),
        verifier,
        bool(PROPOSERS.get(split_method(method)[0]).reads_text_only),
        plan,
    )


def _kind(method: str, draft: str | None, drafts: Mapping[str, str]) -> Portable:
    name, options = split_method(method)
    kind: Any = PROPOSERS.get(name).portable(Setting.without_target(draft=draft, options=options, drafts=drafts))
    source = getattr(kind, "source", None)  # its model or head, if it has one
    found: Portable = kind if source is None else replace(kind, source=located(source))
    return found


def _tokenizers_differ(target: str, draft: str) -> bool:
    """Return whether both models have a tokenizer and the tokenizers differ."""
    from outrider.engine.config import load_tokenizer
    from outrider.runner.tokenizers import DifferentVocabulary, check_same_vocabulary

    try:
        pair = load_tokenizer(target), load_tokenizer(draft)
    except OutriderError:
        return False
    try:
        check_same_vocabulary(pair[0], pair[1])  # type: ignore[arg-type]
    except DifferentVocabulary:
        return True
    return False
