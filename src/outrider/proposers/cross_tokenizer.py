"""Draft model with another tokenizer: its drafts are translated to the target's tokens.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies".
Sampled requests use *token-level intersection* (TLI): drafts are sampled from the draft's distribution over the common tokens,
renormalised, and the proposal carries that distribution. Greedy requests use *string-level exact match* (SLEM): the draft
generates text, which is tokenised again after the committed text, so tokens that only the target has are drafted too. Both are
lossless: the verifier treats them like any drafts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.proposers.base import Proposer, chain_proposal, merged
from outrider.proposers.draft_model import (
    DraftModelMethod,
    DraftModelProposer,
    DraftOptions,
    draft_tokenizer,
    load_draft,
)
from outrider.proposers.method import Setting
from outrider.proposers.portable import Form
from outrider.proposers.sample_text import TEXT
from outrider.runner import ModelRunner
from outrider.runner.tokenizers import Spelling
from outrider.types import Context, Finding, OutriderError, Proposal, SamplingParams, Verdict, over_vocabulary

FEW_SHARED = 0.5  # share of common tokens in a text; below it, sampled requests have few drafts
WINDOW = 32  # target tokens at the end of a sequence whose translation may still change
MAX_STEPS_PER_DRAFT = 4  # maximum draft passes per requested token, if the draft's tokens are shorter


class CrossTokenizerProposer(DraftModelProposer):
    """Drafts with a model that has another vocabulary than the target."""

    name = "cross-tokenizer"
    draft: ModelRunner

    def __init__(self, draft: ModelRunner, vocab_size: int, pair: TokenizerPair) -> None:
        super().__init__(draft, vocab_size)
        both = [(of_draft, of_target) for of_draft, of_target in pair.common if of_draft < draft.vocab_size]
        both = [(of_draft, of_target) for of_draft, of_target in both if of_target < vocab_size]
        if not both:
            raise OutriderError("draft and target have no common token: this draft cannot be used")
        columns = torch.tensor(both, device=draft.device)
        self._draft_ids, self._target_ids = columns.unbind(1)  # [C]: the common tokens in both vocabularies
        self._common = frozenset(of_target for _, of_target in both)
        self._to_draft = torch.zeros(vocab_size, dtype=torch.long, device=draft.device)
        self._to_draft[self._target_ids] = self._draft_ids
        self._translations: defaultdict[str, Translation] = defaultdict(lambda: Translation(pair))

    @torch.inference_mode()
    def propose(self, context: Context, k: int) -> Proposal:
        self._started = None
        as_text = [_drafted_as_text(request.params) for request in context.requests]
        parts = []
        for draft, is_text in ((self._draft_tokens, False), (self._draft_text, True)):
            rows = [b for b, each in enumerate(as_text) if each is is_text]
            if rows:
                parts.append((rows, draft(context.take(rows), k)))
        return merged(parts, len(as_text), self._vocab_size)

    def sequences(self, context: Context, k: int) -> dict[int, Sequence[int]]:
        """Return each row's committed text in the draft's ids; roll the draft's cache back to the common prefix."""
        found: dict[int, Sequence[int]] = {}
        for b, (request, limit) in enumerate(zip(context.requests, context.limits, strict=True)):
            if limit <= 0 or not (self._can_draft_tokens(request.params) or _drafted_as_text(request.params)):
                continue
            translation = self._translations[request.request_id]
            draft_ids = translation.to_draft_ids(request.token_ids)
            if not draft_ids or len(draft_ids) + k > self.draft.max_len:
                continue
            self.draft.rollback(request.request_id, translation.set_fed(draft_ids))
            found[b] = draft_ids
        return found

    def to_target_vocab(self, logits: Tensor) -> Tensor:
        """TLI: drop the draft's other tokens and mask the target's other tokens; the sampler renormalises the common ones."""
        return over_vocabulary(logits[:, :, self._draft_ids], self._vocab_size, self._target_ids)

    def to_draft_vocab(self, token_ids: Tensor) -> Tensor:
        return self._to_draft[token_ids]

    # They do nothing: the draft reads a translation of the text, which ``propose`` creates, and each request has its own.
    prefill, fork = Proposer.prefill, Proposer.fork

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Learn only: the next ``propose`` compares the cache with the committed text."""
        self.learn(context, verdict)

    def release(self, request_ids: Sequence[str]) -> None:
        super().release(request_ids)
        for request_id in request_ids:
            self._translations.pop(request_id, None)

    def _draft_tokens(self, context: Context, k: int) -> Proposal:
        """TLI: return drafts of common tokens."""
        proposal = super().propose(context, k)
        drafts = zip(context.request_ids, proposal.lens.tolist(), proposal.token_ids[:, :-1].tolist(), strict=True)
        for request_id, length, token_ids in drafts:
            if length > 0:
                self._translations[request_id].fed += self._to_draft[token_ids].tolist()
        return proposal

    def _draft_text(self, context: Context, k: int) -> Proposal:
        """SLEM: return the draft's likeliest text in the target's tokens."""
        requests = context.requests
        k = min(k, self.max_drafts, max(context.limits))
        ratios = [self._translations[request.request_id].ratio for request in requests]
        # One token more than requested, because the last one may become a part of a longer token.
        steps = min(math.ceil((k + 1) * max(ratios)), MAX_STEPS_PER_DRAFT * k)
        if self.draft.max_drafts is not None:  # states kept by recurrent layers
            steps = min(steps, self.draft.max_drafts)
        sequences = self.sequences(context, steps)
        if not sequences:
            return Proposal.empty(len(requests))
        ids = [requests[b].request_id for b in sequences]
        own = torch.zeros(len(sequences), steps, dtype=torch.long, device=self.draft.device)

        def next_token(logits: Tensor, step: int) -> Tensor:
            own[:, step : step + 1] = logits.argmax(dim=-1)
            return own[:, step : step + 1]

        self.draft.rollout(ids, list(sequences.values()), steps, next_token)
        chains: list[list[int]] = [[] for _ in requests]
        for b, drafted in zip(sequences, own.tolist(), strict=True):
            translation = self._translations[requests[b].request_id]
            translation.fed += drafted[:-1]
            chains[b] = translation.to_target_ids(requests[b].token_ids, drafted)[: min(k, context.limits[b])]
        return chain_proposal(chains)

    def _can_draft_tokens(self, params: SamplingParams) -> bool:
        """Return whether the request's token masks allow any common token."""
        allowed = self._common if params.allowed_token_ids is None else self._common & set(params.allowed_token_ids)
        return len(allowed) > len(params.banned_token_ids) or bool(allowed - set(params.banned_token_ids))


