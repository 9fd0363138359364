"""The engine's hand on a proposer: whatever it does wrong costs the drafts of the requests concerned, never their text.

Knows the proposer's interface and no method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.engine.features import FeatureStore
from outrider.engine.guard import Checked, check, pruned
from outrider.engine.scheduler import Entry
from outrider.engine.stats import GenerationStats
from outrider.sampling import InvalidLogits, Sampler
from outrider.sampling.grammar_masks import path_to
from outrider.types import Context, Proposal, Request, Scores, Verdict

if TYPE_CHECKING:
    from outrider.proposers.base import Proposer

logger = logging.getLogger(__name__)

FIRST_PAUSE = 64  # rounds that a request goes without drafts after a fault; each further one doubles it
MAX_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class Drafts:
    """A checked proposal on its way through a round."""

    proposal: Proposal
    token_ids: list[list[int]]
    lens: list[int]
    depths: list[int]  # of each request's longest path: lens, unless it is a tree
    k: int  # drafts asked for
    rows: list[int]  # requests that the proposer drafted for, and is told the verdict of
    seconds: float  # of drafting

    def row(self, b: int) -> Drafts:
        """The same for request b alone."""
        n = self.lens[b]
        alone = self.proposal.take([b]).narrow([n])
        rows = [0] if b in self.rows else []
        return Drafts(alone, [self.token_ids[b]], [n], [self.depths[b]], self.k, rows, self.seconds / len(self.lens))


class GuardedProposer:
    """Asks a proposer for the requests it has not failed for, checks what it says and survives what it raises."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        make_sampler: Callable[[Sequence[Request]], Sampler],
        stats: GenerationStats,
    ) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._make_sampler = make_sampler
        self._stats = stats  # the engine's totals
        self._features = FeatureStore(proposer.needs_hidden)
        self._empty = Proposal.empty(1)
        self._part: tuple[tuple[Request, ...], Sampler] | None = None  # the last batch of which only a part was drafted for

    def propose(self, entries: Sequence[Entry], context: Context, k: int) -> Drafts:
        """At most k drafts for each request that may have some; none for the others."""
        batch = len(entries)
        rows = [b for b, entry in enumerate(entries) if entry.is_speculating or self._recovers(entry)]
        rows = [b for b in rows if context.limits[b] > 0]
        if k <= 0 or not rows:
            return self._none(batch, 0, 0.0)
        start = perf_counter()
        try:
            rows = self._followed(entries, rows)
            if not rows:
                return self._none(batch, 0, perf_counter() - start)
            view = self._view(context, rows)
            if self._features.layers:
                view = self._features.attach(view)
            checked = check(self._proposer.propose(view, k), view.limits, k, self._vocab_size)
            checked = _useful(checked, view)
        except Exception as error:
            self._blame([entries[b] for b in rows], error)
            return self._none(batch, k, perf_counter() - start)
        if self._features.layers:
            self._features.seen(view.request_ids)
        for i, reason in checked.faults.items():
            self._fail([entries[rows[i]]], reason)
        if len(rows) < batch:
            checked = _scattered(checked, rows, batch)
        if checked.faults:
            rows = [b for b in rows if entries[b].is_speculating]
        depths = path_depths(checked.proposal, checked.lens)
        return Drafts(checked.proposal, checked.token_ids, checked.lens, depths, k, rows, perf_counter() - start)

    def commit(self, entries: Sequence[Entry], context: Context, drafts: Drafts, verdict: Verdict) -> None:
        """Tells the proposer what was kept of its drafts; in a round for which it was not asked there is nothing to tell."""
        rows = drafts.rows
        if not rows:
            return
        try:
            view = self._view(context, rows)
            if len(rows) < len(entries):
                verdict = Verdict(verdict.path[rows], verdict.num_accepted[rows], verdict.next_token[rows])
            self._proposer.commit(view, verdict)
        except Exception as error:
            self._fail([entries[b] for b in rows], f"{type(error).__name__}: {error}")

    def keep_features(self, entries: Sequence[Entry], scores: Scores, drafts: Drafts, paths: Sequence[list[int]]) -> None:
        """Remembers the target features that the proposer asked for, until it sees them. ``paths``: accepted drafts."""
        if self._features.layers:
            for b, (entry, path) in enumerate(zip(entries, paths, strict=True)):
                if entry.is_speculating:
                    hidden = {layer: states[b] for layer, states in scores.hidden.items()}
                    self._features.keep(entry.request, hidden, drafts.lens[b], path)

    def share(self, request_id: str) -> None:
        """Announces that other requests will be forked from this one."""
        if self._features.layers:
            self._features.share(request_id)

    def fork(self, source_id: str, new_id: str) -> bool:
        """Whether a request can start from another's prompt as far as the proposer is concerned."""
        return self._features.fork(source_id, new_id)

    def release(self, request_ids: Sequence[str], ended: bool = False) -> None:
        """Lets the proposer forget requests; ``ended``: what it has cached of them is good and may serve others."""
        self._features.release(request_ids)
        try:
            (self._proposer.retire if ended else self._proposer.release)(request_ids)
        except Exception as error:
            logger.warning("the proposer %r failed to release a request: %s", self._proposer.name, error)

    def _followed(self, entries: Sequence[Entry], rows: list[int]) -> list[int]:
        """The rows whose text the proposer has read; of the others it reads a part, samples what their source has not."""
        fresh = [b for b in rows if not entries[b].is_followed]
        if not fresh:
            return rows
        read = {entry.request.request_id for entry in entries if entry.is_followed}
        for b in fresh:
            source = entries[b].fork_of
            if source in read:
                self._proposer.fork(source, entries[b].request)
        for b, is_read in zip(fresh, self._proposer.read([entries[b].request for b in fresh]), strict=True):
            entries[b].is_followed = is_read
        return [b for b in rows if entries[b].is_followed]

    def _recovers(self, entry: Entry) -> bool:
        """Counts a round without drafts, and says whether those that a fault costs are over."""
        entry.pause -= 1
        # Target features of the text so far are gone, so a proposer that needs them waits for the next request.
        if entry.pause > 0 or self._features.layers:
            return False
        entry.is_speculating = True
        return True

    def _none(self, batch: int, k: int, seconds: float) -> Drafts:
        """A round without drafts."""
        if self._empty.lens.shape[0] != batch:
            self._empty = Proposal.empty(batch)
        return Drafts(self._empty, [[]] * batch, [0] * batch, [0] * batch, k, [], seconds)

    def _view(self, context: Context, rows: list[int]) -> Context:
        """The context of some of its requests. All of them: itself."""
        if len(rows) == len(context.requests):
            return context
        requests = tuple([context.requests[b] for b in rows])
        if self._part is None or self._part[0] != requests:
            self._part = requests, self._make_sampler(requests)
        return replace(context, requests=requests, limits=tuple([context.limits[b] for b in rows]), sampler=self._part[1])

    def _blame(self, entries: list[Entry], error: Exception) -> None:
        """Drafting for these requests raised an error: it is theirs, unless it names those that cause it.

        Then the others go without drafts for this round alone: what it brought of features has been read.
        """
        named = error.request_ids if isinstance(error, InvalidLogits) else ()
        at_fault = [entry for entry in entries if entry.request.request_id in named] or entries
        self._features.seen([entry.request.request_id for entry in entries])
        self._fail(at_fault, f"{type(error).__name__}: {error}")

    def _fail(self, entries: list[Entry], reason: str) -> None:
        """Ends speculation for requests, for a while: they go on plain, with nothing lost."""
        for entry in entries:
            entry.is_speculating = entry.is_followed = False
            entry.pause = FIRST_PAUSE << min(entry.stats.faults, MAX_DOUBLINGS)
            entry.stats.faults += 1
            self._stats.faults += 1
        ids = [entry.request.request_id for entry in entries]
        logger.warning("the proposer %r failed, %s go on without drafts: %s", self._proposer.name, ", ".join(ids), reason)
        self.release(ids)


