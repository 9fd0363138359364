"""Draft what a grammar leaves no choice about, before any method is asked.

A token that the grammar's mask leaves as the only one has probability 1 under the target, whatever its logits and the sampler's
settings: as a draft it is accepted at any temperature, so it costs one more row of a pass instead of a pass. Forced text is
not always a forced token: where the mask allows several tokens of the same text, the target chooses, and nothing is drafted.

``ForcedDrafts`` stands between the round and the guarded proposer. The proposer drafts after the forced tokens as if they
were committed, where it can; it is told a verdict on its own drafts alone. Knows no method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.engine.round import Drafter
from outrider.types import BatchSampler, Context, Matcher, Proposal, Request, SamplingParams, Verdict

logger = logging.getLogger(__name__)

MAX_FORCED = 15  # forced drafts of a request in one round: a pass of 16 rows; a longer run takes another round


class ForcedDrafts:
    """A drafter that puts forced tokens before the drafts of another one."""

    def __init__(
        self,
        inner: Drafter,
        make_sampler: Callable[[Sequence[Request]], BatchSampler],
        *,
        drafts_ahead: bool,
        max_drafts: int | None = None,
    ) -> None:
        """``drafts_ahead``: whether the inner drafter can draft after tokens that the target has not read yet.

        ``max_drafts``: most drafts of a request in one pass of the target; None: any number.
        """
        self._inner, self._make_sampler = inner, make_sampler
        self._drafts_ahead, self._max_drafts = drafts_ahead, max_drafts
        self._runs: dict[str, list[int]] = {}  # request -> forced tokens of this round
        self._ahead: dict[str, Request] = {}  # the same requests as if those were committed, where the inner drafter was asked
        self._room: dict[str, int] = {}  # drafts of use to each request of this round

    def look(self, context: Context) -> None:
        """Find the forced tokens of a round. ``context.limits``: the drafts that each request has room for.

        A request that asked for no drafts has none.
        """
        self._runs, self._ahead = {}, {}
        self._room = dict(zip(context.request_ids, context.limits, strict=True))
        most = MAX_FORCED if self._max_drafts is None else min(MAX_FORCED, self._max_drafts)
        for request, limit in zip(context.requests, context.limits, strict=True):
            if request.matcher is None or request.num_draft_tokens == 0 or limit <= 0:
                continue
            run = _forced_tokens(request, request.matcher, min(most, limit))
            if run:
                self._runs[request.request_id] = run

    def propose(self, context: Context, k: int) -> Proposal:
        """The forced tokens that ``look`` found, then at most k drafts of the inner drafter."""
        if not self._runs:
            return self._inner.propose(context, k)
        proposal = self._inner.propose(self._view(context, k), k)
        return _joined([self._runs.get(request_id, []) for request_id in context.request_ids], proposal)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Pass on the verdict without the forced tokens."""
        if self._ahead:
            verdict = self._without_forced(context, verdict)
            context = self._moved(context)
        self._inner.commit(context, verdict)

    def _view(self, context: Context, k: int) -> Context:
        """The context for the inner drafter: requests with forced tokens as if those were committed, or without drafts."""
        limits = []
        for request, limit in zip(context.requests, context.limits, strict=True):
            run = self._runs.get(request.request_id)
            if run is not None and limit > 0:
                limit = min(limit, self._room[request.request_id] - len(run)) if self._drafts_ahead else 0
                if self._max_drafts is not None:
                    limit = min(limit, self._max_drafts - len(run))
                if k > 0 and limit > 0:
                    self._ahead[request.request_id] = _ahead(request, run)
            limits.append(max(limit, 0))
        return self._moved(replace(context, limits=tuple(limits)))

    def _moved(self, context: Context) -> Context:
        requests = tuple([self._ahead.get(request.request_id, request) for request in context.requests])
        return replace(context, requests=requests, sampler=self._make_sampler(requests)) if self._ahead else context

    def _without_forced(self, context: Context, verdict: Verdict) -> Verdict:
        path, num_accepted = verdict.path.clone(), verdict.num_accepted.clone()
        for b, request_id in enumerate(context.request_ids):
            if request_id in self._ahead:
                num_forced = len(self._runs[request_id])
                own = path[b, num_forced : int(num_accepted[b])] - num_forced
                path[b] = -1
                path[b, : len(own)], num_accepted[b] = own, len(own)
        return Verdict(path, num_accepted, verdict.next_token)


@dataclass(frozen=True, slots=True)
class _MatcherAhead:
    """The matcher of a request whose output counts tokens that are not committed yet."""

    inner: Matcher
    num_committed: int  # of the output

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> torch.Tensor | None:
        return self.inner.allowed(output[: self.num_committed], (*output[self.num_committed :], *path))


def _ahead(request: Request, run: Sequence[int]) -> Request:
    """The request as it is once its forced tokens are committed."""
    assert request.matcher is not None
    matcher = _MatcherAhead(request.matcher, request.num_output_tokens)
    return replace(request, token_ids=[*request.token_ids, *run], matcher=matcher)


def _forced_tokens(request: Request, matcher: Matcher, most: int) -> list[int]:
    """At most that many tokens after the request's text, each the only one that its grammar allows.

    Without the last one where nothing can follow it (the end of the text, a dead end): the round's own token is that one.
    """
    output, params = request.token_ids[request.num_prompt_tokens :], request.params
    run: list[int] = []
    while True:
        try:
            mask = matcher.allowed(output, run)
        except Exception:  # the target asks for this mask too, once the round is there: it ends the request with the reason
            logger.debug("no further forced tokens for request %s", request.request_id, exc_info=True)
            mask = None
        num_allowed = 0 if mask is None else np.count_nonzero(mask.numpy())
        if num_allowed > 1:
            return run
        token = int(mask.numpy().argmax()) if mask is not None and num_allowed else None
        if token is None or not _may_say(params, token):
            return run[:-1]
        if len(run) == most:
            return run
        run.append(token)


def _may_say(params: SamplingParams, token: int) -> bool:
    return token not in params.banned_token_ids and (params.allowed_token_ids is None or token in params.allowed_token_ids)


def _joined(runs: Sequence[Sequence[int]], proposal: Proposal) -> Proposal:
    """Each request's forced tokens, as a chain of point masses, then its drafts of the proposal."""
    own: list[int] = proposal.lens.tolist()
    lens = [len(run) + n for run, n in zip(runs, own, strict=True)]
    batch, width = len(runs), max(lens)
    token_ids = proposal.token_ids.new_zeros(batch, width)
    is_forced = torch.zeros(batch, width, dtype=torch.bool)
    probs = parents = None
    if proposal.probs is not None:
        probs = proposal.probs.new_zeros(batch, width, proposal.probs.shape[2])
    if proposal.parents is not None:
        parents = proposal.parents.new_full((batch, width), -1)
    for b, (run, n) in enumerate(zip(runs, own, strict=True)):
        first, stop = len(run), len(run) + n
        token_ids[b, :first], is_forced[b, :first] = token_ids.new_tensor(run), True
        token_ids[b, first:stop] = proposal.token_ids[b, :n]
        if probs is not None and proposal.probs is not None:
            probs[b, torch.arange(first), run] = 1.0
            probs[b, first:stop] = proposal.probs[b, :n]
        if parents is not None and proposal.parents is not None:
            parents[b, :first] = torch.arange(-1, first - 1)
            parents[b, first:stop] = proposal.parents[b, :n] + first  # the root is the last forced token
    joined = replace(proposal, token_ids=token_ids, lens=torch.tensor(lens), probs=probs, parents=parents)
    return replace(joined, forced=is_forced)
