"""Draft model: a smaller model drafts, one pass per token (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023).

A model trained with mask tokens makes all drafts of a round in one pass (``runner/parallel_draft.py``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.heads.checkpoint import MODEL, kind_of, read_folder
from outrider.options import CheckedOptions, boolean, int_choice, option, shown
from outrider.proposers.base import Proposer, pick, pick_with_confidence
from outrider.proposers.chain_stops import ChainStops
from outrider.proposers.method import MethodSpec, Recognised, Setting, TargetFiles
from outrider.proposers.portable import Form, Portable
from outrider.runner import ModelRunner, gguf
from outrider.runner.loading import context_length, has_own_code, load_config, num_experts, text_config
from outrider.runner.parallel_draft import MASK_KEYS, ParallelDraft, mask_token_of
from outrider.runner.quantized import round_large
from outrider.runner.self_draft import SelfDraft
from outrider.runner.tokenizers import (
    check_same_files,
    check_same_vocabulary,
    has_tokenizer,
    is_tokenizer_of,
    load_tokenizer,
)
from outrider.types import Context, Finding, OutriderError, Proposal, Request, Verdict, over_vocabulary

logger = logging.getLogger(__name__)

EMBEDDING_MODEL = "modules.json"  # of sentence-transformers
OTHER_OUTPUT = re.compile(r"For(Sequence|Token)Classification|ForQuestionAnswering|Reward|(?<!LMHead)Model$")  # architectures


class _Clamped(Sequence[int]):
    """View of a sequence with ids of at most ``last``: only what is read is converted, not all tokens in each round."""

    def __init__(self, token_ids: list[int], last: int) -> None:
        self._token_ids, self._last = token_ids, last

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        found = self._token_ids[index]
        return [min(token, self._last) for token in found] if isinstance(found, list) else min(found, self._last)


class DraftModelProposer(Proposer):
    """Drafts with a second model that has its own KV cache.

    Each draft is sampled from the draft's distribution under the request's sampler settings, penalties by position included,
    and the proposal carries that distribution. Greedy and coupled drafts are point masses. Where the context has prices, a
    chain ends before the requested number if the next draft is not worth its price.
    """

    name = "draft"

    def __init__(self, draft: ModelRunner | SelfDraft, vocab_size: int) -> None:
        self.draft = draft
        self.drafts_ahead = draft.drafts_ahead
        self._vocab_size = vocab_size  # of the target; the draft's may differ in padding rows of the embedding
        if draft.max_drafts is not None:  # its recurrent layers keep that many states
            self.max_drafts = min(self.max_drafts, draft.max_drafts)
        self._draft_size = draft.vocab_size
        self._stops = {is_deterministic: ChainStops() for is_deterministic in (True, False)}
        self._started: ChainStops | None = None  # the one that started the chains of this round, if they have prices

    @torch.inference_mode()
    def propose(self, context: Context, k: int) -> Proposal:
        self._started = None
        batch, k = len(context.requests), min(k, self.max_drafts, max(context.limits, default=0))
        sequences = self.sequences(context, k) if k else {}
        if not sequences:
            return Proposal.empty(batch)
        rows = list(sequences)
        context = context.take(rows)
        lens = [min(k, limit) for limit in context.limits]
        k, sampler = max(lens), context.sampler  # a request that is left out may have had room for more
        drafts = torch.zeros(len(rows), k, dtype=torch.long, device=self.draft.device)
        probs: list[Tensor] = []
        chains = None
        if context.prices is not None:
            self._started = self._stops[sampler.is_deterministic]
            chains = self._started.start(context.request_ids, lens, context.prices)

        def next_token(logits: Tensor, step: int) -> Tensor | None:
            logits = self.to_target_vocab(logits)
            if chains is None:
                pick(sampler, logits, drafts, step, probs)
            elif not chains.add(pick_with_confidence(sampler, logits, drafts, step, probs)):
                return None
            return self.to_draft_vocab(drafts[:, step : step + 1])

        partial = self.draft.rollout(context.request_ids, list(sequences.values()), k, next_token)
        made = torch.tensor(lens if chains is None else chains.lens)
        drafts = drafts[:, : int(made.max())]
        proposal = Proposal(drafts, made, torch.cat(probs, 1) if probs else None, partial_pass=partial)
        return proposal.scatter(rows, batch)

    def sequences(self, context: Context, k: int) -> dict[int, Sequence[int]]:
        """Return row -> committed tokens, for requests with room for k drafts in the context of the draft model."""
        return {
            b: self._clamped(request.token_ids)
            for b, (request, limit) in enumerate(zip(context.requests, context.limits, strict=True))
            if limit > 0 and len(request.token_ids) + k <= self.draft.max_len
        }

    def _clamped(self, token_ids: list[int]) -> Sequence[int]:
        """Return a sequence in the draft's ids; tokens that it lacks, such as added special ones, become its last token."""
        return token_ids if self._draft_size >= self._vocab_size else _Clamped(token_ids, self._draft_size - 1)

    def to_target_vocab(self, logits: Tensor) -> Tensor:
        """Map draft logits [A, 1, Vd] to logits of target tokens [A, 1, V]."""
        return over_vocabulary(logits, self._vocab_size)

    def to_draft_vocab(self, token_ids: Tensor) -> Tensor:
        """Map target tokens [A, 1] to draft ids as ``_clamped`` does: a mask may allow only tokens that the draft lacks."""
        return token_ids.clamp(max=self._draft_size - 1) if self._draft_size < self._vocab_size else token_ids

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        fitting = [request for request in requests if len(request.token_ids) < self.draft.max_len]
        if not fitting:
            return [True] * len(requests)
        sequences = [self._clamped(request.token_ids) for request in fitting]
        done = self.draft.prefill([request.request_id for request in fitting], sequences)
        unread = {request.request_id for request, is_read in zip(fitting, done, strict=True) if not is_read}
        return [request.request_id not in unread for request in requests]

    @torch.inference_mode()
    def fork(self, source_id: str, request: Request) -> None:
        """See ``Proposer``. A prompt that ``prefill`` left to the next pass is read now: once, not once per sample."""
        draft, prompt = self.draft, self._clamped(request.token_ids[: request.num_prompt_tokens])
        if not isinstance(draft, ModelRunner) or len(prompt) >= draft.max_len:  # the target's own cache, or no drafts
            return
        if not draft.is_prefilled([source_id], [prompt])[0]:
            draft.catch_up([source_id], [prompt], draft_slots=0, to_last=True)
        draft.fork(source_id, request.request_id, len(prompt) - 1)

    def commit(self, context: Context, verdict: Verdict) -> None:
        self.learn(context, verdict)
        for request, path in zip(context.requests, verdict.paths, strict=True):
            self.draft.rollback(request.request_id, len(request.token_ids) + len(path))

    def learn(self, context: Context, verdict: Verdict) -> None:
        """Learn from a verdict where chains should end."""
        if self._started is not None:
            self._started.learn(context, verdict)

    def prepare(self) -> None:
        self.draft.prepare()

    def release(self, request_ids: Sequence[str]) -> None:
        self.draft.release(request_ids)

    def retire(self, request_ids: Sequence[str]) -> None:
        self.draft.retire(request_ids)
        self.release(request_ids)