class CrossTokenizerMethod(DraftModelMethod):
    proposer = CrossTokenizerProposer
    precedence = 0  # a draft with another tokenizer must be named by the user
    exported = Form.FOREIGN_MODEL
    exported_in_parallel = Form.FOREIGN_PARALLEL_MODEL

    def build(self, setting: Setting) -> CrossTokenizerProposer:
        """Load the draft. Raises ``OutriderError`` if it or one of the tokenizers is missing."""
        setting = setting.with_draft_of(self)
        options = setting.config(DraftOptions)
        tokenizer = draft_tokenizer(setting)
        for whose, found in (("target", setting.tokenizer), ("draft", tokenizer)):
            if found is None:
                raise OutriderError(f"method {self.name!r} needs the {whose}'s tokenizer: its folder has none; pass one")
        assert setting.tokenizer is not None and tokenizer is not None
        draft = load_draft(setting, options)
        return CrossTokenizerProposer(draft, setting.target.vocab_size, TokenizerPair(setting.tokenizer, tokenizer))

    def examine_vocabulary(self, setting: Setting, draft: PreTrainedConfig) -> Iterator[Finding]:
        """Check how much of the target's vocabulary the draft has."""
        tokenizer = draft_tokenizer(setting)
        if setting.tokenizer is None or tokenizer is None:
            yield Finding("wrong", "vocabulary", "target or draft has no tokenizer, so drafts cannot be translated")
            return
        common = {of_target for _, of_target in TokenizerPair(setting.tokenizer, tokenizer).common}
        sample = setting.tokenizer.encode(TEXT)
        share = sum(token in common for token in sample) / max(len(sample), 1)
        shared = (
            f"the draft has {len(common):,} of the target's {len(setting.tokenizer):,} tokens, {share:.0%} of a sample text"
        )
        text = f"{shared}: drafts of sampled requests contain only these"
        yield Finding("ok" if share >= FEW_SHARED else "suspicious", "vocabulary", text)


