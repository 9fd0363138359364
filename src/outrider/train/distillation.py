"""The losses of a draft model that learns from its target (DistillSpec: Zhou et al. 2023, arXiv 2310.08461)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedModel

from outrider.train.continuation import continue_rows
from outrider.train.precision import arithmetic

DIVERGENCES = ("kl", "tv")

Divergence = Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]]


def divergence(draft_logits: Tensor, target_logits: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """How far logits [B, S, V] are apart, a mean over places, and the share of equal greedy tokens.

    ``kl``: forward KL, from target to draft. ``tv``: total variation, which is one minus the acceptance of rejection sampling.
    """
    size = min(draft_logits.shape[-1], target_logits.shape[-1])  # what one of them has more of is padding
    draft_logprobs = log_softmax(draft_logits.flatten(0, 1)[:, :size].float(), -1)  # [B * S, V]
    target_logprobs = log_softmax(target_logits.flatten(0, 1)[:, :size].float(), -1)
    if kind == "kl":
        loss = kl_div(draft_logprobs, target_logprobs, reduction="batchmean", log_target=True)
    else:
        loss = 0.5 * (draft_logprobs.exp() - target_logprobs.exp()).abs().sum(-1).mean()
    return loss, (draft_logprobs.argmax(-1) == target_logprobs.argmax(-1)).float().mean()


def next_token_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean cross entropy of each token of ids [B, S + 1] but the first."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Distillation:
    """What a draft learns from its target, and on which text."""

    loss: str = "kl"  # or tv
    plain_share: float = 0.0  # of the run spent on plain next-token loss first: for a draft that begins from noise
    on_policy: float = 0.0  # share of the rows of a step that the draft writes itself, behind their first prompt_len tokens
    prompt_len: int = 64


@dataclass
class DistillationLoss:
    """Divergence from a frozen target's logits at every place of the text.

    Which text the rest of the rows are, the user's or the target's own, is the data's business (DistillSpec, section 4.2).
    """

    draft: PreTrainedModel
    target: PreTrainedModel
    how: Distillation
    dtype: torch.dtype = torch.float32  # of the arithmetic
    seed: int = 0
    divergence: Divergence = divergence

    def __call__(self, ids: Tensor, step: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Loss of ids [B, S + 1]."""
        with arithmetic(ids.device, self.dtype):
            if progress < self.how.plain_share:
                loss = next_token_loss(self.draft, ids)
                return loss, {"loss": loss.detach()}
            text = self.written(ids, step)[:, :-1]
            with torch.no_grad():
                said = self.target(input_ids=text, use_cache=False).logits
            loss, hit = self.divergence(self.draft(input_ids=text, use_cache=False).logits, said, self.how.loss)
        return loss, {self.how.loss: loss.detach(), "hit_draft": hit}

    def written(self, ids: Tensor, step: int) -> Tensor:
        """Ids [B, S + 1] of which the draft has written the on-policy rows anew, at temperature 1, by a noise of the step's."""
        rows, length = round(len(ids) * self.how.on_policy), min(self.how.prompt_len, ids.shape[1] - 1)
        if not rows:
            return ids
        generator = torch.Generator(ids.device).manual_seed(self.seed * 1_000_003 + step)
        warm = torch.ones(rows, device=ids.device)
        was_training = self.draft.training
        self.draft.eval()
        own = continue_rows(self.draft, ids[:rows, :length].long(), ids.shape[1] - length, warm, generator)
        self.draft.train(was_training)
        return torch.cat((own.to(ids.dtype), ids[rows:]))