@dataclass(frozen=True)
class DraftOptions(CheckedOptions):
    """Options of drafting with a model."""

    parallel: bool | None = option(
        boolean("true or false"),
        None,
        "Make all drafts of a round in one pass (default: if the draft's config has a mask token).",
    )
    bits: int | None = option(
        int_choice(4, 8, 16),
        None,
        "Bits per weight of the draft; 16 keeps its weights "
        "(default: 4 above 64 MB of weights on Outrider's CPU kernels, else 16).",
    )


class DraftModelMethod(MethodSpec):
    proposer: type[Proposer] = DraftModelProposer
    options = DraftOptions
    exported = Form.SMALL_MODEL
    exported_in_parallel = Form.PARALLEL_MODEL
    takes_draft = True
    own_draft = "draft"
    precedence = 3

    def build(self, setting: Setting) -> DraftModelProposer:
        """Load the draft. Raises ``OutriderError`` if there is none or the vocabularies differ."""
        setting = setting.with_draft_of(self)
        options = setting.config(DraftOptions)
        tokenizer = draft_tokenizer(setting)
        if setting.tokenizer is not None and tokenizer is not None:
            difference = check_same_vocabulary(setting.tokenizer, tokenizer)
            if difference is not None:
                logger.info("draft and target: %s; fewer drafts are accepted next to these tokens", difference)
        draft = load_draft(setting, options)
        own = draft.vocab_size
        if isinstance(draft, ParallelDraft) and draft.mask_token == own - 1 == setting.target.vocab_size:
            own -= 1  # the mask token was added to the target's vocabulary
        if (setting.tokenizer is None or tokenizer is None) and own != setting.target.vocab_size:
            sizes = f"{setting.target.vocab_size} in the target, {own} in the draft"
            raise OutriderError(f"vocabulary sizes differ: {sizes}; if one is padded, pass tokenizer= and draft_tokenizer=")
        return DraftModelProposer(draft, setting.target.vocab_size)

    def recognise(self, folder: Path, target: TargetFiles) -> Recognised | None:
        """Recognise a language model with the target's tokenizer, in a folder or a GGUF file."""
        is_gguf = gguf.find(folder) is not None
        if not (is_gguf or folder.is_dir()) or kind_of(folder) is not MODEL or (folder / EMBEDDING_MODEL).exists():
            return None
        config = load_config(folder)
        if target.trusts_code and has_own_code(folder):
            raise OutriderError("it has its own code, which runs only for a draft that you name: give it as the draft")
        if config.architectures and all([OTHER_OUTPUT.search(each) for each in config.architectures]):
            return None
        check_same_files(target.folder, folder)
        what = "draft model" if mask_token_of(config) is None else "parallel draft model"
        if not is_gguf:
            with torch.device("meta"):
                read_folder(folder)
        return Recognised(what, _num_weights(text_config(config), with_experts=True) / _num_weights(target.config))

    def portable(self, setting: Setting) -> Portable:
        found = super().portable(setting)
        options: DraftOptions = found.config
        try:
            config = _config_of(found.source)
        except OutriderError:  # such as offline
            is_parallel = bool(options.parallel)
        else:
            is_parallel = drafts_in_parallel(config, options, found.source)
        return replace(found, form=self.exported_in_parallel if is_parallel else self.exported)

    def examine(self, setting: Setting) -> Iterator[Finding]:
        """Check vocabulary, context and size from the draft's config and tokenizer."""
        setting = setting.with_draft_of(self)
        options = setting.config(DraftOptions)
        config = _config_of(setting.draft, setting.target.config.trust_remote_code)
        yield from self.examine_vocabulary(setting, text_config(config))
        is_parallel = drafts_in_parallel(config, options, setting.draft)
        if is_parallel:
            yield _mask_token(config)
        yield from _compared(text_config(setting.target.model), text_config(config), setting.target.max_len, is_parallel)

    def examine_vocabulary(self, setting: Setting, draft: PreTrainedConfig) -> Iterator[Finding]:
        """Check whether token ids mean the same in target and draft."""
        tokenizer = draft_tokenizer(setting)
        if setting.tokenizer is None or tokenizer is None:
            yield Finding("suspicious", "vocabulary", "target or draft has no tokenizer, so token ids cannot be compared")
            return
        try:
            difference = check_same_vocabulary(setting.tokenizer, tokenizer)
        except OutriderError as error:
            yield Finding("wrong", "vocabulary", str(error))
        else:
            same = f"the same {len(tokenizer):,} tokens, special ones included"
            yield Finding("ok", "vocabulary", same) if difference is None else Finding("note", "vocabulary", difference)
        if draft.vocab_size != setting.target.vocab_size:
            rows = f"{draft.vocab_size:,} rows in the draft's embedding, {setting.target.vocab_size:,} in the target's"
            yield Finding("note", "embedding", f"{rows}: the extra rows are padding and are cut")


