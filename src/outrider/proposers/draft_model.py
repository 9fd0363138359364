"""A second, smaller model drafts (Leviathan et al. 2023; Chen et al. 2023): K steps, each one pass of the draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from outrider.proposers.base import NoOptions, Proposer, Setting
from outrider.runner import ModelRunner
from outrider.runner.self_draft import SelfDraft
from outrider.runner.tokenizers import check_same_vocabulary
from outrider.types import Context, OutriderError, Proposal, Verdict


class DraftModelProposer(Proposer):
    """Drafts with a model of its own, which keeps its own cache of the committed text.

    Each draft is drawn from the draft's distribution after the same sampler as the target's, penalties by position included,
    and the proposal carries that distribution. Greedy and coupled drafts are point masses.
    """

    name = "draft"

    def __init__(self, draft: ModelRunner | SelfDraft, vocab_size: int) -> None:
        self.draft = draft
        self._vocab_size = vocab_size  # the target's: padding rows of the embedding may differ between the two

    @classmethod
    def build(cls, setting: Setting) -> DraftModelProposer:
        """Loads the draft beside the target. Raises ``OutriderError`` where there is none or the vocabularies differ."""
        setting.config(NoOptions)
        if setting.draft is None:
            raise OutriderError("method 'draft' needs a draft model: give draft=<folder, hub id or model>")
        if not isinstance(setting.draft, (str, PreTrainedModel)) and not hasattr(setting.draft, "__fspath__"):
            raise OutriderError(f"draft must be a folder, a hub id or a loaded model, not {type(setting.draft).__name__}")
        tokenizer = setting.draft_tokenizer or _tokenizer_of(setting.draft)
        if setting.tokenizer is not None and tokenizer is not None:
            check_same_vocabulary(setting.tokenizer, tokenizer)
        draft = ModelRunner.load(setting.draft, setting.target.config)  # type: ignore[arg-type]
        if tokenizer is None and draft.vocab_size != setting.target.vocab_size:
            raise OutriderError(f"the target has {setting.target.vocab_size} token ids, the draft {draft.vocab_size}")
        return cls(draft, setting.target.vocab_size)

    @torch.inference_mode()
    def propose(self, context: Context, k: int) -> Proposal:
        requests, sampler = context.requests, context.sampler
        k = min(k, self.max_drafts, max(context.limits, default=0))
        room = [len(request.token_ids) + k <= self.draft.max_len for request in requests]
        able = [index for index, fits in enumerate(room) if fits and context.limits[index] > 0]
        if k == 0 or not able:
            return Proposal.empty(len(requests))
        ids = [requests[index].request_id for index in able]
        logits = self.draft.extend(ids, [requests[index].token_ids for index in able])
        drafts = torch.zeros(len(requests), k, dtype=torch.long, device=logits.device)
        probs: list[Tensor] = []

        def pick(logits: Tensor, step: int) -> Tensor:
            logits = self._spread(logits, able, len(requests))
            if sampler.is_deterministic:
                token = sampler.tokens(logits, drafts, start=step)  # [B, 1]
            else:
                probs.append(sampler.probs(logits, drafts, start=step))
                token = sampler.draw(probs[-1][:, 0], step).unsqueeze(1)
            drafts[:, step : step + 1] = token
            return token if len(able) == len(requests) else token[able]

        self.draft.rollout(ids, logits, k, pick)
        lens = torch.tensor([min(k, context.limits[i]) if i in set(able) else 0 for i in range(len(requests))])
        return Proposal(drafts, lens, torch.cat(probs, 1) if probs else None)

    def _spread(self, logits: Tensor, able: list[int], batch: int) -> Tensor:
        """[A, 1, Vd] logits of the requests that can draft -> [B, 1, V]: the others' rows are zero, their drafts unused."""
        missing = self._vocab_size - logits.shape[2]
        if missing > 0:
            logits = functional.pad(logits, (0, missing), value=float("-inf"))
        elif missing < 0:
            logits = logits[:, :, :missing]
        if len(able) == batch:
            return logits
        full = logits.new_zeros(batch, 1, self._vocab_size)
        full[able] = logits
        return full

    def commit(self, context: Context, verdict: Verdict) -> None:
        for request, accepted in zip(context.requests, verdict.num_accepted.tolist(), strict=True):
            self.draft.keep_len(request.request_id, len(request.token_ids) + accepted)

    def warmup(self, k: int, batch: int) -> None:
        self.draft.prepare()

    def release(self, request_ids: Sequence[str]) -> None:
        self.draft.release(request_ids)


def _tokenizer_of(draft: object) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the draft's folder or hub repository, if there is one."""
    source = str(getattr(draft, "name_or_path", draft))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError):
        return None
    return tokenizer
