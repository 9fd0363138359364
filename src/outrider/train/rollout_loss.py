"""Losses of heads that draft token by token on a frozen target, and acceptance measurements.

EAGLE-1 (arXiv 2401.15077, section 3.2): smooth L1 loss to the target's next feature and a tenth of the cross entropy to the
target's distribution, on features with noise. EAGLE-3 (arXiv 2503.01840, section 3): cross entropy alone, over several
steps on the head's own outputs (training-time test), weighted 0.8 ** step; MTP heads are trained like that too (FastMTP, arXiv
2509.18362). EAGLE-1 over several steps is HASS (arXiv 2408.15766).

Further depths cost as much as the first and improve the head less, so a run starts with one depth; all depths are trained
while the learning rate decays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from outrider.heads.feature_head import RolloutHead
from outrider.train import rollout_attention
from outrider.train.head_loss import HeadLoss, weighted
from outrider.train.plan import step_seed
from outrider.train.precision import arithmetic
from outrider.train.soft_entropy import Teacher, teacher_of

NOISE = 0.1  # EAGLE-1: matches the error of features when the head feeds itself
CLASS_WEIGHT = 0.1  # EAGLE-1: weight of the cross entropy relative to the regression
MANY_TOKENS = 1 << 14  # vocabulary from which not all positions are measured for siblings
NUM_SIBLINGS = 6  # siblings whose acceptance is measured
DECAY = 0.8
ONE_DEEP, ALL_DEEP = 0.2, 0.3  # shares of a run: one depth until the first, all from the second


@dataclass
class RolloutLoss(HeadLoss):
    """Loss over up to ``steps`` depths, each weighted by ``DECAY`` relative to the one before."""

    head: RolloutHead
    steps: int

    def __call__(self, rows: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        ids, features, last = self.read(rows.tolist())
        if self.head.imitates_features:
            generator = torch.Generator().manual_seed(step_seed(self.seed, pass_index))
            noise = torch.rand(last.shape, generator=generator).to(ids.device)
            features = [last + (2 * noise - 1) * NOISE]
        with arithmetic(ids.device, self.dtype):
            losses, hits = self._step_losses(ids, features, last, self.depth(progress))
        return weighted(losses, hits, [DECAY**depth for depth in range(len(losses))], "step")

    def depth(self, progress: float) -> int:
        """Return the number of depths trained at this point of a run."""
        share = (progress - ONE_DEEP) / (ALL_DEEP - ONE_DEEP)
        return 1 + math.ceil((self.steps - 1) * min(max(share, 0.0), 1.0))

    def _step_losses(self, ids: Tensor, features: list[Tensor], last: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return loss and hits per depth for tokens [B, S] and features [B, S, H]."""
        teacher, found = teacher_of(self.head.target_logits(last), self.head.draft_ids), []
        for depth, out in enumerate(self._rollout(ids, features, steps)):
            labels_at = slice(1 + depth, 1 + depth + out.shape[1])  # the token before the one that an entry predicts
            found.append(self._step_loss(out, teacher.at(labels_at), last[:, labels_at]))
        return [loss for loss, _ in found], [hit for _, hit in found]

    def _rollout(self, ids: Tensor, features: list[Tensor], steps: int) -> list[Tensor]:
        """Return the head's outputs per depth, [B, T, H]; entry t predicts token 2 + t + depth."""
        count = ids.shape[1] - self.steps  # entries with a label at every depth
        positions = torch.arange(count, device=ids.device)[None]
        hidden, outputs = self.head.fuse([each[:, :count] for each in features]), []
        with rollout_attention.rollout():
            for depth in range(steps):
                outputs.append(self.head(ids[:, 1 + depth : 1 + depth + count], hidden, positions + depth))
                hidden = self.head.feedback(outputs[-1])
        return outputs

    def _step_loss(self, out: Tensor, teacher: Teacher, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of outputs [B, T, H] against the target, and the share of equal likeliest tokens."""
        head = self.head
        entropy, hit = self.entropy(head.logits(out), teacher)
        if head.imitates_features:
            return smooth_l1_loss(out.float(), goal) + CLASS_WEIGHT * entropy, hit
        return entropy, hit

    @torch.no_grad()
    def measure(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the agreement of likeliest tokens by depth on held-out rows, without noise."""
        hits = torch.zeros(self.steps)
        for row in self.cache.held_out:
            ids, features, last = self.read([row])
            for depth, hit in enumerate(self._step_losses(ids, features, last, self.steps)[1]):
                hits[depth] += float(hit) / len(self.cache.held_out)
        found = {f"held_{depth + 1}": round(float(hit), 4) for depth, hit in enumerate(hits)}
        return found, found

    @torch.no_grad()
    def sibling_acceptance(self) -> list[float]:
        """Return the acceptance probability of the first, second, ... sibling, at temperature 1 and depth 1 on held-out rows.

        Computed by multi-round rejection: a sibling is sampled and accepted with min(1, target / draft); otherwise the target
        becomes the residual and the next one is sampled without replacement. It determines the shape of sampled trees. With a
        large vocabulary only every few positions are measured, because this takes more time than the heads' passes.
        """
        head, device = self.head, self.head.fc.weight.device
        accepted, total = torch.zeros(NUM_SIBLINGS), 0
        generator = torch.Generator(device).manual_seed(self.seed)
        for row in self.cache.held_out:
            ids, features, last = self.read([row])
            out = self._rollout(ids, features, steps=1)[0][0]
            logits = head.target_logits(last[0, 1 : 1 + len(out)])
            step = 1 + logits.shape[-1] // MANY_TOKENS
            target_probs = logits[::step].softmax(-1)  # [T, V]
            draft_probs = head.to_target_vocabulary(head.logits(out[::step]), target_probs.shape[-1]).softmax(-1)
            alive = torch.ones(len(target_probs), device=device)
            for sibling in range(min(NUM_SIBLINGS, draft_probs.shape[-1] - 1)):
                token = torch.multinomial(draft_probs.clamp_min(1e-20), 1, generator=generator)
                chance = (target_probs.gather(-1, token) / draft_probs.gather(-1, token).clamp_min(1e-20)).clamp_max(1)[:, 0]
                accepted[sibling] += float((alive * chance).sum())
                alive = alive * (1 - chance)
                left = (target_probs - draft_probs).clamp_min(0)
                target_probs = torch.where(left.sum(-1, keepdim=True) > 0, left, target_probs)
                target_probs = target_probs / target_probs.sum(-1, keepdim=True)
                draft_probs = draft_probs.scatter(-1, token, 0.0)
                draft_probs = draft_probs / draft_probs.sum(-1, keepdim=True).clamp_min(1e-20)
            total += len(alive)
        return [round(float(value) / max(total, 1), 4) for value in accepted]