METHOD = DraftModelMethod()


def load_draft(setting: Setting, options: DraftOptions) -> ModelRunner:
    """Load a draft model with the target's settings, with the bits of the options.

    Raises ``OutriderError`` if loading or ``drafts_in_parallel`` fails, for a loaded draft on another device, and for ``bits``
    of a draft without the CPU kernels.
    """
    target, draft = setting.target.config, setting.draft
    device = torch.empty(0, device=setting.target.device).device  # with its number, also if that is the default GPU
    if isinstance(draft, PreTrainedModel) and draft.device != device:
        raise OutriderError(f"the draft is on {draft.device}, and the target on {device}: move the draft there")
    is_parallel = drafts_in_parallel(_config_of(draft, target.trust_remote_code), options, draft)
    kind = ParallelDraft if is_parallel else ModelRunner
    # Without the options of the target alone, and where it is: "auto" may be another device for a loaded target.
    dtype = "auto" if isinstance(draft, PreTrainedModel) else target.dtype  # of a loaded draft: its own
    config = replace(target, weights=None, kv_memory=None, device=device, dtype=dtype)
    runner = kind.load(draft, config, None if options.bits == 16 else f"draft {options.bits}")  # type: ignore[arg-type]
    if round_large(runner.model, options.bits, 4, "draft") and runner.file is not None:
        runner.file.save(runner.model)
    return runner


