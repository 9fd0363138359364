"""Contain failures of a proposer: the requests concerned continue without drafts, and their output is unaffected.

``GuardedProposer`` has the interface of a proposer and is called by the round in its place. Independent of methods.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.engine.clock import PhaseClock
from outrider.engine.features import FeatureStore
from outrider.engine.round import RoundResult
from outrider.engine.validation import Checked, check, without_unusable
from outrider.proposers.base import Proposer
from outrider.types import Context, Proposal, Request, RequestFault, Verdict

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Drafting:
    """The proposer's state for one request."""

    fork_of: str | None = None  # id of a request with the same prompt
    is_prefilled: bool = False
    has_failed: bool = False  # there are no more drafts for it


class GuardedProposer:
    """Calls and times a proposer for requests on which it has not failed, validates its proposals, catches its exceptions."""

    def __init__(
        self,
        proposer: Proposer,
        clock: PhaseClock,
        vocab_size: int,
        report: Callable[[Sequence[str]], None],
        supports_trees: bool,
    ) -> None:
        """``report`` is called with the ids of requests on which the proposer fails.

        ``supports_trees``: whether target and verifiers support trees. If not, each tree is reduced to its first path.
        """
        self._proposer, self._clock, self._vocab_size, self._report = proposer, clock, vocab_size, report
        self._supports_trees = supports_trees
        self._nodes: dict[str, list[int]] = {}  # request -> indices of its drafts in the proposer's tree; empty: unchanged
        self._features = FeatureStore(proposer.needs_hidden)
        self._requests: defaultdict[str, _Drafting] = defaultdict(_Drafting)
        self._drafted: set[str] = set()  # requests of this round that the proposer drafted for
        self._empty = Proposal.empty(1)

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        """Prefill the next chunk of prompts that are new to the proposer. Return which requests can be drafted for."""
        pairs = [(request, self._drafting(request)) for request in requests]
        fresh = [request for request, drafting in pairs if not (drafting.is_prefilled or drafting.has_failed)]
        if fresh:
            try:
                self._prefill(fresh)
            except Exception as error:
                self._stop_at_fault(fresh, error)
        return [drafting.is_prefilled for _, drafting in pairs]

    def propose(self, context: Context, k: int) -> Proposal:
        """Return the proposer's drafts for each request with a limit above 0, none for the others."""
        self._drafted, self._nodes = set(), {}
        batch = len(context.requests)
        rows = [b for b, limit in enumerate(context.limits) if limit > 0] if k > 0 else []
        if not rows:
            return self._no_drafts(batch)
        context = context.take(rows)
        try:
            view = self._features.attach(context) if self._features.layers else context
            with self._clock.phase("draft"):
                proposal = self._proposer.propose(view, k)
            checked = without_unusable(check(proposal, context.limits, k, self._vocab_size), context)
            if checked.proposal.parents is not None:
                checked = self._as_scored(checked, context)
        except Exception as error:
            self._stop_at_fault(context.requests, error)
            return self._no_drafts(batch)
        finally:
            self._features.discard(context.request_ids)  # the proposer has read the hidden states of all
        for row, reason in checked.faults.items():
            self.stop([context.requests[row]], reason)
        self._drafted = {name for row, name in enumerate(context.request_ids) if row not in checked.faults}
        return checked.proposal if len(rows) == batch else checked.proposal.scatter(rows, batch)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Pass the verdict to the proposer for the requests that it drafted for in this round."""
        rows = [b for b, request in enumerate(context.requests) if request.request_id in self._drafted]
        if not rows:
            return
        verdict = verdict if len(rows) == len(context.requests) else verdict.take(rows)
        context = context.take(rows)
        try:
            if self._nodes:
                verdict = _in_tree(verdict, [self._nodes[request_id] for request_id in context.request_ids])
            self._proposer.commit(context, verdict)
        except Exception as error:
            self.stop(context.requests, error)

    def release(self, request_ids: Sequence[str]) -> None:
        """Drop the state of requests."""
        self._remove(request_ids, self._proposer.release)

    def retire(self, request_ids: Sequence[str]) -> None:
        """Drop the state of finished requests; the proposer may keep their cache for requests with the same prefix."""
        self._remove(request_ids, self._proposer.retire)

    def forget_drafts(self, request: Request) -> None:
        """Give the proposer no verdict on a request's drafts of this round."""
        self._drafted.discard(request.request_id)

    def stop(self, requests: Sequence[Request], reason: str | Exception) -> None:
        """Stop drafting for requests and drop the proposer's state for them."""
        ids = [request.request_id for request in requests]
        for request in requests:
            drafting = self._drafting(request)
            drafting.is_prefilled, drafting.has_failed = False, True
        self._report(ids)
        if isinstance(reason, Exception):
            logger.debug("proposer %r failed", self._proposer.name, exc_info=reason)
            reason = f"{type(reason).__name__}: {reason}"
        logger.warning("no drafts of proposer %r for requests %s: %s", self._proposer.name, ", ".join(ids), reason)
        self._release_caches(ids, self._proposer.release)

    # --- samples of one prompt, hidden states ------------------------------------------------------------------------------

    def keep_prompt_hidden(self, request_id: str) -> None:
        """Keep the hidden states of this request's prompt for requests that will be forked from it."""
        if self._features.layers:
            self._features.keep_prompt(request_id)

    def drop_prompts(self, needed: Iterable[str | None]) -> None:
        """Drop the hidden states of prompts, except those of the requests ``needed``."""
        self._features.drop_prompts(needed)

    def start(self, request: Request) -> int:
        """See ``Proposer.start``; the whole prompt for a request without drafts, whose hidden states are not needed."""
        if request.takes_drafts:
            try:
                return self._proposer.start(request)
            except Exception as error:
                self._stop_at_fault([request], error)
        return len(request.token_ids) - 1

    def fork(self, source_id: str, request: Request) -> bool:
        """Return whether a request can start from another's cached prompt: the hidden states that it needs are available."""
        self._drafting(request).fork_of = source_id
        return not request.takes_drafts or self._features.fork(source_id, request)

    def keep_hidden(self, result: RoundResult) -> None:
        """Keep the hidden states of the tokens that a round committed, until the proposer is called."""
        if not self._features.layers:
            return
        lens = result.proposal.lens.tolist()
        for b, request in enumerate(result.context.requests):
            if not request.takes_drafts:
                self._features.discard([request.request_id])  # the policy may have left it out just now
            elif not self._drafting(request).has_failed:
                num_before = len(request.token_ids) - len(result.token_ids[b])
                self._features.keep(request, num_before, result.scores.hidden, b, lens[b], result.verdict.paths[b])

    # --- inside --------------------------------------------------------------------------------------------------------------

    def _drafting(self, request: Request) -> _Drafting:
        return self._requests[request.request_id]

    def _as_scored(self, checked: Checked, context: Context) -> Checked:
        """Reduce trees to chains unless target and verifiers support trees; keep the indices in the proposer's trees."""
        kept = checked.kept
        if not self._supports_trees:
            chains, paths = checked.proposal.first_paths()
            if kept is not None:
                paths = [[own[at] for at in path] for own, path in zip(kept, paths, strict=True)]
            kept, checked = paths, replace(checked, proposal=chains)
        if kept is not None:
            self._nodes = {request_id: list(own) for request_id, own in zip(context.request_ids, kept, strict=True)}
        return checked

    def _prefill(self, requests: Sequence[Request]) -> None:
        samples = [request for request in requests if self._drafting(request).fork_of in self._requests]
        prompts = [request for request in requests if request not in samples]
        for part in (prompts, samples):  # samples copy the cache of their prompt
            if not part:
                continue
            for request in part:
                source = self._drafting(request).fork_of
                if source is not None and source in self._requests and self._requests[source].is_prefilled:
                    self._proposer.fork(source, request)
            with self._clock.phase("draft_prefill"):
                are_prefilled = self._proposer.prefill(part)
            for request, is_prefilled in zip(part, are_prefilled, strict=True):
                self._drafting(request).is_prefilled = is_prefilled

    def _no_drafts(self, batch: int) -> Proposal:
        if self._empty.lens.shape[0] != batch:
            self._empty = Proposal.empty(batch)
        return self._empty

    def _stop_at_fault(self, requests: Sequence[Request], error: Exception) -> None:
        """Stop drafting for the requests that a ``RequestFault`` names, for all of them after any other error."""
        named = error.request_ids if isinstance(error, RequestFault) else ()
        at_fault = [request for request in requests if request.request_id in named] or requests
        self.stop(at_fault, error)

    def _remove(self, request_ids: Sequence[str], release: Callable[[Sequence[str]], None]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
        self._release_caches(request_ids, release)

    def _release_caches(self, request_ids: Sequence[str], release: Callable[[Sequence[str]], None]) -> None:
        """Drop hidden states and the proposer's cache of requests."""
        self._features.release(request_ids)
        try:
            release(request_ids)
        except Exception as error:
            logger.warning("proposer %r failed to release a request: %s", self._proposer.name, error)


def _in_tree(verdict: Verdict, nodes: Sequence[Sequence[int]]) -> Verdict:
    """Return a verdict with the proposer's indices. ``nodes[b]``: the index of each scored draft in the proposer's tree."""
    return replace(verdict, paths=[[own[node] for node in path] for own, path in zip(nodes, verdict.paths, strict=True)])
