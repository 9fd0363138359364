"""From what a user writes to the parts of an engine: options, tokenizer, proposer, verifier and draft length by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.engine.policy import POLICIES, FixedLength, LengthPolicy
from outrider.method_text import split_method
from outrider.proposers.base import Proposer
from outrider.proposers.method import Setting
from outrider.registry import DEFAULT_METHOD, DEFAULT_METHOD_WITH_DRAFT, DEFAULT_METHOD_WITH_FOREIGN_DRAFT, PROPOSERS, VERIFIERS
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.loading import load_config
from outrider.runner.tokenizers import DifferentVocabulary
from outrider.types import OutriderError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from outrider.verifiers.base import Verifier

    ModelSource = str | Path | PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speculation:
    """How to draft and how to judge. The defaults are those of ``LLM`` and of the command line."""

    draft: ModelSource | None = None  # a folder, a hub id or a loaded model; what it means is the method's business
    drafts: Mapping[str, ModelSource] = field(default_factory=dict)  # those that come with the target, by name
    method: str | None = None  # a name of outrider.registry.PROPOSERS, or name:option=value; None: the fitting default
    num_draft_tokens: int | str | LengthPolicy = "auto"  # K; "auto" chooses each round, 0 included
    verifier: str | Verifier = "block"  # a name of outrider.registry.VERIFIERS, or an object
    proposer: Proposer | None = None  # an object of yours, instead of a method
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    method_options: Mapping[str, Any] = field(default_factory=dict)  # what the method itself lets one choose
    same_text: bool = False  # the same tokens for the same seed, drafts or not: coupled noise


def split_options(options: Mapping[str, Any]) -> tuple[Speculation, RunnerConfig]:
    """Keyword options -> the two configurations they belong to. Raises ``OutriderError`` for an unknown one."""
    ours = {each.name for each in fields(Speculation)}
    runners = {each.name for each in fields(RunnerConfig)}
    unknown = [name for name in options if name not in ours | runners]
    if unknown:
        raise OutriderError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(ours | runners))}")
    speculation = Speculation(**{name: value for name, value in options.items() if name in ours})
    runner = RunnerConfig(**{name: value for name, value in options.items() if name in runners})
    return speculation, runner


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub id; None for a model object, which has none."""
    if not isinstance(source, (str, Path)):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # broken files fail in more ways than can be listed
        if not isinstance(error, (OSError, ValueError, KeyError)):
            load_config(source, trust_remote_code)  # AutoTokenizer reads the config too: its fault is the better reason
        raise OutriderError(f"no tokenizer in {str(source)!r}: {first_line(error)}") from error
    return tokenizer


def eos_token_ids(runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Every id that ends a text: the generation config's, the model config's and the tokenizer's."""
    model = getattr(runner, "model", None)
    sources = [getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer]
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))
    return found


def default_method(draft: object, drafts: Mapping[str, object]) -> str:
    """The method of a user who names none: by whether there is a draft for the one that needs it."""
    own = PROPOSERS.get(DEFAULT_METHOD_WITH_DRAFT).own_draft
    return DEFAULT_METHOD if draft is None and own not in drafts else DEFAULT_METHOD_WITH_DRAFT


def build_proposer(speculation: Speculation, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> Proposer:
    """The proposer object, or the one that the method's name makes for this target."""
    if speculation.proposer is not None:
        if speculation.method is not None or speculation.draft is not None:
            raise OutriderError("give either a proposer or a method and a draft, not both")
        return speculation.proposer
    name, options = split_method(speculation.method or default_method(speculation.draft, speculation.drafts))
    options |= speculation.method_options
    setting = Setting(
        runner, tokenizer, speculation.draft, speculation.draft_tokenizer, options=options, drafts=speculation.drafts
    )
    try:
        proposer: Proposer = PROPOSERS.get(name).build(setting)
    except DifferentVocabulary as difference:
        if speculation.method is not None:
            advice = f"choose a draft made for this target's tokenizer, or the method {DEFAULT_METHOD_WITH_FOREIGN_DRAFT!r}"
            raise OutriderError(f"{difference.what}; {advice}, which takes any") from difference
        logger.info("%s: drafting across tokenizers", difference.what)
        proposer = PROPOSERS.get(DEFAULT_METHOD_WITH_FOREIGN_DRAFT).build(setting)
    return proposer


def build_verifiers(speculation: Speculation) -> tuple[Verifier, Verifier]:
    """The verifier for sampled rounds, and the one for rounds that leave nothing to chance."""
    verifier = speculation.verifier
    sampled: Verifier = VERIFIERS.get(verifier)() if isinstance(verifier, str) else verifier
    if not sampled.lossless:
        name = type(sampled).__name__
        logger.warning("%s is lossy: faster, but the text does not follow the target's distribution", name)
    deterministic: Verifier = VERIFIERS.get("exact")()
    # A lossy verifier is a choice for greedy rounds too; a lossless one would only say the same more slowly.
    return sampled, deterministic if sampled.lossless else sampled


def warn_of_limits(speculation: Speculation, config: RunnerConfig, runner: ModelRunner, proposer: Proposer) -> None:
    """Says which numbers that were asked for are more than the models can do: they run with what they can."""
    if config.max_len is not None and config.max_len > runner.max_len:
        what = "the model's window and the memory for its cache hold"
        logger.warning("max_len %d: %s %d tokens, which are used", config.max_len, what, runner.max_len)
    k = speculation.num_draft_tokens
    if isinstance(k, int) and 0 < proposer.max_drafts < k:  # 0: plain decoding
        logger.warning("k %d: %s drafts at most %d tokens a round, which are used", k, proposer.name, proposer.max_drafts)


def build_policy(speculation: Speculation, runner: ModelRunner, proposer: Proposer) -> LengthPolicy:
    """A fixed K, or the policy of that name, which chooses from 0 to what the proposer says is the most."""
    k = speculation.num_draft_tokens
    if isinstance(k, bool) or not (isinstance(k, (int, str)) or hasattr(k, "next_lengths")):
        raise OutriderError(f"num_draft_tokens must be a number or one of {', '.join(POLICIES)}, not {k!r}")
    if not isinstance(k, (int, str)):
        return k
    if isinstance(k, int):
        return FixedLength(min(k, proposer.max_drafts))
    max_k = min(proposer.max_drafts, proposer.auto_drafts)
    policy: LengthPolicy = POLICIES.get(k)(max_k, runner.costs, proposer.num_nodes) if max_k else FixedLength(0)
    return policy
