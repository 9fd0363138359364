"""The draft's losses: plain next-token at first, then distillation from the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from . import model as models


def distillation(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Forward KL from target to draft, and the share of equal greedy tokens; logits [B, S, V]."""
    draft_logprobs = functional.log_softmax(draft_logits.flatten(0, 1).float(), -1)  # [B*S, V]
    target_logprobs = functional.log_softmax(target_logits.flatten(0, 1).float(), -1)
    kl = functional.kl_div(draft_logprobs, target_logprobs, reduction="batchmean", log_target=True)
    agreement = (draft_logprobs.argmax(-1) == target_logprobs.argmax(-1)).float().mean()
    return kl, agreement


@dataclass
class DraftLoss:
    """Cross entropy for the first `plain_share` of the run, then forward KL on the target's logits.

    The rows are corpus text mixed with text the target wrote itself (DistillSpec, Zhou et al. 2024,
    section 3: forward KL, mixed data); where they come from is the data's business.
    """

    draft: LlamaForCausalLM
    target: LlamaForCausalLM
    dtype: torch.dtype
    plain_share: float
    token_loss: models.Compiled = models.token_loss
    distillation: models.Compiled = distillation

    def __call__(self, ids: Tensor, step: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Loss of ids [B, S + 1]."""
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            hidden = models.hidden_states(self.draft, ids[:, :-1])[-1]
            if progress < self.plain_share:
                loss = self.token_loss(self.draft, hidden, ids[:, 1:])
                return loss, {"loss": loss.detach()}
            with torch.no_grad():
                target_logits = models.logits(self.target, models.hidden_states(self.target, ids[:, :-1])[-1])
            kl, agreement = self.distillation(models.logits(self.draft, hidden), target_logits)
        return kl, {"kl": kl.detach(), "agreement": agreement}