def drafts_in_parallel(config: PreTrainedConfig, options: DraftOptions, draft: object) -> bool:
    """Return whether a draft with this config makes all drafts of a round in one pass.

    Raises ``OutriderError`` if ``parallel=true`` requests it and the config has no mask token.
    """
    if options.parallel is False:
        return False
    token = mask_token_of(config)
    if options.parallel and token is None:
        name = draft if isinstance(draft, (str, Path)) else type(draft).__name__
        raise OutriderError(
            f"{name} makes one draft per pass, because its config names no mask token ({MASK_KEYS[0]}): leave out"
            " parallel=true, or train it further with `outrider train draft --start DRAFT --parallel 8`"
        )
    return token is not None


def draft_tokenizer(setting: Setting) -> PreTrainedTokenizerBase | None:
    """Return the draft's tokenizer: the given one, the target's if their files are equal, or that in the draft's files.

    None if the draft has no such files.

    Raises ``OutriderError`` for an invalid draft, and for a tokenizer that cannot be loaded.
    """
    draft = setting.draft
    if not isinstance(draft, (str, Path, PreTrainedModel)):
        raise OutriderError(f"invalid draft {shown(draft)}: expected a folder, a hub id or a loaded model")
    if setting.draft_tokenizer is not None:
        return setting.draft_tokenizer
    source = str(getattr(draft, "name_or_path", draft))
    if setting.tokenizer is not None and is_tokenizer_of(setting.tokenizer, source):
        return setting.tokenizer
    try:
        return load_tokenizer(source, setting.target.config.trust_remote_code)
    except OutriderError as error:
        if has_tokenizer(source):
            raise OutriderError(f"{error}; mend it, or pass a loaded draft_tokenizer") from error
        return None  # loading the model reports what else is wrong with its folder


def _config_of(draft: object, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the config of a folder, a hub id or a loaded model. Raises ``OutriderError`` if it cannot be read."""
    return draft.config if isinstance(draft, PreTrainedModel) else load_config(draft, trust_remote_code)  # type: ignore[arg-type]


def _mask_token(config: PreTrainedConfig) -> Finding:
    text = f"the draft reads mask token {mask_token_of(config)}: one pass makes all drafts of a round"
    if getattr(config, "pard2", False) or getattr(config, "spd_type", None) == "pard2":
        text += "; it can also read hidden states of the target (PARD-2), which Outrider does not support"
        return Finding("note", "mask token", text)
    return Finding("ok", "mask token", text)


def _compared(target: PreTrainedConfig, draft: PreTrainedConfig, window: int, is_parallel: bool) -> Iterator[Finding]:
    """Compare context and size of target and draft."""
    reach = context_length(draft) or window
    if reach < window:
        text = f"the draft's context of {reach} tokens is shorter than the target's {window}: longer sequences have no drafts"
        yield Finding("note", "context", text)
    else:
        yield Finding("ok", "context", f"the draft covers the target's context of {window} tokens")
    share = _num_weights(draft) / _num_weights(target)
    text = f"the draft is about {share:.0%} of the target's size"
    if share > (1.0 if is_parallel else 0.4):
        yield Finding("suspicious", "size", f"{text}: drafting costs too much for a large speedup")
    else:
        yield Finding("ok", "size", text)


def _num_weights(config: PreTrainedConfig, with_experts: bool = False) -> float:
    """Estimate the number of weights of a transformer, without those of experts, or ``with_experts``, which fill the memory."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(inner, (list, tuple)):  # one per layer, as in Gemma 3n
        inner = sum(inner) / len(inner)
    if with_experts and (count := num_experts(config)):
        inner = count * (getattr(config, "moe_intermediate_size", None) or inner)
    return float(config.num_hidden_layers * width * (4 * width + 3 * inner) + config.vocab_size * width)
