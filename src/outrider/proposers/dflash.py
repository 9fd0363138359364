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
from outrider.proposers.base import Proposer, pick
from outrider.proposers.head_method import HeadConfig, HeadMethod, Loaded
from outrider.proposers.portable import Form
from outrider.proposers.recognition import TargetFiles
from outrider.runner import ModelRunner
from outrider.types import Context, Proposal, Request, scatter_rows


class BlockProposer(Proposer):
    """Drafts a chain in one pass of a head over the target's features, which has its own KV cache."""

    name = "dflash"

    def __init__(self, head: BlockHead, target: ModelRunner, config: HeadConfig) -> None:
        """Raise ``OutriderError`` for a head that does not fit the target."""
        head.check_fit(target)
        self.needs_hidden = head.hidden_states
        self.head = BlockRunner(head, target, config.bits)
        self.max_drafts = head.shape.max_drafts
        self._vocab_size = target.vocab_size

    @torch.inference_mode()
    def propose(self, context: Context, k: int) -> Proposal:
        requests, hidden = context.requests, [context.hidden[index] for index in self.needs_hidden]
        # A request has no features before the target has read its prompt.
        known = [b for b in range(len(requests)) if len(hidden[0][b])]
        k = min(k, self.max_drafts)
        limits = {b: min(k, context.limits[b]) for b in known}
        draftable = [b for b in known if limits[b] > 0]
        features = {}
        for b in known:
            num_new = len(requests[b].token_ids) - 1 - self.head.cache.cached_len(requests[b].request_id)
            features[b] = newest([each[b] for each in hidden], num_new)
        # Few new features share the block's pass. Those of a prompt are read before, and so is what no block follows.
        before = [b for b in known if b not in draftable or len(features[b][0]) > CHUNK]
        if before:
            self.head.extend([requests[b].request_id for b in before], [features[b] for b in before])
        if not draftable:
            return Proposal.empty(len(requests))
        none = [each[:0] for each in features[draftable[0]]]
        counts = [limits[b] for b in draftable]
        ids, last = [requests[b].request_id for b in draftable], [requests[b].token_ids[-1] for b in draftable]
        out = self.head.draft(ids, [none if b in before else features[b] for b in draftable], last, counts)
        drafts, probs = self._picked(context, draftable, out)  # the sampler names requests whose logits are NaN or infinite
        lens = torch.zeros(len(requests), dtype=torch.long)
        lens[draftable] = torch.tensor(counts)
        return Proposal(drafts, lens, probs)

    def _picked(self, context: Context, draftable: Sequence[int], out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pick drafts [B, K], one after another, and return their distributions unless they are point masses.

        ``out`` [A, K, H]: the head's output for each draft of the requests ``draftable``.
        """
        batch = len(context.requests)
        logits = self.head.head.logits(out)  # [A, K, Vd]
        drafts = torch.zeros(batch, out.shape[1], dtype=torch.long, device=out.device)
        previous = torch.tensor([context.requests[b].token_ids[-1] for b in draftable], device=out.device)
        probs: list[Tensor] = []
        for step in range(out.shape[1]):
            own = self.head.after(out[:, step : step + 1], logits[:, step : step + 1], previous[:, None])
            pick(context.sampler, scatter_rows(own, draftable, batch), drafts, step, probs)
            previous = drafts[:, step] if len(draftable) == batch else drafts[draftable, step]
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
