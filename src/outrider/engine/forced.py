"""Draft the tokens that a grammar determines, in addition to any other drafts.

If a grammar's mask allows a single token, its target probability is 1 for any logits and sampler settings. As a draft it is
accepted at any temperature, and takes one row of a pass instead of a whole pass. Determined text is not always a determined
token: if the mask allows several tokens of the same text, the target chooses, and nothing is drafted here.

``ForcedDrafts`` is between the round and the guarded proposer. Forced tokens are placed before the proposer's drafts, which
treat them as committed if the proposer supports that, and after a chain of drafts, where they are accepted if the whole chain
is. The proposer gets a verdict on its own drafts only. This module is independent of methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outrider.engine.round import Drafter
from outrider.types import BatchSampler, Context, Matcher, Proposal, Request, SamplingParams, Verdict

logger = logging.getLogger(__name__)

MAX_FORCED = 15  # forced drafts of a request per round, for passes of 16 rows; a longer run continues in the next round


@dataclass(slots=True)
class _Row:
    """Drafts of a request with a grammar in this round: ``before``, ``num_own`` of the inner drafter, ``after``."""

    room: int  # maximum number of drafts
    before: list[int]
    num_own: int = 0
    after: list[int] = field(default_factory=list)


class ForcedDrafts:
    """Add forced tokens to the drafts of another drafter."""

    def __init__(
        self,
        inner: Drafter,
        make_sampler: Callable[[Sequence[Request]], BatchSampler],
        *,
        drafts_ahead: bool,
        max_drafts: int | None = None,
    ) -> None:
        """``drafts_ahead``: whether the inner drafter can draft after tokens that the target has not processed yet.

        ``max_drafts``: maximum drafts of a request in one target pass; None: unlimited.
        """
        self._inner, self._make_sampler, self._drafts_ahead = inner, make_sampler, drafts_ahead
        self._max_drafts = max_drafts
        self._most = MAX_FORCED if max_drafts is None else min(MAX_FORCED, max_drafts)
        self._rows: dict[str, _Row] = {}  # by request id, for requests with a grammar
        self._view: Context | None = None  # context of the inner drafter, if it differs from the round's

    def look(self, context: Context) -> None:
        """Find the forced tokens of a round. ``context.limits``: maximum number of drafts per request.

        A request with its own K of 0 gets none.
        """
        self._rows, self._view = {}, None
        for request, limit in zip(context.requests, context.limits, strict=True):
            if request.matcher is not None and request.num_draft_tokens != 0 and limit > 0:
                before = forced_tokens(request, request.matcher, [], min(self._most, limit))
                room = limit if self._max_drafts is None else min(limit, self._max_drafts)
                self._rows[request.request_id] = _Row(room, before)

    def propose(self, context: Context, k: int) -> Proposal:
        """Return the forced tokens found by ``look``, at most k drafts of the inner drafter, and forced tokens after them."""
        if not self._rows:
            return self._inner.propose(context, k)
        proposal = self._inner.propose(self._seen_ahead(context, k), k)
        self._extend(context, proposal)
        rows = [self._rows.get(request_id) for request_id in context.request_ids]
        return _joined(rows, proposal) if any(row is not None and (row.before or row.after) for row in rows) else proposal

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Pass on the verdict on the inner drafter's own drafts."""
        if any(row.before or row.after for row in self._rows.values()):
            verdict = self._on_own(context, verdict)
        if self._view is not None:
            context = self._view.take([self._view.request_ids.index(request_id) for request_id in context.request_ids])
        self._inner.commit(context, verdict)

    def _seen_ahead(self, context: Context, k: int) -> Context:
        """Return the inner drafter's context: forced tokens count as committed, or the request gets no drafts."""
        requests, limits = list(context.requests), list(context.limits)
        for b, request in enumerate(context.requests):
            row = self._rows.get(request.request_id)
            if row is not None and row.before:
                limits[b] = max(min(limits[b], row.room - len(row.before)), 0) if self._drafts_ahead else 0
                if k > 0 and limits[b] > 0:
                    requests[b] = _ahead(request, row.before)
        seen = replace(context, limits=tuple(limits))
        if all([one is other for one, other in zip(requests, context.requests, strict=True)]):
            return seen
        self._view = replace(seen, requests=tuple(requests), sampler=self._make_sampler(requests))
        return self._view

    def _extend(self, context: Context, proposal: Proposal) -> None:
        """Find the forced tokens after each request's chain of drafts."""
        for b, (request, num_own) in enumerate(zip(context.requests, proposal.lens.tolist(), strict=True)):
            row = self._rows.get(request.request_id)
            if row is None:
                continue
            row.num_own = num_own
            room = min(self._most, row.room) - len(row.before) - num_own
            if num_own and room > 0 and proposal.parents is None and request.matcher is not None:
                path = [*row.before, *proposal.token_ids[b, :num_own].tolist()]
                row.after = forced_tokens(request, request.matcher, path, room)

    def _on_own(self, context: Context, verdict: Verdict) -> Verdict:
        path, num_accepted, next_token = verdict.path.clone(), verdict.num_accepted.clone(), verdict.next_token.clone()
        for b, request_id in enumerate(context.request_ids):
            row = self._rows.get(request_id)
            if row is None:
                continue
            first, stop = len(row.before), len(row.before) + row.num_own
            accepted = verdict.path[b, : int(num_accepted[b])]
            own = accepted[(accepted >= first) & (accepted < stop)] - first
            path[b] = -1
            path[b, : len(own)], num_accepted[b] = own, len(own)
            if len(accepted) and int(accepted[-1]) >= stop:
                next_token[b] = row.after[0]
        return Verdict(path, num_accepted, next_token)


