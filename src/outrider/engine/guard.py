"""Contain the failures of a proposer: whatever it does wrong costs drafts of the requests concerned, never their text.

``GuardedProposer`` has the interface of a proposer and stands between it and the round. Knows no method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine.features import FeatureStore
from outrider.engine.round import RoundResult
from outrider.engine.validation import check, useful
from outrider.proposers.base import Proposer
from outrider.sampling import InvalidLogits
from outrider.types import Context, Proposal, Request, Verdict

logger = logging.getLogger(__name__)

FIRST_PAUSE = 64  # rounds without drafts after a request's first fault; each further fault doubles it
MAX_DOUBLINGS = 6


@dataclass(slots=True)
class _Drafting:
    """How far the proposer is with one request."""

    fork_of: str | None = None  # the request whose prompt is the same
    is_prefilled: bool = False
    num_faults: int = 0
    paused_until: int = 0  # the last round without drafts


class GuardedProposer:
    """Ask a proposer for the requests that it has not failed for, validate what it returns and contain what it raises."""

    def __init__(
        self, proposer: Proposer, vocab_size: int, report: Callable[[Sequence[str]], None], takes_trees: bool = True
    ) -> None:
        """``report`` is called with the ids of requests for which the proposer failed.

        ``takes_trees``: whether the target scores trees. Where it does not, the first path of each tree is all that is drafted.
        """
        self._proposer, self._vocab_size, self._report = proposer, vocab_size, report
        self._takes_trees = takes_trees
        self._nodes: dict[str, Tensor] = {}  # request -> [D]: where the drafts of a first path stand in the proposer's tree
        self._features = FeatureStore(proposer.needs_hidden)
        self._requests: dict[str, _Drafting] = {}
        self._drafted: set[str] = set()  # requests of this round that the proposer drafted for
        self._round = 0
        self._empty = Proposal.empty(1)

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        """Prefill the next chunk of prompts that are new to the proposer. Return which requests can be drafted for."""
        able = [self._is_able(self._of(request)) for request in requests]
        known = [request for request, is_able in zip(requests, able, strict=True) if is_able]
        fresh = [request for request in known if not self._of(request).is_prefilled]
        if not fresh:
            return able
        try:
            self._prefill(fresh)
        except Exception as error:
            self._blame(known, error)
            return [False] * len(requests)
        return [is_able and self._of(request).is_prefilled for request, is_able in zip(requests, able, strict=True)]

    def propose(self, context: Context, k: int) -> Proposal:
        """At most k drafts for each request with a limit above 0, none for the others."""
        self._round += 1
        self._drafted, self._nodes = set(), {}
        batch = len(context.requests)
        rows = [b for b, limit in enumerate(context.limits) if limit > 0] if k > 0 else []
        if not rows:
            return self._none(batch)
        context = context.take(rows)
        try:
            view = self._features.attach(context) if self._features.layers else context
            checked = useful(check(self._proposer.propose(view, k), context.limits, k, self._vocab_size), context)
            if not self._takes_trees and checked.proposal.parents is not None:
                chains, nodes = checked.proposal.first_paths()
                checked = replace(checked, proposal=chains)
                self._nodes = dict(zip(context.request_ids, nodes, strict=True))
        except Exception as error:
            self._blame(context.requests, error)
            return self._none(batch)
        self._features.seen(context.request_ids)
        for row, reason in checked.faults.items():
            self._fail([context.requests[row]], reason)
        self._drafted = {name for row, name in enumerate(context.request_ids) if row not in checked.faults}
        return checked.proposal if len(rows) == batch else checked.proposal.scatter(rows, batch)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Tell the proposer the verdict on the requests that it drafted for this round."""
        if not self._drafted:
            return
        rows = [b for b, request in enumerate(context.requests) if request.request_id in self._drafted]
        if not rows:
            return
        verdict = verdict if len(rows) == len(context.requests) else verdict.take(rows)
        context = context.take(rows)
        try:
            if self._nodes:
                verdict = _in_tree(verdict, torch.stack([self._nodes[request_id] for request_id in context.request_ids]))
            self._proposer.commit(context, verdict)
        except Exception as error:
            self._fail(context.requests, f"{type(error).__name__}: {error}")

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget requests."""
        self._forget(request_ids, self._proposer.release)

    def retire(self, request_ids: Sequence[str]) -> None:
        """Forget requests that finished; the proposer may keep their text cached for others."""
        self._forget(request_ids, self._proposer.retire)

    # --- samples of one prompt, hidden states ------------------------------------------------------------------------------

    def share(self, request_id: str) -> None:
        """Announce that other requests will be forked from this one."""
        if self._features.layers:
            self._features.share(request_id)

    def fork(self, source_id: str, request: Request) -> bool:
        """Whether a request can start from the cached prompt of another: the hidden states that are needed are there."""
        self._of(request).fork_of = source_id
        return self._features.fork(source_id, request.request_id)

    def keep_hidden(self, result: RoundResult) -> None:
        """Keep the hidden states of the tokens that a round committed, until the proposer sees them."""
        if not self._features.layers:
            return
        lens = result.proposal.lens.tolist()
        for b, request in enumerate(result.context.requests):
            if not self._of(request).num_faults:
                hidden = {layer: states[b] for layer, states in result.scores.hidden.items()}
                num_before = len(request.token_ids) - len(result.token_ids[b])
                self._features.keep(request, num_before, hidden, lens[b], result.paths[b])

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _of(self, request: Request) -> _Drafting:
        found = self._requests.get(request.request_id)
        if found is None:
            found = self._requests[request.request_id] = _Drafting()
        return found

    def _is_able(self, drafting: _Drafting) -> bool:
        # Hidden states of the committed tokens are gone after a fault: a proposer that needs them gets no second chance.
        return self._round >= drafting.paused_until and not (drafting.num_faults and self._features.layers)

    def _prefill(self, requests: Sequence[Request]) -> None:
        for request in requests:
            source = self._of(request).fork_of
            if source is not None and source in self._requests and self._requests[source].is_prefilled:
                self._proposer.fork(source, request)
        for request, is_prefilled in zip(requests, self._proposer.prefill(requests), strict=True):
            self._of(request).is_prefilled = is_prefilled

    def _none(self, batch: int) -> Proposal:
        if self._empty.lens.shape[0] != batch:
            self._empty = Proposal.empty(batch)
        return self._empty

    def _blame(self, requests: Sequence[Request], error: Exception) -> None:
        """Pause the requests that caused an error: those that it names, else all.

        The others go without drafts for this round alone: the hidden states of this round have been read.
        """
        named = error.request_ids if isinstance(error, InvalidLogits) else ()
        self._features.seen([request.request_id for request in requests])
        at_fault = [request for request in requests if request.request_id in named] or requests
        self._fail(at_fault, f"{type(error).__name__}: {error}")

    def _fail(self, requests: Sequence[Request], reason: str) -> None:
        """Pause drafting for requests: they go on plain, with nothing lost."""
        ids = [request.request_id for request in requests]
        for request in requests:
            drafting = self._of(request)
            drafting.is_prefilled = False
            drafting.paused_until = self._round - 1 + (FIRST_PAUSE << min(drafting.num_faults, MAX_DOUBLINGS))
            drafting.num_faults += 1
        self._report(ids)
        logger.warning("the proposer %r failed, %s go on without drafts: %s", self._proposer.name, ", ".join(ids), reason)
        self._drop(ids, self._proposer.release)

    def _forget(self, request_ids: Sequence[str], release: Callable[[Sequence[str]], None]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._drafted.discard(request_id)
        self._drop(request_ids, release)

    def _drop(self, request_ids: Sequence[str], release: Callable[[Sequence[str]], None]) -> None:
        """Drop what is cached of requests."""
        self._features.release(request_ids)
        try:
            release(request_ids)
        except Exception as error:
            logger.warning("the proposer %r failed to release a request: %s", self._proposer.name, error)


def _in_tree(verdict: Verdict, nodes: Tensor) -> Verdict:
    """The verdict with the nodes [B, D] of the proposer's tree in place of the drafts of its first path."""
    path = torch.where(verdict.path >= 0, nodes.gather(1, verdict.path.clamp(min=0)), -1) if nodes.shape[1] else verdict.path
    return replace(verdict, path=path)
