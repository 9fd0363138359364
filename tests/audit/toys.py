"""A table draft close to the target's table, so that audits of the real engine take seconds."""

from __future__ import annotations

import torch

from outrider.proposers.base import Proposer
from outrider.types import Context, Proposal
from tests.engine.toy import VOCAB, TableRunner


class TableDraft(Proposer):
    """Drafts from the target's table with noise added; the proposal carries the distributions."""

    name = "table"

    def __init__(self, runner: TableRunner, noise: float = 1.0) -> None:
        self.table = runner.table + noise * torch.randn(runner.table.shape, generator=torch.Generator().manual_seed(9))

    def propose(self, context: Context, k: int) -> Proposal:
        requests, sampler = context.requests, context.sampler
        k = min(k, max(context.limits))
        drafts, probs = torch.zeros(len(requests), k, dtype=torch.long), []
        last = torch.tensor([request.token_ids[-2:] for request in requests])  # [B, 2]
        for step in range(k):
            logits = self.table[last[:, 0], last[:, 1]].unsqueeze(1)
            if sampler.is_deterministic:
                token = sampler.tokens(logits, drafts, start=step)[:, 0]
            else:
                probs.append(sampler.probs(logits, drafts, start=step))
                token = sampler.draw(probs[-1][:, 0], step)
            drafts[:, step] = token
            last = torch.stack((last[:, 1], token), 1)
        lens = torch.tensor([min(k, limit) for limit in context.limits])
        return Proposal(drafts, lens, torch.cat(probs, 1) if probs else None)


def table_runner() -> TableRunner:
    return TableRunner(max_batch=256, max_len=4000, eos_bias=0.0, sharpness=3.0)


PROMPTS = [[3, 1, 4], [2, 7]]
assert VOCAB == 17
