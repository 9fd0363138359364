"""Engine-independent content of a plan: models, method and number of drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from outrider import family
from outrider.engine.config import load_tokenizer, united_eos
from outrider.engine.methods import auto_choice
from outrider.engine.plan import Plan, located, served_name
from outrider.hub import local_gguf
from outrider.method_text import split_method
from outrider.proposers.method import Setting
from outrider.proposers.portable import Form, Portable
from outrider.registry import AUTO, DEFAULT_METHOD_WITH_FOREIGN_DRAFT, PROPOSERS
from outrider.runner.loading import load_config, text_config
from outrider.runner.tokenizers import DifferentVocabulary, check_same_vocabulary
from outrider.types import OutriderError

VERIFIER = "rejection"  # the default: all engines support it, and its output distribution is that of Outrider's default
RECURRENT = frozenset(("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"))  # transformers' types of layers


@dataclass(frozen=True)
class Deployment:
    """Models, method and settings of a plan."""

    target: str  # folder or hub id
    method: str  # Outrider's name, options included
    kind: Portable
    plan: Plan  # with the other options

    @property
    def name(self) -> str:
        """Return the model name for clients."""
        return served_name(self.plan.given("target"))

    @property
    def verifier(self) -> str:
        """Return the verifier's name."""
        return str(self.plan.given("verifier") or VERIFIER)

    @property
    def own_k(self) -> int | None:
        """Return the number of drafts per round that the plan sets, if any."""
        return self.given("num_draft_tokens")

    @property
    def k(self) -> int:
        """Return the number of drafts per round, at most the method's depth; a typical one if the plan sets none."""
        k = self.kind.form.usual_k if self.own_k is None else self.own_k
        depth = self.kind.config.max_depth if self.kind.drafts_trees else None
        return min(k, depth or k)

    @property
    def is_recurrent(self) -> bool:
        """Return whether the target has recurrent layers, for which Outrider drafts chains instead of trees."""
        return not RECURRENT.isdisjoint(getattr(self.config, "layer_types", None) or ())

    @property
    def lost_options(self) -> list[str]:
        """Return the method's given options that other engines lack."""
        form = self.kind.form
        known = {"draft", "parallel", *form.carried}  # the form says whether in parallel
        return [name for name in split_method(self.method)[1] if form is not Form.NO_DRAFTS and name not in known]

    def given(self, key: str) -> Any:
        """Return an option of the plan, or None if it is missing or ``auto``."""
        value = self.plan.given(key)
        return None if value == AUTO else value

    @cached_property
    def whole_config(self) -> PreTrainedConfig:
        """Return the target's config; a multimodal model's contains ``config``."""
        return load_config(self.target)

    @property
    def config(self) -> PreTrainedConfig:
        """Return the target's text config."""
        return text_config(self.whole_config)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Return the tokens at which Outrider ends a text, in order."""
        try:
            generation = GenerationConfig.from_pretrained(self.target)
        except (OSError, ValueError):  # not every model has this file
            generation = GenerationConfig.from_model_config(self.whole_config)
        sources: list[object] = [generation, self.whole_config]
        with suppress(OutriderError):
            sources.append(load_tokenizer(self.target))
        return sorted(united_eos(sources))


def read_deployment(plan: Plan, check: Callable[[str], None] = lambda source: None) -> Deployment:
    """Read a plan. ``check``: raises for a source that is neither a folder nor a hub id.

    Raises ``OutriderError`` for missing models, and for invalid options or drafts.
    """
    drafts_there = {name: str(folder) for name, folder in family.drafts().items()} if plan.given("target") is None else {}
    target, draft = located(plan.given("target") or str(family.TARGET)), plan.given("draft")
    check(target)
    method = plan.given("method") or AUTO
    named = method != AUTO
    for source in _sources(method, draft, drafts_there):
        check(located(str(source)))
    target = located(local_gguf(target))
    if not named:
        method = auto_choice(target, draft, drafts_there, bool(plan.given("download_draft"))).text
    kind = _kind(method, draft, drafts_there)
    if kind.form in (Form.SMALL_MODEL, Form.PARALLEL_MODEL) and _tokenizers_differ(target, kind.source):
        if named:
            raise OutriderError(f"{kind.source} has another tokenizer than the target: remove the method from the plan")
        method = DEFAULT_METHOD_WITH_FOREIGN_DRAFT
        kind = _kind(method, draft, drafts_there)
    if plan.given("num_draft_tokens") == 0:
        kind = replace(kind, form=Form.NO_DRAFTS, source=None)
    deployment = Deployment(target, method, kind, plan)
    if kind.drafts_trees and deployment.is_recurrent:
        return replace(deployment, kind=replace(kind, config=replace(kind.config, top_k=1)))
    return deployment


def gguf_files(deployment: Deployment) -> list[str]:
    """Return the target and the draft, as far as they are GGUF files."""
    return [source for source in (deployment.target, str(deployment.kind.source)) if source.endswith(".gguf")]


def _sources(method: str, draft: str | None, drafts: Mapping[str, str]) -> list[object]:
    """Return the drafts that the method will use, the given one for ``auto``. Raises ``OutriderError`` for invalid options."""
    if method == AUTO:
        return [] if draft is None else [draft]
    name, options = split_method(method)
    PROPOSERS.get(name).check_options(options)
    return PROPOSERS.get(name).drafts_in(options, draft, drafts)


def _kind(method: str, draft: str | None, drafts: Mapping[str, str]) -> Portable:
    name, options = split_method(method)
    kind: Portable = PROPOSERS.get(name).portable(Setting.without_target(draft=draft, options=options, drafts=drafts))
    return kind if kind.source is None else replace(kind, source=located(kind.source))


def _tokenizers_differ(target: str, draft: str) -> bool:
    """Return whether both models have a tokenizer and the tokenizers differ."""
    try:
        check_same_vocabulary(load_tokenizer(target), load_tokenizer(draft))  # type: ignore[arg-type]
    except OutriderError as error:
        return isinstance(error, DifferentVocabulary)
    return False