@dataclass(frozen=True, slots=True)
class _MatcherAhead:
    """Matcher of a request whose output includes tokens that are not committed yet."""

    inner: Matcher
    num_committed: int  # number of committed tokens in the output

    def allowed(self, output: Sequence[int], path: Sequence[int]) -> torch.Tensor | None:
        return self.inner.allowed(output[: self.num_committed], [*output[self.num_committed :], *path])


def _ahead(request: Request, run: Sequence[int]) -> Request:
    """Return the request as if these tokens were committed."""
    assert request.matcher is not None
    matcher = _MatcherAhead(request.matcher, request.num_output_tokens)
    return replace(request, token_ids=[*request.token_ids, *run], matcher=matcher)


def forced_tokens(request: Request, matcher: Matcher, path: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` tokens after the request's tokens and the drafts of ``path``, each the only one its grammar
    allows.

    The last one is dropped if no token can follow it (end of text or dead end), because it becomes the round's next token.
    """
    output, params = request.token_ids[request.num_prompt_tokens :], request.params
    run: list[int] = []
    while True:
        try:
            mask = matcher.allowed(output, [*path, *run])
        except Exception:  # the target requests the same mask later, and ends the request with the reason
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


def _joined(rows: Sequence[_Row | None], proposal: Proposal) -> Proposal:
    """Return a proposal with forced tokens as chains of point masses around each request's drafts."""
    own: list[int] = proposal.lens.tolist()
    before = [[] if row is None else row.before for row in rows]
    after = [[] if row is None else row.after for row in rows]
    lens = [len(run) + n + len(tail) for run, n, tail in zip(before, own, after, strict=True)]
    batch, width = len(rows), max(lens)
    token_ids = proposal.token_ids.new_zeros(batch, width)
    forced = torch.zeros(batch, width, dtype=torch.bool)
    probs = parents = None
    if proposal.probs is not None:
        probs = proposal.probs.new_zeros(batch, width, proposal.probs.shape[2])
    if proposal.parents is not None:
        parents = proposal.parents.new_full((batch, width), -1)
    for b, (run, n, tail) in enumerate(zip(before, own, after, strict=True)):
        first, stop = len(run), len(run) + n
        for start, tokens in ((0, run), (stop, tail)):
            places = slice(start, start + len(tokens))
            token_ids[b, places], forced[b, places] = token_ids.new_tensor(tokens), True
            if probs is not None:
                probs[b, torch.arange(start, start + len(tokens)), token_ids[b, places]] = 1.0
        token_ids[b, first:stop] = proposal.token_ids[b, :n]
        if probs is not None and proposal.probs is not None:
            probs[b, first:stop] = proposal.probs[b, :n]
        if parents is not None and proposal.parents is not None:
            parents[b, :first] = torch.arange(-1, first - 1)
            parents[b, first:stop] = proposal.parents[b, :n] + first  # their root is the last forced token before them
    joined = replace(proposal, token_ids=token_ids, lens=torch.tensor(lens), probs=probs, parents=parents)
    return replace(joined, forced=forced)
