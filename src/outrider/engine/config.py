"""Build the parts of an engine from user options: tokenizer, proposer, verifier and draft-length policy by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from outrider import family
from outrider.engine.detokenizer import DetokenizerFactory
from outrider.engine.engine import Engine
from outrider.engine.finding import MethodChoice, choices, local_path
from outrider.engine.options import Speculation, is_tokenizer
from outrider.engine.policy import FixedLength, LengthPolicy
from outrider.engine.scheduler import Scheduler
from outrider.errors import errors_as, one_line
from outrider.heads.checkpoint import MODEL, kind_of
from outrider.method_text import split_method
from outrider.options import declared
from outrider.proposers.base import Proposer
from outrider.proposers.method import Setting, TargetFiles
from outrider.registry import AUTO, DEFAULT_METHOD_WITH_FOREIGN_DRAFT, PROPOSERS, VERIFIERS
from outrider.runner import ModelRunner, RunnerConfig, tokenizers
from outrider.runner.loading import text_config
from outrider.runner.tokenizers import DifferentVocabulary
from outrider.tune import DraftLengthPolicy
from outrider.types import OutriderError
from outrider.weight_files import on_this_machine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from outrider.engine.options import ModelSource, TokenizerSource
    from outrider.verifiers.base import Verifier

logger = logging.getLogger(__name__)


def configurations(options: Mapping[str, Any]) -> tuple[Speculation, RunnerConfig]:
    """Split options by name into the two configurations that declare them. Raises ``OutriderError`` for an invalid value.

    None for a mapping means empty; for ``drafts`` of the embedded target it means the drafts that come with it.
    """
    given = dict(options) | {name: {} for name in ("drafts", "method_options") if options[name] is None}
    if options["target"] is None and options["drafts"] is None:
        given["drafts"] = family.drafts()
    speculation = Speculation(**{name: given[name] for name in declared(Speculation)})
    return speculation, RunnerConfig(**{name: given[name] for name in declared(RunnerConfig)})


def load_tokenizer(
    source: ModelSource | TokenizerSource | None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or hub id, or return a given one; None for None and for a model object.

    Raises ``OutriderError`` if there is no tokenizer in the folder, or it cannot encode text.
    """
    if not isinstance(source, (str, Path)):
        return cast("PreTrainedTokenizerBase", source) if is_tokenizer(source) else None
    try:
        return tokenizers.load_tokenizer(source, trust_remote_code)
    except OutriderError as error:
        folder = on_this_machine(source)
        kind = None if folder is None else kind_of(folder)
        if kind is None or kind is MODEL:
            raise
        raise OutriderError(f"{source} holds {kind}, not a model: give it as the draft") from error


def build_scheduler(runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None, max_batch: int) -> Scheduler:
    """Return a scheduler of at most ``max_batch`` running requests within the runner's limits."""
    make_detokenizer = DetokenizerFactory(tokenizer) if tokenizer is not None else None
    return Scheduler(max_batch, runner.max_len, sorted(eos_token_ids(runner, tokenizer)), make_detokenizer, runner.borders)


def build_engine(
    speculation: Speculation, runner: ModelRunner, proposer: Proposer, policy: LengthPolicy, scheduler: Scheduler
) -> Engine:
    """Return an engine with the verifier, coupling and grammar drafts of ``speculation``. K = 0 requests plain decoding."""
    grammar_drafts = speculation.grammar_drafts and speculation.num_draft_tokens != 0
    verifier = build_verifier(speculation)
    return Engine(runner, proposer, verifier, policy, scheduler, speculation.same_text, grammar_drafts)


