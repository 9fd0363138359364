"""When drafts are tried again after they did not pay, and how much time they may lose against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from outrider.tune.choice import best_common_k
from outrider.tune.track import TrackedBatch, rows_by_depth
from outrider.types import Round

NEW_REQUEST_WAIT = 4  # limit of the wait for a probe, times the batch size, when a request joins
MAX_NEW_REQUEST_FACTOR = 16  # maximum factor of it, after unsuccessful probes
PROBE_RATE = 0.8  # acceptance assumed for the length of a probe, at most MAX_PROBE
MAX_PROBE = 4
FIRST_PAUSE, MAX_PAUSE = 8, 256  # rounds without drafts before a probe: at first, and at most
FAR_BEHIND = 512  # tokens that the proposer has not processed, above which a request may be left out

EXPLORATION_SHARE = 0.02  # share of all time that may be lost
FIRST_BUDGET, MAX_BUDGET = 4.0, 6.0  # in plain rounds: initial, and maximum unless a more expensive probe is pending


class Budget:
    """Time that drafts may lose against plain decoding, in plain rounds."""

    def __init__(self) -> None:
        self.left = FIRST_BUDGET
        self.most = MAX_BUDGET  # raised to the loss of a pending probe

    def add(self, won: float, spent: float) -> None:
        """Add the time that a round won against plain decoding, and the share of its time that may be lost; in plain rounds."""
        self.left = min(self.left + won + EXPLORATION_SHARE * spent, self.most)

    def charge(self, round_: Round, batch: TrackedBatch, num_drafting: int, catch_up: float) -> None:
        """Take the time that a round lost against plain decoding, or add the time that it won.

        Typical times are used, so that an outlier does not count against drafting. A probe also pays for ``catch_up``, the
        proposer's seconds for tokens that it had not processed. If drafting was decided on, these pay for all later rounds and
        are not counted.
        """
        if batch.plain is None:
            return
        costs, cache_len = batch.costs, batch.context.cache_len
        seconds = costs.round(round_.k, round_.lens, round_.most_proposed, num_drafting, cache_len)
        if not round_.is_prefill:
            seconds = min(round_.times.total, seconds)
        if round_.num_grammar is not None:  # these rows would also be scored without drafts
            seconds -= costs.widening(round_.num_grammar, cache_len)
        won = sum(round_.num_accepted) / len(round_.lens) - ((seconds + catch_up) / batch.plain - 1)
        self.add(won, round_.times.total / batch.plain + won)


class Probes:
    """Rounds with a few drafts after a pause, in case the text became predictable. The pause doubles after each failed one."""

    def __init__(self, max_k: int, budget: Budget) -> None:
        self._max_k, self._budget = max_k, budget
        self.wait = 0  # plain rounds before the next probe
        self._pause = FIRST_PAUSE
        self._last_loss = 1.0  # plain rounds that the last probe could lose; the next pause is proportional to it
        self._new_request_factor = 1  # factor of a new request's wait, doubled by each unsuccessful probe

    def pause(self) -> None:
        """Stop drafting until the next probe."""
        self.wait = self._pause

    def hasten(self, batch: TrackedBatch) -> None:
        """Shorten the wait for a new request, whose text may differ; less so in a large batch, where it matters less."""
        self.wait = min(self.wait, int(len(batch.tracks) * NEW_REQUEST_WAIT * self._new_request_factor * self._last_loss))

    def start(self, batch: TrackedBatch) -> int:
        """Return the K of a probe in this round; 0 if none is due, possible or affordable."""
        if self.wait > 0:
            return 0
        k, loss = self._plan(batch)
        while loss > self._budget.most and _give_up(batch):
            k, loss = self._plan(batch)
        if k == 0:
            return 0
        if loss > self._budget.left:
            self.wait = 1 + int((loss - self._budget.left) / EXPLORATION_SHARE)
            return 0
        self._last_loss, self._budget.most = max(1.0, loss), MAX_BUDGET
        return k

    def _plan(self, batch: TrackedBatch) -> tuple[int, float]:
        """Return the K of a probe and the plain rounds that it loses if its drafts are rejected; K = 0 if none is possible."""
        rows = [b for b, request in enumerate(batch.requests) if request.may_draft]
        costs = batch.round_costs() if rows else None
        if costs is None:  # costs were reset since the last decision: measure a plain round first
            return 0, 0.0
        size, lengths = len(batch.tracks), range(1, min(MAX_PROBE, self._max_k) + 1)
        _, k = best_common_k([PROBE_RATE**depth for depth in lengths], size, costs, batch.num_nodes, lengths)
        lens = batch.zero_left_out([sum(rows_by_depth(batch.num_nodes, k))] * size)
        seconds = batch.costs.round(k, lens, k, len(rows), batch.context.cache_len)
        seconds += batch.costs.catch_up(sum([batch.num_unseen(b) for b in rows]))
        return k, seconds / costs.plain - 1

    def judge(self, batch: TrackedBatch, outcomes: Sequence[tuple[int, int]], pays: bool) -> None:
        """Double the pause after a failed probe; after a successful one, go on until estimates change or the budget is spent.

        ``outcomes``: drafts and accepted ones of each request that had any. ``pays``: drafting was decided on after the probe.
        """
        if not outcomes:  # nothing was learned
            self.pause()
        elif pays:
            self._pause, self._new_request_factor = FIRST_PAUSE, 1
        elif all([drafts == accepted for drafts, accepted in outcomes]):
            self.wait = 0
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self.wait = int(min(self._pause * self._last_loss, self._longest_wait(batch)))
            self._new_request_factor = min(2 * self._new_request_factor, MAX_NEW_REQUEST_FACTOR)

    def _longest_wait(self, batch: TrackedBatch) -> float:
        """Return the pause after which a probe costs half of the largest budget: the proposer must process the tokens of all
        rounds of the pause first. Infinite if this cost grows faster than the budget, or the requests end before.
        """
        growth = batch.costs.catch_up(sum([request.may_draft for request in batch.requests])) / (batch.plain or 1.0)
        _, loss = self._plan(batch)
        wait = max(MAX_BUDGET - loss, 0.0) / growth // 2 if 0 < growth < EXPLORATION_SHARE else inf
        return wait if wait < max(batch.context.limits) else inf

    def leave_out(self, batch: TrackedBatch, rows: Sequence[int]) -> None:
        """Stop drafting for new requests in which no probe can be both due and affordable; their hidden states are not kept.

        If only the budget is too small, let it grow until a later request can afford a probe.
        """
        waiting = [(batch.requests[b], batch.context.limits[b]) for b in rows if batch.requests[b].follows_policy]
        for request, _ in waiting:
            request.may_draft = False
        for request, limit in waiting:
            if self.wait <= limit:
                request.may_draft = True
                _, loss = self._plan(batch)
                request.may_draft = loss <= min(self._budget.left + EXPLORATION_SHARE * limit, self._budget.most)
                if not request.may_draft and loss < limit:
                    self._budget.most = max(loss, MAX_BUDGET)


def _give_up(batch: TrackedBatch) -> bool:
    """Leave half of the requests in which the proposer is far behind out for good. Return whether there are any.

    No budget pays for processing all their tokens, and hidden states kept for that would grow without limit.
    """
    rows = [b for b, request in enumerate(batch.requests) if request.follows_policy and batch.num_unseen(b) > FAR_BEHIND]
    rows.sort(key=batch.num_unseen)
    for b in rows[len(rows) // 2 :]:
        batch.requests[b].may_draft = False
    return bool(rows)
