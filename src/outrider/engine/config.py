"""Build the parts of an engine from user options: tokenizer, proposer, verifier and draft-length policy by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outrider import family
from outrider.engine.options import Speculation, is_tokenizer
from outrider.engine.policy import POLICIES, FixedLength, LengthPolicy
from outrider.method_text import split_method
from outrider.options import declared
from outrider.proposers.base import Proposer
from outrider.proposers.method import Setting
from outrider.registry import (
    AUTO,
    DEFAULT_METHOD,
    DEFAULT_METHOD_WITH_DRAFT,
    DEFAULT_METHOD_WITH_FOREIGN_DRAFT,
    PROPOSERS,
    VERIFIERS,
)
from outrider.runner import ModelRunner, RunnerConfig
from outrider.runner.loading import load_config
from outrider.runner.tokenizers import DifferentVocabulary
from outrider.types import OutriderError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.engine.options import ModelSource, TokenizerSource
    from outrider.verifiers.base import Verifier

logger = logging.getLogger(__name__)


def configurations(options: Mapping[str, Any]) -> tuple[Speculation, RunnerConfig]:
    """Every option by its name -> the two configurations that declare them. Raises ``OutriderError`` for a wrong value.

    None for a mapping is an empty one; for the drafts of the embedded target, those that come with it.
    """
    given = dict(options) | {name: {} for name in ("drafts", "method_options") if options[name] is None}
    if options["target"] is None and options["drafts"] is None:
        given["drafts"] = family.drafts()
    speculation = Speculation(**{name: given[name] for name in declared(Speculation)})
    return speculation, RunnerConfig(**{name: given[name] for name in declared(RunnerConfig)})


def load_tokenizer(
    source: ModelSource | TokenizerSource | None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub id, or the one given; None for a model object, which has none, and for None.

    Raises ``OutriderError`` where a folder holds none.
    """
    if not isinstance(source, (str, Path)):
        return cast("PreTrainedTokenizerBase", source) if is_tokenizer(source) else None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # broken files fail in more ways than can be listed
        if not isinstance(error, (OSError, ValueError, KeyError)):
            load_config(source, trust_remote_code)  # AutoTokenizer reads the config too: its fault is the better reason
        raise OutriderError(f"cannot load a tokenizer from {str(source)!r}: {first_line(error)}") from error
    return tokenizer


def eos_token_ids(runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Return all end-of-text ids: of the generation config, the model config and the tokenizer.

    Raises ``OutriderError`` for one that is not an integer.
    """
    model = getattr(runner, "model", None)
    sources = [getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer]
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        for token_id in ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,):
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise OutriderError(f"invalid eos_token_id {ids!r}: expected a token id or a list of them")
            found.add(int(token_id))
    return found


def default_method(draft: object, drafts: Mapping[str, object]) -> str:
    """What method ``auto`` means: by whether there is a draft for the one that needs it."""
    own = PROPOSERS.get(DEFAULT_METHOD_WITH_DRAFT).own_draft
    return DEFAULT_METHOD if draft is None and own not in drafts else DEFAULT_METHOD_WITH_DRAFT


def build_proposer(speculation: Speculation, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> Proposer:
    """Return the given proposer, or build the method's proposer for this target."""
    if speculation.proposer is not None:
        if speculation.method != AUTO or speculation.draft is not None:
            raise OutriderError("give either a proposer or a method and a draft, not both")
        return speculation.proposer
    method = speculation.method
    if method == AUTO:
        method = default_method(speculation.draft, speculation.drafts)
    name, options = split_method(method)
    options |= speculation.method_options
    setting = Setting(
        runner,
        tokenizer,
        speculation.draft,
        load_tokenizer(speculation.draft_tokenizer),
        options=options,
        drafts=speculation.drafts,
    )
    try:
        proposer: Proposer = PROPOSERS.get(name).build(setting)
    except DifferentVocabulary as difference:
        if speculation.method != AUTO:
            advice = f"choose a draft made for this target's tokenizer, or the method {DEFAULT_METHOD_WITH_FOREIGN_DRAFT!r}"
            raise OutriderError(f"{difference.what}; {advice}, which takes any") from difference
        logger.info("%s: drafts are translated between the tokenizers", difference.what)
        proposer = PROPOSERS.get(DEFAULT_METHOD_WITH_FOREIGN_DRAFT).build(setting)
    return proposer


def build_verifiers(speculation: Speculation) -> tuple[Verifier, Verifier]:
    """Return the verifier for sampled rounds and the one for deterministic rounds."""
    verifier = speculation.verifier
    sampled: Verifier = VERIFIERS.get(verifier)() if isinstance(verifier, str) else verifier
    if not sampled.lossless:
        name = type(sampled).__name__
        logger.warning("%s is lossy: the output does not follow the target's distribution", name)
    deterministic: Verifier = VERIFIERS.get("exact")()
    # A lossy verifier also applies to greedy rounds; a lossless one would give the same result more slowly.
    return sampled, deterministic if sampled.lossless else sampled


def warn_of_limits(speculation: Speculation, config: RunnerConfig, runner: ModelRunner, proposer: Proposer) -> None:
    """Says which numbers that were asked for are more than the models can do: they run with what they can."""
    if config.max_len is not None and config.max_len > runner.max_len:
        what = "the model's window and the memory for its cache hold"
        logger.warning("max_len %d: %s %d tokens, which are used", config.max_len, what, runner.max_len)
    k = speculation.num_draft_tokens
    if isinstance(k, int) and 0 < proposer.max_drafts < k:  # 0: plain decoding
        logger.warning(
            "num_draft_tokens %d: %s drafts at most %d tokens a round, which are used", k, proposer.name, proposer.max_drafts
        )


def build_policy(speculation: Speculation, runner: ModelRunner, proposer: Proposer) -> LengthPolicy:
    """Return a fixed K, or the named policy, which chooses from 0 to the proposer's maximum."""
    k = speculation.num_draft_tokens
    if not isinstance(k, (int, str)):
        return k
    if isinstance(k, int):
        return FixedLength(min(k, proposer.max_drafts))
    max_k = longest_draft(speculation, proposer)
    policy: LengthPolicy = POLICIES.get(k)(max_k, runner.costs, proposer.num_nodes) if max_k else FixedLength(0)
    return policy


def longest_draft(speculation: Speculation, proposer: Proposer) -> int:
    """The most drafts that a round asks for: the fixed number, or what ``auto`` may choose."""
    k = speculation.num_draft_tokens
    return min(k if isinstance(k, int) else proposer.auto_drafts, proposer.max_drafts)