METHOD = CrossTokenizerMethod()


class TokenizerPair:
    """Two tokenizers and their common tokens, which have the same bytes or are special tokens with the same role."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
        self.target, self.draft = Spelling(target), Spelling(draft)
        named = {name: token for token, name in self.draft.special.items()}
        self.specials = {token: named[name] for token, name in self.target.special.items() if name in named}
        self.specials_back = {of_draft: of_target for of_target, of_draft in self.specials.items()}
        if target.eos_token_id is not None and draft.eos_token_id is not None:  # unless tokens of the same name exist
            self.specials.setdefault(target.eos_token_id, draft.eos_token_id)
            self.specials_back.setdefault(draft.eos_token_id, target.eos_token_id)
        begin = draft.bos_token_id
        self.start = [begin] if begin is not None and draft.encode("a")[:1] == [begin] else []
        shared = self.draft.ids.keys() & self.target.ids.keys()
        self.common = sorted((self.draft.ids[data], self.target.ids[data]) for data in shared)
        pairs = self.specials.items()
        self.common += [(of_draft, of_target) for of_target, of_draft in pairs if self.specials_back[of_draft] == of_target]


class Translation:
    """Translates one request's committed text into the draft's ids, and drafts back into the target's.

    When the text grows, only its end is tokenised again. The text before is final: it ends at a common token boundary of both
    tokenizers, before a space if possible.
    """

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._final = list(pair.start)  # draft ids of the final text
        self._num_final = 0  # target tokens of the final text
        self._is_start = True  # whether the rest is at the start of the text or follows a special token
        self.fed: list[int] = []  # draft ids that the draft was called with; its cache holds a prefix of them
        self._common = 0  # length of the prefix of ``fed`` that cannot change any more
        self.ratio = 1.0  # draft tokens per target token

    def to_draft_ids(self, token_ids: list[int]) -> list[int] | None:
        """Translate committed tokens to draft ids; None while the text ends in a partial character the draft cannot encode."""
        pair, first = self._pair, self._num_final
        special = [i for i in range(first, len(token_ids)) if token_ids[i] in pair.target.special]
        for at in special:  # text never merges across a special token
            run = self._translated(token_ids[self._num_final : at])
            known = pair.specials.get(token_ids[at])
            is_first = at == 0 and self._final == [known]
            self._final += (run or []) + ([known] if known is not None and not is_first else [])
            self._num_final, self._is_start = at + 1, True
        run = self._translated(token_ids[self._num_final :])
        if run is None:
            return None
        draft_ids = self._final + run
        self.ratio = len(draft_ids) / len(token_ids)
        if len(token_ids) - self._num_final > 2 * WINDOW:
            self._extend_final(token_ids, run)
        return draft_ids

    def set_fed(self, draft_ids: list[int]) -> int:
        """Record the ids that the draft is called with next; return the length of the prefix that they share with the last."""
        fed, common = self.fed, self._common
        while common < min(len(fed), len(draft_ids)) and fed[common] == draft_ids[common]:
            common += 1
        self.fed, self._common = list(draft_ids), min(common, len(self._final))
        return common

    def to_target_ids(self, token_ids: list[int], drafted: list[int]) -> list[int]:
        """Translate drafted ids to target ids that continue ``token_ids``.

        The end of the committed text is tokenised again together with the draft. If a token spans the border between them, its
        part after the border is written with shorter tokens.
        """
        pair, target = self._pair, self._pair.target
        stop = next((i for i, token in enumerate(drafted) if token in pair.draft.special), len(drafted))
        end = [pair.specials_back[token] for token in drafted[stop : stop + 1] if token in pair.specials_back]
        before, fresh = self._bytes(token_ids[self._num_final :]), pair.draft.joined(drafted[:stop])
        whole, _ = _split(before + fresh)
        data = whole.encode()
        if not (before + fresh).startswith(data):  # invalid UTF-8 was replaced
            return target.segment(fresh) or []
        if len(data) < len(before):  # the draft is a part of a character
            return []
        encoded = target.encode(whole, self._is_start)
        border = self._border(encoded, before, data)
        if border is None:
            return (target.segment(data[len(before) :]) or []) + end
        first, at = border
        part = target.segment(data[len(before) : at])
        return [] if part is None else part + encoded[first:] + end

    def _border(self, encoded: list[int], before: bytes, data: bytes) -> tuple[int, int] | None:
        """Return the index of the first token that begins at or after the end of ``before``, and where it begins in ``data``.

        None if the tokens ``encoded`` do not spell ``data``, except for a leading space that the tokenizer adds.
        """
        spelled = self._pair.target.joined(encoded)
        shift = len(spelled) - len(data)
        if shift not in (0, 1) or not spelled.endswith(data):
            return None
        ends = accumulate((len(self._pair.target.joined([token])) for token in encoded), initial=0)
        starts = (max(at - shift, 0) for at in ends)
        return next((i, at) for i, at in enumerate(starts) if at >= len(before))

    def _bytes(self, token_ids: list[int]) -> bytes:
        data = self._pair.target.joined(token_ids)
        return data[1:] if self._is_start and self._pair.target.adds_space and data.startswith(b" ") else data

    def _translated(self, token_ids: list[int]) -> list[int] | None:
        whole, part = _split(self._bytes(token_ids))
        rest = self._pair.draft.segment(part)
        return None if rest is None else self._pair.draft.encode(whole, self._is_start) + rest

    def _extend_final(self, token_ids: list[int], run: list[int]) -> None:
        """Make the text final up to the last common token boundary before the window, before a space if possible."""
        pending, pair = token_ids[self._num_final :], self._pair
        target_at = list(accumulate((len(pair.target.joined([token])) for token in pending), initial=0))
        draft_at = list(accumulate((len(pair.draft.joined([token])) for token in run), initial=0))
        shift = draft_at[-1] - target_at[-1]  # not 0 if one of the two adds a leading space
        places = {at - shift: i for i, at in enumerate(draft_at) if i}
        last = len(pending) - WINDOW
        spaces = (i for i in range(last, 0, -1) if pair.target.joined([pending[i]]).startswith(b" ") and target_at[i] in places)
        found = next(spaces, None)
        if found is None and last > 2 * WINDOW:
            found = next((i for i in range(last, 0, -1) if target_at[i] in places), None)
        if abs(shift) > 1:  # a tokenizer that normalises text: no common boundary exists
            found, places[target_at[-1]] = (len(pending), len(run)) if last > 2 * WINDOW else (None, 0)
        if found is not None:
            self._final += run[: places[target_at[found]]]
            self._num_final += found
            self._is_start = False


def _drafted_as_text(params: SamplingParams) -> bool:
    """Return whether a request is drafted as text: it is greedy, and without sampler settings for individual target tokens."""
    masks = params.logit_bias or params.banned_token_ids or params.allowed_token_ids is not None
    return params.is_greedy and not params.has_penalties and not masks


def _split(data: bytes) -> tuple[str, bytes]:
    """Decode UTF-8; return the text and the bytes of an incomplete character at its end."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if error.end == len(data) and error.reason == "unexpected end of data":
            return data[: error.start].decode(), data[error.start :]
        return data.decode(errors="replace"), b""