def eos_token_ids(runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Return all end-of-text ids: of the generation config, the model config and the tokenizer.

    Raises ``OutriderError`` for one that is not an integer.
    """
    model = runner.model
    return united_eos([getattr(model, "generation_config", None), model.config, tokenizer])


def united_eos(sources: Sequence[object]) -> set[int]:
    """Return the end-of-text ids that any of the sources names. Raises ``OutriderError`` for one that is not an integer."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        for token_id in ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,):
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise OutriderError(f"invalid eos_token_id {ids!r}: expected a token id or a list of them")
            found.add(int(token_id))
    return found


def check_method(speculation: Speculation) -> list[object]:
    """Return the drafts that the method will load, the given one for ``auto``. Reads headers only.

    Raises ``OutriderError`` for invalid options of the method, and for no draft or one of another kind.
    """
    name, options = split_method(speculation.method)
    if name == AUTO:
        return [] if speculation.draft is None else [speculation.draft]
    method, given = PROPOSERS.get(name), options | dict(speculation.method_options)
    with errors_as(speculation.method, OutriderError, detail=str):
        method.check_options(given)
    return method.drafts_in(given, speculation.draft, speculation.drafts)


def build_proposer(speculation: Speculation, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> Proposer:
    """Return the given proposer, or build the method's proposer for this target."""
    return choose_proposer(speculation, runner, tokenizer)[0]


def choose_proposer(
    speculation: Speculation, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Proposer, str]:
    """Return the proposer of ``build_proposer`` and, in one line, which method drafts and why.

    Method ``auto`` uses the first of ``finding.choices`` that can be built; choices that were found and do not fit are logged.
    """
    if speculation.proposer is not None:
        if speculation.method != AUTO or speculation.draft is not None:
            raise OutriderError("give either a proposer or a method and a draft, not both")
        return speculation.proposer, "drafts with the proposer that was given"
    if speculation.method != AUTO:
        try:
            return _built(speculation, runner, tokenizer), f"drafts with {speculation.method}, as specified"
        except DifferentVocabulary as difference:
            advice = f"choose a draft made for this target's tokenizer, or the method {DEFAULT_METHOD_WITH_FOREIGN_DRAFT!r}"
            raise OutriderError(f"{difference.what}; {advice}, which takes any") from difference
    folder = local_path(runner.name)
    target = (
        None if folder is None else TargetFiles(runner.name, folder, text_config(runner.model), runner.config.trust_remote_code)
    )
    for choice in choices(target, speculation.draft, speculation.drafts, speculation.download_draft):
        proposer = _fitting(choice, speculation, runner, tokenizer)
        if proposer is not None:
            logger.info("%s", choice.why)
            return proposer, choice.why
    raise AssertionError("the last choice must be buildable")


def _fitting(
    choice: MethodChoice, speculation: Speculation, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None
) -> Proposer | None:
    """Build a choice; None if it was found automatically and does not fit. A draft named by the user may need translation."""
    chosen = replace(speculation, method=choice.method, draft=choice.draft)
    try:
        return _built(chosen, runner, tokenizer)
    except Exception as misfit:  # for example out of memory
        if choice.is_found:
            logger.info("%s: not used: %s", choice.what, reason_of(misfit))
            return None
        if not isinstance(misfit, DifferentVocabulary):
            raise
        logger.info("%s: drafts are translated between the tokenizers", misfit.what)
        return _built(replace(chosen, method=DEFAULT_METHOD_WITH_FOREIGN_DRAFT), runner, tokenizer)


def _built(speculation: Speculation, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase | None) -> Proposer:
    """Build the proposer of the named method."""
    name, options = split_method(speculation.method)
    proposer: Proposer = PROPOSERS.get(name).build(
        Setting(
            runner,
            tokenizer,
            speculation.draft,
            load_tokenizer(speculation.draft_tokenizer, runner.config.trust_remote_code),
            options=options | dict(speculation.method_options),
            drafts=speculation.drafts,
        )
    )
    return proposer


def reason_of(failure: Exception) -> str:
    """Return the reason why a method cannot be used, in one line."""
    if isinstance(failure, OutriderError):
        return str(failure)
    logger.debug("a method cannot be used", exc_info=failure)
    return one_line(f"{type(failure).__name__}: {failure}")[:300]


def build_verifier(speculation: Speculation) -> Verifier:
    """Return the verifier of sampled rounds; warn if it is lossy."""
    given = speculation.verifier
    verifier: Verifier = VERIFIERS.get(given)() if isinstance(given, str) else given
    if not verifier.lossless:
        logger.warning("%s is lossy: the output does not follow the target's distribution", type(verifier).__name__)
    return verifier


def warn_of_limits(speculation: Speculation, config: RunnerConfig, runner: ModelRunner, proposer: Proposer) -> None:
    """Warn about options that the models or the machine do not support in full."""
    if speculation.same_text and not runner.is_row_invariant:
        why = "runs on kernels whose rounding depends on the number of rows: near ties outputs may differ"
        logger.warning("same_text=True: %s %s (docs/lossless.md)", runner.name, why)
    if config.max_len is not None and config.max_len > runner.max_len:
        limit = "limited by the model's context and the memory for its cache"
        logger.warning("max_len=%d is reduced to %d: %s", config.max_len, runner.max_len, limit)
    k = speculation.num_draft_tokens
    if isinstance(k, int) and 0 < proposer.max_drafts < k:  # 0: plain decoding
        logger.warning("num_draft_tokens=%d is reduced to %d, the maximum of %s", k, proposer.max_drafts, proposer.name)


def build_policy(speculation: Speculation, runner: ModelRunner, proposer: Proposer) -> LengthPolicy:
    """Return the given policy, a fixed K, or the adaptive policy, which chooses K from 0 to the proposer's maximum."""
    k = speculation.num_draft_tokens
    if not isinstance(k, (int, str)):
        return k
    if isinstance(k, int):
        return FixedLength(min(k, proposer.max_drafts))
    max_k = longest_draft(speculation, proposer)
    return DraftLengthPolicy(max_k, runner.costs, proposer.num_nodes) if max_k else FixedLength(0)


def longest_draft(speculation: Speculation, proposer: Proposer) -> int:
    """Return the largest K that a round may request: the fixed number, or the maximum for ``auto``."""
    k = speculation.num_draft_tokens
    return min(k if isinstance(k, int) else proposer.auto_drafts, proposer.max_drafts)