def path_depths(proposal: Proposal, lens: list[int]) -> list[int]:
    """The longest path of each request's drafts."""
    if proposal.parents is None:
        return lens
    longest = []
    for parents, length in zip(proposal.parents.tolist(), lens, strict=True):
        depths: list[int] = []
        for parent in parents[:length]:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        longest.append(max(depths, default=0))
    return longest


def _useful(checked: Checked, context: Context) -> Checked:
    """Without drafts that could not survive: those that break a request's grammar, those behind the end that it has come to,
    and a tree's below the request's own K.

    A point mass that the target never says is rejected without changing what comes next, so leaving it out changes no
    distribution. Drafts with probabilities were drawn by the sampler, which knows the grammar, up to an end of the text.
    """
    proposal, own = checked.proposal, [request.num_draft_tokens for request in context.requests]
    is_tree = proposal.parents is not None
    has_grammar = any([request.matcher is not None for request in context.requests])
    if not has_grammar and (not is_tree or own.count(None) == len(own)):
        return checked
    parents = proposal.parents.tolist() if proposal.parents is not None else None
    kept = []
    for b, request in enumerate(context.requests):
        drafts, tree, most = checked.token_ids[b], None if parents is None else parents[b], own[b]
        nodes: list[int] = []
        depths = {-1: 0}  # of the nodes that are kept
        output = request.token_ids[request.num_prompt_tokens :]
        for node in range(checked.lens[b]):
            parent = node - 1 if tree is None else tree[node]
            if parent not in depths or (is_tree and most is not None and depths[parent] >= most):
                continue
            if has_grammar and request.matcher is not None:
                allowed = request.matcher.allowed(output, path_to(parent, drafts, tree))
                if allowed is None or (not allowed[drafts[node]] and _is_point_mass(proposal, b, node)):
                    continue
            depths[node] = depths[parent] + 1
            nodes.append(node)
        kept.append(nodes)
    return pruned(checked, kept)


def _is_point_mass(proposal: Proposal, b: int, node: int) -> bool:
    """Whether nothing else could have been drafted: where others of the batch have probabilities, it has all of its own."""
    return proposal.probs is None or float(proposal.probs[b, node, proposal.token_ids[b, node]]) == 1.0


def _scattered(checked: Checked, rows: list[int], batch: int) -> Checked:
    """A proposal for some rows as one for the whole batch, the other rows without drafts."""
    proposal = checked.proposal.scatter(rows, batch)
    token_ids: list[list[int]] = [[] for _ in range(batch)]
    lens = [0] * batch
    for i, b in enumerate(rows):
        token_ids[b], lens[b] = checked.token_ids[i], checked.lens[i]
    return Checked(proposal, token_ids, lens, checked.faults)
