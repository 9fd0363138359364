"""Loss of heads that draft a block in one pass on a frozen target, and their acceptance by position.

DFlash (arXiv 2602.06036): one pass over a row predicts a block after each of some random positions, the anchors. A draft is
useful only if all earlier ones are accepted, so draft j >= 0 has the weight exp(-j / gamma). Its label is the target's
distribution after the true preceding tokens. DSpark (arXiv 2607.05147) trains its bias by the previous token on these blocks.
DFlash 2's objective is unpublished: as in NVIDIA's NeMo Automodel, a second term with the same weights is the cross entropy of
the path selector's scores of the candidates, given the true previous token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.heads.block import Attend, BlockAttention, BlockHead
from outrider.train.acceptance import acceptance, summary
from outrider.train.head_loss import HeadLoss, numbered, weighted
from outrider.train.plan import step_seed
from outrider.train.precision import arithmetic
from outrider.train.soft_entropy import teacher_of

MAX_GAMMA = 7.0  # the paper's value for blocks of 16; 5 for blocks of 10 and 4 for blocks of 8


@dataclass
class BlockLoss(HeadLoss):
    """Loss over the blocks after random anchors, which each pass draws anew."""

    head: BlockHead

    def __call__(self, rows: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        ids, features, last = self.read(rows.tolist())
        shape, (batch, length) = self.head.shape, ids.shape
        generator = torch.Generator().manual_seed(step_seed(self.seed, pass_index))
        drawn = torch.rand(batch, length - shape.max_drafts, generator=generator).topk(self._num_anchors(length), -1).indices
        anchors = 1 + drawn.sort(-1).values.to(ids.device)  # an anchor has at least one token before it
        gamma = min(MAX_GAMMA, shape.block_size / 2)
        weights = [math.exp(-draft / gamma) for draft in range(shape.max_drafts)]
        losses, hits = list[Tensor](), list[Tensor]()
        with arithmetic(ids.device, self.dtype):
            out, places = self._drafts(ids, features, anchors)
            teacher = teacher_of(self._target_logits(last, places), self.head.draft_ids)
            logits, before, selector = self.head.logits(out), ids.gather(1, places), self.head.candidate_selector
            path_losses = None
            if selector is None:
                logits = self.head.logits_after(out, logits, before)
            else:
                candidates, scores = selector.scores(out, logits, before)
                # Tokens outside the candidates are ignored: if no candidate is likely, there is nothing to learn.
                path_losses = -(teacher.probs.gather(-1, candidates) * scores.log_softmax(-1, dtype=torch.float32)).sum(-1)
            num = anchors.shape[1]
            for draft, own in enumerate(logits.split(num, 1)):
                labels_at = slice(draft * num, (draft + 1) * num)
                loss, hit = self.entropy(own, teacher.at(labels_at))
                losses.append(loss if path_losses is None else loss + path_losses[:, labels_at].mean())
                hits.append(hit)
        return weighted(losses, hits, weights, "draft")

    def _num_anchors(self, length: int) -> int:
        """Return the number of blocks trained per row: together about as many tokens as the row."""
        return max(1, min(length // self.head.shape.block_size, length - self.head.shape.max_drafts))

    def _blocks(self, ids: Tensor, features: list[Tensor], anchors: Tensor) -> Tensor:
        """Return the head's outputs [B, N, K, H] for the K drafts after each anchor [B, N] of tokens [B, S]."""
        head, shape, (batch, num) = self.head, self.head.shape, anchors.shape
        tokens = ids.new_full((batch, num, shape.block_size), shape.mask_token_id)
        tokens[:, :, 0] = ids.gather(1, anchors)
        within = torch.arange(shape.block_size, device=ids.device)
        own = (anchors[:, :, None] + within).flatten(1)  # [B, N * block]
        positions = torch.cat((torch.arange(ids.shape[1], device=ids.device).expand(batch, -1), own), 1)
        context = head.fuse(features)
        hidden = head.embed(tokens.flatten(1), context)
        rotation = head.rotary_emb(context, positions)
        attend = _attention(positions, anchors, shape.block_size)
        out: Tensor = head(hidden, context, rotation, attend, within.repeat(num)[None])
        return out.view(batch, num, shape.block_size, -1)[:, :, shape.block_size - shape.max_drafts :]

    def _drafts(self, ids: Tensor, features: list[Tensor], anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's outputs for the drafts after each anchor [B, N], and the indices of the tokens before the drafts.

        Both are [B, K * N, ...], the first drafts of all anchors first. The labels of a draft are the target's distribution
        after the token before it.
        """
        out = self._blocks(ids, features, anchors)
        return out.transpose(1, 2).flatten(1, 2), torch.cat([anchors + draft for draft in range(out.shape[2])], 1)

    def _target_logits(self, last: Tensor, places: Tensor) -> Tensor:
        """Return the target's logits [B, N, V] after the tokens at ``places`` [B, N], from its last features [B, S, H]."""
        return self.head.target_logits(last.gather(1, places[:, :, None].expand(-1, -1, last.shape[2])))

    @torch.no_grad()
    def measure(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the acceptance of each draft on held-out rows, after the true tokens before it.

        Anchors at which an earlier draft is rejected count as well, so this acceptance is lower than that of reached drafts.
        Greedy: share of equal likeliest tokens; sampled: acceptance probability at temperature 1.
        """
        found = []
        for row in self.cache.held_out:
            ids, features, last = self.read([row])
            most = ids.shape[1] - self.head.shape.max_drafts
            anchors = torch.linspace(1, most, self._num_anchors(ids.shape[1]), device=ids.device).long()[None]
            by_depth = []
            for out, places in zip(
                *[each.split(anchors.shape[1], 1) for each in self._drafts(ids, features, anchors)], strict=True
            ):
                target = self._target_logits(last, places)[0]
                own = self.head.logits_after(out, self.head.logits(out), ids.gather(1, places))[0]
                by_depth.append(acceptance(target, self.head.to_target_vocabulary(own, target.shape[-1])))
            found.append(tuple(torch.stack(each, 1) for each in zip(*by_depth, strict=True)))  # [anchors, K]
        values = summary(found)
        return numbered("held", values["greedy"]["by_depth"]), values


def _attention(positions: Tensor, anchors: Tensor, block: int) -> Attend:
    """Return an attention function in which each block sees the row before its anchor, and itself.

    ``positions`` [B, S + N * block]: those of the row, then those of the blocks; ``anchors`` [B, N].
    """
    num_own = anchors.shape[1] * block
    row, own = positions[:, :-num_own], positions[:, -num_own:]
    before = row[:, None] < anchors.repeat_interleave(block, 1)[:, :, None]  # [B, T, S]
    number = torch.arange(num_own, device=positions.device)
    same = (number[:, None] // block == number // block).expand(len(positions), -1, -1)  # [B, T, T]
    earlier = number[:, None] >= number

    def attend(layer: BlockAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sees = torch.cat((before, same & earlier if layer.sees_earlier_only else same), 2)
        if layer.window:
            sees = sees & (own[:, :, None] - positions[:, None] < layer.window)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value, attn_mask=sees[:, None])
        return out.transpose(1, 2)

    return attend
