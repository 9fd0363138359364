"""Running requests with a draft model: proposals and accepted drafts."""

from __future__ import annotations

from runner.rounds import make_request, make_text, verdict_of

from outrider.sampling import Sampler
from outrider.types import Context


class DraftRounds:
    """Base class of tests: requests of given lengths, and rounds with the subclass's model."""

    def __init__(self, proposer, lengths, vocab, params, coupled=False):
        self.proposer, self.vocab, self.coupled = proposer, vocab, coupled
        self.requests = [make_request(f"r{index}", make_text(length, index, 60)) for index, length in enumerate(lengths)]
        for request in self.requests:
            request.params = params

    def sampler(self):
        return Sampler(self.requests, self.vocab, coupled=self.coupled)

    def context(self, limits):
        return Context(tuple(self.requests), tuple(limits), self.sampler())

    def propose(self, k, limits=None):
        self.last = self.context(limits or [k] * len(self.requests))
        self.proposal = self.proposer.propose(self.last, k)
        return self.proposal

    def commit(self, accepted, next_tokens):
        self.proposer.commit(self.last, verdict_of([list(range(count)) for count in accepted], next_tokens))
        for b, request in enumerate(self.requests):
            request.token_ids += [*self.proposal.token_ids[b, : accepted[b]].tolist(), next_tokens[b]]
