"""Replaces some drafts of another proposer by random tokens, to show the cost of a worse draft.

The output stays lossless: a replacement is a point mass, and whether a draft is replaced does not depend on its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.proposers.base import Proposer
from outrider.proposers.wrapper import ProposerWrapper
from outrider.sampling.randomness import key_of, uniforms
from outrider.types import Context, Proposal, Request, Verdict

_REPLACED = 0x57726F6E67  # separates this random stream from the sampler's


class Degraded(ProposerWrapper):
    """Each draft of ``inner``, in a chain or a tree, is kept with probability ``accuracy``.

    At 1 proposals are unchanged. At 0 every draft is a random other token, which is almost never accepted. Which drafts are
    replaced is determined by (seed, sequence length, node).
    """

    def __init__(self, inner: Proposer, accuracy: float = 1.0) -> None:
        super().__init__(inner)
        self.accuracy = accuracy
        self._wrong: dict[str, dict[int, int]] = {}  # request -> node of this round -> replacement token

    def propose(self, context: Context, k: int) -> Proposal:
        proposal = self.inner.propose(context, k)
        self._wrong = {}
        if self.accuracy == 1 or not proposal.num_nodes:
            return proposal
        vocab_size = context.sampler.vocab_size
        token_ids = proposal.token_ids.clone()
        probs = None if proposal.probs is None else proposal.probs.clone()
        drafts = zip(context.requests, token_ids.tolist(), proposal.lens.tolist(), strict=True)
        for b, (request, ids, length) in enumerate(drafts):
            wrong = self._wrong[request.request_id] = self._replacements(request, ids[:length], vocab_size)
            for node, token in wrong.items():
                token_ids[b, node] = token
                if probs is not None:
                    probs[b, node] = 0.0
                    probs[b, node, token] = 1.0
        return replace(proposal, token_ids=token_ids, probs=probs)

    def _replacements(self, request: Request, token_ids: Sequence[int], vocab_size: int) -> dict[int, int]:
        """Return node -> replacement token. The choice of nodes must not depend on tokens, which would bias later drafts."""
        heights = uniforms(key_of(request.seed, _REPLACED, len(request.token_ids)), 2 * len(token_ids))
        wrong = {}
        for node, token in enumerate(token_ids):
            chance, which = heights[2 * node : 2 * node + 2]
            if chance >= self.accuracy:
                wrong[node] = (token + 1 + int(which * (vocab_size - 1))) % vocab_size
        return wrong

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Pass the verdict to the inner proposer; its path ends before the first accepted replacement."""
        paths, next_tokens = list(verdict.paths), list(verdict.next_tokens)
        for b, request_id in enumerate(context.request_ids):
            wrong = self._wrong.get(request_id, {})
            at = next((depth for depth, node in enumerate(paths[b]) if node in wrong), None)
            if at is not None:
                paths[b], next_tokens[b] = paths[b][:at], wrong[paths[b][at]]
        super().commit(context, Verdict(paths, next_tokens))
