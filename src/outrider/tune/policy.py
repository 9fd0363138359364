"""The adaptive draft-length policy. It decides when each request's K is chosen again (by ``choice.py``), and updates its
estimates after each round.

The policy uses acceptance counts and times, and is independent of methods. A new method is assumed to be good, so that the
first rounds try it and its value is soon known. Three rules keep this from being slower than plain decoding: K = 0 is a
candidate like any other; if drafting does not pay, it is tried again only after a pause that doubles; and time lost by drafting
is taken from an exploration budget, to which a small share of all time is added (``probes.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf

from outrider.runner.cost_book import CostBook, MethodCosts
from outrider.tune.acceptance import Acceptance
from outrider.tune.choice import Choice, best_common_k, candidate_lengths, choose
from outrider.tune.probes import Budget, Probes
from outrider.tune.track import DECAY, IDLE_DECAY, Track, TrackedBatch
from outrider.types import Context, DraftPrices, Request, Round

DECISION_PERIOD = 6  # rounds between decisions
EARLY_ROUNDS = 16  # initial drafted rounds with a decision each
# In the first drafted rounds, which are slower than later ones, drafting stops only if even optimistic costs cannot pay, or if
# the budget is spent.
TRIAL_ROUNDS = 12
SHARED_DECAY = 0.99  # decay of the counts that new requests start with
FIRST_LONGEST = 1  # initial longest draft
MAX_TEMPERATURE = 2.0  # higher temperatures share its counts, which bounds the number of counts

MUCH_SAVED = 64  # tokens of a cached prefix for which a request may be left out of drafting; fewer cost little to process again
MAX_LEFT_OUT = 64  # such requests in a row

PLAIN_CHECK_PERIOD = 48  # drafted rounds until a plain round is measured, if drafting gains at most THIN_GAIN
THIN_GAIN = 1.3


class DraftLengthPolicy:
    """The adaptive policy: maximises tokens per second of the batch."""

    _batch: TrackedBatch  # of the last round

    def __init__(self, max_k: int, costs: CostBook, num_nodes: Callable[[int], int] = int) -> None:
        """``num_nodes``: drafts in a proposal with paths of length k; k for chains."""
        self.max_k, self._num_nodes = max_k, num_nodes
        self._costs: dict[bool, MethodCosts] = {is_greedy: MethodCosts(costs, is_greedy) for is_greedy in (True, False)}
        self._tracks: dict[str, Track] = {}
        # By temperature, the strongest influence on acceptance.
        self._shared: dict[float, Acceptance] = defaultdict(lambda: Acceptance.empty(max_k))
        self._longest_so_far = FIRST_LONGEST  # longest draft so far
        self._budget = Budget()
        self._probes = Probes(max_k, self._budget)
        self._requests: tuple[Request, ...] = ()
        self._num_left_out, self._most_left_out = 0, 1  # new requests left out in a row, and how many before one is let in
        self._choice = Choice([])
        self._rounds_since_decision = 0
        self._num_drafted = 0
        self._num_unchecked = 0  # drafted rounds since the last one without drafts
        self._is_trial = True
        self._prefill_seconds = 0.0  # of the proposer, in rounds since it was last found to catch up
        # This round:
        self._num_before: list[int] = []  # committed tokens per request before it
        self._is_plain = True  # no drafts were requested, except by requests with their own K
        self._is_probe = False

    @property
    def _k(self) -> int:
        """Return the largest chosen K."""
        return max(self._choice.lens, default=0)

    @property
    def prices(self) -> DraftPrices | None:
        """Return the prices of further drafts; None if requests have their own K."""
        return None if self._has_own_k else self._choice.prices

    @property
    def _has_own_k(self) -> bool:
        return any([request.num_draft_tokens is not None for request in self._requests])

    def start(self, request: Request, batch: int, num_draft_cached: int, num_recomputed: int) -> bool:
        """See ``LengthPolicy``. Where drafts would not pay, 1, 2, 4, ... requests with a long prefix in a row are left out."""
        self._track(request).num_seen = num_draft_cached
        if num_recomputed < MUCH_SAVED:
            return True
        if self._pays(request, batch):
            self._num_left_out, self._most_left_out = 0, 1
        elif self._num_left_out == self._most_left_out:  # let one in, in case acceptance has changed
            self._num_left_out, self._most_left_out = 0, min(2 * self._most_left_out, MAX_LEFT_OUT)
        else:
            self._num_left_out += 1
        return self._num_left_out == 0

    def _pays(self, request: Request, batch: int) -> bool:
        """Return whether drafts for a batch of requests like this one are expected to pay; True while costs are unknown."""
        costs = self._costs[request.params.is_greedy].round_costs(batch, len(request.token_ids))
        if costs is None:
            return True
        lengths = candidate_lengths(self._longest_so_far, self.max_k)
        gains = self._track(request).gains(lengths[-1], lengths[-1])
        speed, _ = best_common_k(gains, batch, costs, self._num_nodes, lengths)
        return speed > batch / costs.plain

    # --- the lengths of a round ---------------------------------------------------------------------------------------------

    def next_lengths(self, context: Context) -> list[int]:
        """Return the drafts to request in this round, per request."""
        self._is_probe = False
        k = self._next_k(context)
        self._num_before = [len(request.token_ids) for request in context.requests]
        self._is_plain = k == 0
        if k == 0 or self._is_probe:
            return self._batch.zero_left_out([k] * len(context.requests))
        return self._choice.lens

    def _next_k(self, context: Context) -> int:
        """Return the maximum number of drafts to request, and set whether this round is a probe."""
        if context.requests is not self._requests:
            self._switch_batch(context)
        else:
            self._batch.context = context
            if self._probes.wait > 0:
                return 0
            is_due = self._rounds_since_decision >= DECISION_PERIOD or self._num_drafted < EARLY_ROUNDS
            if self._batch.plain is None or (self._k and is_due):
                self._decide(self._choice.lens)
        self._rounds_since_decision += 1
        if self._batch.plain is None:
            return 0
        if self._k == 0:
            k = self._probes.start(self._batch)
            self._is_probe = k > 0
            return k
        if self._budget.left < 0:
            self._probes.pause()
            return 0
        if self._num_unchecked >= PLAIN_CHECK_PERIOD and self._choice.speedup < THIN_GAIN:
            return 0
        return self._k

    def _switch_batch(self, context: Context) -> None:
        """Switch to another batch. New requests start with the largest chosen K."""
        chosen = dict(zip([request.request_id for request in self._requests], self._choice.lens, strict=False))
        before = [chosen.get(request.request_id, self._k) for request in context.requests]
        self._requests = context.requests
        tracks = [self._track(request) for request in context.requests]
        costs = self._costs[all([request.params.is_greedy for request in context.requests])]
        batch = self._batch = TrackedBatch(context, tracks, costs, self._num_nodes)
        fresh = [b for b, request in enumerate(context.requests) if request.request_id not in chosen]
        if fresh:
            self._probes.hasten(batch)
        self._decide(batch.zero_left_out(before))
        if self._k == 0 and batch.plain is not None:
            self._probes.leave_out(batch, fresh)

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request.request_id)
        if track is None:
            shared = self._shared[round(min(request.params.temperature, MAX_TEMPERATURE), 1)]
            track = self._tracks[request.request_id] = Track(shared, Acceptance.empty(self.max_k))
        return track

    def _decide(self, before: list[int]) -> None:
        """Choose the lengths again, which were ``before``."""
        batch, was_drafting = self._batch, self._k > 0
        self._rounds_since_decision = 0
        # A grammar's drafts do not depend on K, so only the rows that they add matter.
        rates, bare = [track.grammar_rate for track in batch.tracks], batch.round_costs()
        costs = batch.round_costs(rates) if any(rates) else bare
        batch.plain = None if bare is None else bare.plain
        if costs is None:
            self._choice = Choice([0] * len(before))
            return
        self._is_trial &= self._num_drafted < TRIAL_ROUNDS and self._budget.left >= 1
        lengths = candidate_lengths(self._longest_so_far, self.max_k)
        self._choice = choose(batch, costs, before, lengths, is_optimistic=self._is_trial and not batch.has_grammars)
        if self._k:
            self._probes.wait = 0
        elif was_drafting:
            self._probes.pause()

    # --- learning -----------------------------------------------------------------------------------------------------------

    def observe(self, context: Context, round_: Round) -> None:
        """Learn from a round: acceptance, cost, and gained or lost time."""
        batch, times = self._batch, round_.times
        num_grammar = self._learn_grammar(round_) if batch.has_grammars else [0] * len(batch.tracks)
        self._prefill_seconds += times.draft_prefill
        if round_.k == 0 or self._is_plain:
            if not round_.is_prefill and not round_.is_cold:
                self._num_unchecked = 0
            self._probes.wait -= 1
            if batch.plain is not None:
                self._budget.add(0.0, (times.total - times.draft_prefill) / batch.plain)
        if round_.k:
            # A request that got only a grammar's drafts may not have been offered to the proposer.
            rows = zip(context.limits, round_.proposed_depths, num_grammar, strict=True)
            drafted_for = [b for b, (limit, depth, others) in enumerate(rows) if limit > 0 and (depth or not others)]
            if drafted_for:
                self._observe_drafts(drafted_for, context, round_)

    def _observe_drafts(self, drafted_for: Sequence[int], context: Context, round_: Round) -> None:
        """Learn from a round that drafted for these requests."""
        batch, times, k = self._batch, round_.times, round_.most_proposed or round_.k
        costs, plain, num_drafting = batch.costs, batch.plain, len(drafted_for)
        # Committed tokens before the round that the proposer had not been asked about.
        num_unseen = sum([self._num_before[b] - batch.tracks[b].num_seen for b in drafted_for])
        catch_up = 0.0
        if num_unseen > 0:
            step = costs.draft(k, num_drafting, plain or 0.0)
            catch_up = costs.record_catch_up(self._prefill_seconds + times.draft - step, num_unseen, plain or 0.0)
            self._prefill_seconds = 0.0
        if not round_.is_prefill:
            if round_.most_proposed:
                costs.record_drafted_round(len(round_.depths), times.overhead, round_.first_layer, plain or inf)
            if num_unseen <= 0:  # otherwise the time includes catching up
                costs.record_drafts(k, num_drafting, times.draft, plain or inf)
        self._learn(drafted_for, context, round_)
        if not self._has_own_k:  # rounds of requests with their own K do not depend on decisions
            self._budget.charge(round_, batch, num_drafting, catch_up if self._is_probe else 0.0)
        if self._is_probe:
            outcomes = zip(self._requests, round_.depths, round_.num_accepted, strict=True)
            made = [(drafts, accepted) for request, drafts, accepted in outcomes if drafts and request.num_draft_tokens is None]
            if made:
                self._decide(self._choice.lens)
            self._probes.judge(batch, made, pays=self._k > 0)

    def release(self, request_ids: Sequence[str]) -> None:
        """Remove requests that ended; shared estimates stay."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)
        if self._requests and not self._tracks:  # the next round would drop them, but may be far off
            self._requests = ()
            del self._batch

    def _learn(self, drafted_for: Sequence[int], context: Context, round_: Round) -> None:
        """Count the drafts that these requests got, and the accepted ones; the counts of other requests fade."""
        self._num_drafted += 1
        self._num_unchecked += 1
        self._longest_so_far = max(self._longest_so_far, round_.most_proposed)
        for track, limit in zip(self._batch.tracks, context.limits, strict=True):
            if limit <= 0:  # it got no drafts, and will be tried again when its counts weigh less than the shared ones
                track.own.fade(IDLE_DECAY)
        for b in drafted_for:
            track = self._batch.tracks[b]
            track.num_seen = len(self._requests[b].token_ids)
            num_drafts, num_accepted = round_.depths[b], round_.num_accepted[b]
            track.add_proposed(round_.proposed_depths[b], num_drafts)
            if round_.proposed_depths[b] and not num_drafts:  # all forced: they say nothing of its other drafts
                continue
            if num_drafts:
                track.shared.learn_alike(track.own, num_accepted > 0)
                track.own.fade(DECAY)
                track.shared.fade(SHARED_DECAY)
            # How long the proposer's drafts are is not known where a grammar forces some of them.
            beside_grammar = round_.num_grammar is not None and round_.num_grammar[b] > 0
            num_requested = max(num_drafts, 1) if beside_grammar else min(round_.k, context.limits[b])
            track.own.add(num_requested, num_drafts, num_accepted)
            track.shared.add(num_requested, num_drafts, num_accepted)

    def _learn_grammar(self, round_: Round) -> list[int]:
        """Learn how many rows a grammar's drafts take. Return those of this round, per request."""
        batch, num_grammar = self._batch, round_.num_grammar or [0] * len(round_.depths)
        for track, count, num_accepted in zip(batch.tracks, num_grammar, round_.num_accepted, strict=True):
            track.add_grammar(count, num_accepted + 1)
        if any(num_grammar) and not any(round_.depths) and not round_.is_prefill:  # perhaps no round is without them
            batch.costs.record_drafted_round(len(num_grammar), round_.times.overhead, None, batch.plain or inf)
        return num_grammar
