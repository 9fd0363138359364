"""DFlash: a block drafter reads the target's features and drafts a block in one pass (arXiv 2602.06036; DSpark: 2607.05147;
DFlash 2: inco.ai/blog/dflash2).

The verifier receives the distributions that the drafts were sampled from. Those of DFlash do not depend on the block's earlier
drafts, except through grammars and penalties; those of DSpark and DFlash 2 depend on the draft before, so drafts are sampled
one after another from the outputs of the one pass. In greedy and coupled rounds drafts are point masses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.heads import block_formats, findings
from outrider.heads.block import BlockHead
from outrider.heads.block_runner import BlockRunner
from outrider.heads.checkpoint import BLOCK
from outrider.heads.head_runner import CHUNK, newest
from outrider.proposers.base import Proposer, pick, rows_with_hidden
from outrider.proposers.head_method import HeadConfig, HeadMethod, Loaded
from outrider.proposers.method import TargetFiles
from outrider.proposers.portable import Form
from outrider.runner import ModelRunner
from outrider.types import BatchSampler, Context, Proposal, Request


class BlockProposer(Proposer):
    """Drafts a chain in one pass of a head over the target's features, which has its own KV cache."""

    name = "dflash"

    def __init__(self, head: BlockHead, target: ModelRunner, config: HeadConfig) -> None:
        """Raise ``OutriderError`` for a head that does not fit the target."""
        head.check_fit(target)
        self.needs_hidden = head.hidden_states
        self.head = BlockRunner(head, target, config.bits)
        self.max_drafts = head.shape.max_drafts

    @torch.inference_mode()
    def propose(self, context: Context, k: int) -> Proposal:
        batch, rows = len(context.requests), rows_with_hidden(context, self.needs_hidden[0])
        if not rows:
            return Proposal.empty(batch)
        context = context.take(rows)
        ids, counts = context.request_ids, [min(k, self.max_drafts, limit) for limit in context.limits]
        features = []
        for b, request in enumerate(context.requests):
            num_new = len(request.token_ids) - 1 - self.head.cache.cached_len(request.request_id)
            features.append(newest([context.hidden[index][b] for index in self.needs_hidden], num_new))
        # Few new features share the block's pass. Those of a prompt are read before.
        long = [b for b, each in enumerate(features) if len(each[0]) > CHUNK]
        if long:
            self.head.extend([ids[b] for b in long], [features[b] for b in long])
            for b in long:
                features[b] = [each[:0] for each in features[b]]
        last = [request.token_ids[-1] for request in context.requests]
        out = self.head.draft(ids, features, last, counts)
        drafts, probs = self._picked(context.sampler, last, out)  # the sampler names requests whose logits are NaN or infinite
        return Proposal(drafts, torch.tensor(counts), probs).scatter(rows, batch)

    def _picked(self, sampler: BatchSampler, last: Sequence[int], out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pick drafts [A, K], one after another, and return their distributions unless they are point masses.

        ``last``: the token before them; ``out`` [A, K, H]: the head's output for each.
        """
        logits = self.head.head.logits(out)  # [A, K, Vd]
        drafts = torch.zeros(out.shape[:2], dtype=torch.long, device=out.device)
        previous = torch.tensor(last, device=out.device)
        probs: list[Tensor] = []
        for step in range(out.shape[1]):
            own = self.head.after(out[:, step : step + 1], logits[:, step : step + 1], previous[:, None])
            pick(sampler, own, drafts, step, probs)
            previous = drafts[:, step]
        return drafts, torch.cat(probs, 1) if probs else None

    def prepare(self) -> None:
        self.head.prepare()

    def start(self, request: Request) -> int:
        return self.head.start(request)

    def retire(self, request_ids: Sequence[str]) -> None:
        self.head.cache.retire(request_ids)

    def release(self, request_ids: Sequence[str]) -> None:
        self.head.cache.release(request_ids)


class BlockMethod(HeadMethod):
    proposer = BlockProposer
    exported = Form.BLOCK_DRAFTER
    heads = BlockHead
    drafts_with = BLOCK
    own_draft = "dflash"
    precedence = 2
    check_files = staticmethod(findings.of_block)

    def load(self, folder: Path, target: ModelRunner | TargetFiles) -> Loaded:
        return Loaded(block_formats.load(folder, target, getattr(target, "model", None)), "block drafter", {})


METHOD = BlockMethod()
