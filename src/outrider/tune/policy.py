"""Choose the number of drafts per request in each round: the K, including 0, with the highest expected tokens per second of the
batch, the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066), from costs and acceptance measured while it runs.

The policy uses acceptance counts and times, and is independent of methods. A new method is assumed to be good, so that the
first rounds try it and its value is soon known. Three rules keep this from being slower than plain decoding: K = 0 is a
candidate like any other; if drafting does not pay, it is tried again only after a pause that doubles; and time lost by drafting
is taken from an exploration budget, to which a small share of all time is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from operator import mul

from outrider.runner.cost_book import CostBook, MethodCosts, RoundCosts
from outrider.tune.acceptance import OPTIMISTIC_RATE, Acceptance
from outrider.tune.sharing import Allocation
from outrider.tune.track import DECAY, FIRST_PAUSE, Track
from outrider.types import Context, DraftPrices, Request, Round

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 23)  # candidate lengths, in addition to the maximum
CAPS = (1, 2, 4, 8, 16)  # candidate maximum K if each request has its own
DECISION_PERIOD = 6  # rounds between decisions
EARLY_ROUNDS = 16  # initial drafted rounds with a decision each
# In the first drafted rounds, which are slower than later ones, drafting stops only if even optimistic costs cannot pay, or if
# the budget is spent.
TRIAL_ROUNDS = 12
HYSTERESIS = 1.02  # predicted gain required to change K, and for a K per request: with few observations both may be chance
ALIKE = 0.1  # requests get one K if their expected gains differ by less than this share
SHARED_DECAY = 0.99  # decay of the counts that new requests start with
FIRST_LONGEST = 1  # initial longest draft; candidates go up to 2 * longest + 1
MAX_TEMPERATURE = 2.0  # higher temperatures share its counts, which bounds the number of counts
PREFILL_HORIZON = 64  # tokens over which a proposer's prefill must pay off

MAX_PAUSE = 256  # rounds without drafts before the next probe
NEW_REQUEST_WAIT = 4  # limit of the wait for a probe, times the batch size, when a request joins
MAX_NEW_REQUEST_FACTOR = 16  # maximum factor of it, after unsuccessful probes
PROBE_RATE = 0.8  # acceptance assumed for the length of a probe, at most MAX_PROBE
MAX_PROBE = 4

FAR_BEHIND = 512  # tokens that the proposer has not processed, above which a request may be left out
MUCH_SAVED = 64  # tokens of a cached prefix for which a request may be left out of drafting; fewer cost little to process again
MAX_LEFT_OUT = 64  # such requests in a row

EXPLORATION_SHARE = 0.02  # share of all time that may be lost
FIRST_BUDGET, MAX_BUDGET = 4.0, 6.0  # in plain rounds: initial, and maximum unless a probe is saved for

PLAIN_CHECK_PERIOD = 48  # drafted rounds until a plain round is measured, if drafting gains at most THIN_GAIN
THIN_GAIN = 1.3


class DraftLengthPolicy:
    """The adaptive policy: maximises tokens per second of the batch."""

    def __init__(self, max_k: int, costs: CostBook, num_nodes: Callable[[int], int] = int) -> None:
        """``num_nodes``: drafts in a proposal with paths of length k; k for chains."""
        self.max_k, self._num_nodes = max_k, num_nodes
        self._costs: dict[bool, MethodCosts] = {is_greedy: costs.of_method(is_greedy) for is_greedy in (True, False)}
        self.costs = self._costs[True]
        self._lengths = [k for k in LENGTHS if k < max_k] + [max_k]
        self._tracks: dict[str, Track] = {}
        self._shared: dict[float, Acceptance] = {}  # by temperature, the strongest influence on acceptance
        self._budget = FIRST_BUDGET
        self._most_budget = MAX_BUDGET  # raised to the loss of a probe that is being saved for
        self._longest_so_far = FIRST_LONGEST  # longest draft so far
        self._requests: tuple[Request, ...] = ()
        self._batch: list[Track] = []
        self._has_grammars = False
        self._num_left_out, self._most_left_out = 0, 1  # new requests left out in a row, and how many before one is let in
        self._lens: list[int] = []  # decided lengths
        self._num_before: list[int] = []  # committed tokens per request before the round
        self._tried: int | None = None  # request that gets a single trial draft in this round, although its decided K is 0
        self._expected_speedup = 1.0  # expected speed of the decided lengths / that of plain decoding
        self._draft_prices: DraftPrices | None = None
        self._plain: float | None = None  # seconds of a plain round
        self._rounds_since_decision = 0
        self._wait, self._pause = 0, FIRST_PAUSE
        self._last_probe_loss = 1.0  # plain rounds that the last probe could lose; the next pause is proportional to it
        self._new_request_factor = 1  # factor of a new request's wait, doubled by each unsuccessful probe
        self._is_plain = True  # no drafts were requested in this round, except by requests with their own K
        self._is_probe = False
        self._num_drafted = 0
        self._is_trial = True
        self._num_unchecked = 0  # drafted rounds since the last one without drafts
        self._prefill_seconds = 0.0  # of the proposer, in rounds since it was last found to catch up

    @property
    def _k(self) -> int:
        """Return the largest decided K."""
        return max(self._lens, default=0)

    @property
    def prices(self) -> DraftPrices | None:
        """Return the prices of further drafts; None if requests have their own K."""
        return None if self._has_own_k else self._draft_prices

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

    def next_lengths(self, context: Context) -> list[int]:
        """Return the drafts to request in this round, per request."""
        k, self._tried = self._next_k(context), None
        self._num_before = [len(request.token_ids) for request in context.requests]
        self._is_plain = k == 0
        if k == 0 or self._is_probe:
            return self._zero_left_out([k] * len(self._batch))
        return self._with_trial()

    def _next_k(self, context: Context) -> int:
        """Return the maximum number of drafts to request, and set whether this round is a probe."""
        self._is_probe = False
        if context.requests is not self._requests:
            self._switch_batch(context)
        elif self._wait > 0:
            return 0
        elif self._plain is None or (
            self._k and (self._rounds_since_decision >= DECISION_PERIOD or self._num_drafted < EARLY_ROUNDS)
        ):
            self._decide(context, self._lens)
        self._rounds_since_decision += 1
        if self._plain is None:
            return 0
        if self._k == 0:
            return self._probe(context) if self._wait <= 0 else 0
        if self._budget < 0:
            self._wait = self._pause
            return 0
        if self._num_unchecked >= PLAIN_CHECK_PERIOD and self._expected_speedup < THIN_GAIN:
            return 0
        return self._k

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        """Learn from a round: acceptance, cost, and gained or lost time."""
        times = round_.times
        num_grammar = self._learn_grammar(round_, is_prefill) if self._has_grammars else [0] * len(self._batch)
        self._prefill_seconds += times.draft_prefill
        if round_.k == 0 or self._is_plain:
            if not is_prefill and not round_.is_cold and not any(num_grammar):
                self._num_unchecked = 0
            self._wait -= 1
            if self._plain is not None:
                self._add_to_budget(0.0, (times.total - times.draft_prefill) / self._plain)
        if round_.k:
            # A request that got only a grammar's drafts may not have been offered to the proposer.
            rows = zip(context.limits, round_.proposed_depths, num_grammar, strict=True)
            drafted_for = [b for b, (limit, depth, others) in enumerate(rows) if limit > 0 and (depth or not others)]
            if drafted_for:
                self._observe_drafts(drafted_for, context, round_, is_prefill)

    def _observe_drafts(self, drafted_for: Sequence[int], context: Context, round_: Round, is_prefill: bool) -> None:
        """Learn from a round that drafted for these requests."""
        times, batch, longest = round_.times, len(round_.depths), max(round_.proposed_depths)
        # Committed tokens before the round that the proposer had not been asked about.
        num_unseen = sum([self._num_before[b] - self._batch[b].num_seen for b in drafted_for])
        catch_up, plain, num_drafting = 0.0, self._plain or 0.0, max(1, len(drafted_for))
        if num_unseen > 0:
            step = self.costs.draft(longest or round_.k, num_drafting, plain)
            catch_up = self.costs.record_catch_up(self._prefill_seconds + times.draft - step, num_unseen, plain)
            self._prefill_seconds = 0.0
        if not is_prefill:
            if longest:
                self.costs.record_drafted_round(batch, times.overhead, round_.first_layer, plain or inf)
            if num_unseen <= 0:  # otherwise the time includes catching up
                self.costs.record_drafts(longest or round_.k, num_drafting, times.draft, plain or inf)
        self._learn(drafted_for, context, round_)
        self._charge_budget(round_, num_drafting, catch_up if self._is_probe else 0.0, is_prefill)
        if self._is_probe:
            self._judge_probe(round_, context)

    def release(self, request_ids: Sequence[str]) -> None:
        """Remove requests that ended; shared estimates stay."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)

    # --- learning -----------------------------------------------------------------------------------------------------------

    def _switch_batch(self, context: Context) -> None:
        """Switch to another batch. New requests start with the largest decided K."""
        decided = dict(zip([request.request_id for request in self._requests], self._lens, strict=False))
        before = [decided.get(request.request_id, self._k) for request in context.requests]
        self._requests = context.requests
        self._batch = [self._track(request) for request in context.requests]
        fresh = [b for b, track in enumerate(self._batch) if track.is_new]
        for b in fresh:
            self._batch[b].is_new = False
        if fresh:
            batch = len(context.requests)  # a new request matters less in a large batch
            self._wait = min(self._wait, int(batch * NEW_REQUEST_WAIT * self._new_request_factor * self._last_probe_loss))
        self._has_grammars = any([request.matcher is not None for request in context.requests])
        self.costs = self._costs[all([request.params.is_greedy for request in context.requests])]
        self._decide(context, self._zero_left_out(before))
        if self._k == 0 and self._plain is not None:
            self._leave_out(fresh, context)

    def _leave_out(self, rows: Sequence[int], context: Context) -> None:
        """Stop drafting for new requests in which no probe can be both due and affordable; their hidden states are not kept.

        If only the budget is too small, let it grow until a later request can afford a probe.
        """
        requests = self._requests
        waiting = [b for b in rows if requests[b].follows_policy]
        for b in waiting:
            requests[b].may_draft = False
        for b in waiting:
            limit = context.limits[b]
            if self._wait <= limit:
                requests[b].may_draft = True
                _, loss = self._probe_plan(context)
                requests[b].may_draft = loss <= min(self._budget + EXPLORATION_SHARE * limit, self._most_budget)
                if not requests[b].may_draft and loss < limit:
                    self._most_budget = max(loss, MAX_BUDGET)

    def _zero_left_out(self, lens: Sequence[int]) -> list[int]:
        """Return the lengths with 0 for requests that take no part in drafting."""
        return [k if request.may_draft else 0 for k, request in zip(lens, self._requests, strict=True)]

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request.request_id)
        if track is None:
            temperature = round(min(request.params.temperature, MAX_TEMPERATURE), 1)
            shared = self._shared.get(temperature)
            if shared is None:
                nearest = min(self._shared, key=lambda other: abs(other - temperature), default=None)
                shared = Acceptance.empty(self.max_k) if nearest is None else self._shared[nearest].as_prior()
                self._shared[temperature] = shared
            track = self._tracks[request.request_id] = Track(shared, Acceptance.empty(self.max_k))
        return track

    def _num_unseen(self, b: int) -> int:
        """Return a request's committed tokens since the last call of the proposer."""
        return len(self._requests[b].token_ids) - self._batch[b].num_seen

    def _with_trial(self) -> list[int]:
        """Return the decided lengths, with a trial draft for one request without drafts whose ``rest`` is over."""
        lens = self._lens
        for b, track in enumerate(self._batch):
            if self._lens[b] == 0 and self._requests[b].follows_policy:
                track.rest -= 1
                if track.rest <= 0 and self._tried is None:
                    self._tried, lens = b, lens.copy()
                    lens[b] = 1
        return lens

    def _judge_trial(self, round_: Round) -> None:
        """Double the rest after a rejected draft; decide again after an accepted one."""
        if self._tried is None:
            return
        track = self._batch[self._tried]
        if round_.num_accepted[self._tried]:
            track.pause, self._rounds_since_decision = FIRST_PAUSE, DECISION_PERIOD
        elif round_.depths[self._tried]:
            track.pause = min(2 * track.pause, MAX_PAUSE)
        track.rest = track.pause

    def _learn_grammar(self, round_: Round, is_prefill: bool) -> list[int]:
        """Learn how many rows a grammar's drafts take. Return those of this round, per request."""
        num_grammar = round_.num_grammar or [0] * len(round_.depths)
        for track, count, num_accepted in zip(self._batch, num_grammar, round_.num_accepted, strict=True):
            track.add_grammar(count, num_accepted + 1)
        if any(num_grammar) and not any(round_.depths) and not is_prefill:  # perhaps no round is without them
            self.costs.record_drafted_round(len(num_grammar), round_.times.overhead, None, self._plain or inf)
        return num_grammar

    def _learn(self, drafted_for: Sequence[int], context: Context, round_: Round) -> None:
        self._num_drafted += 1
        self._num_unchecked += 1
        self._longest_so_far = max(self._longest_so_far, *round_.proposed_depths)
        for b in drafted_for:
            track = self._batch[b]
            track.num_seen = len(self._requests[b].token_ids)
            num_drafts, num_accepted = round_.depths[b], round_.num_accepted[b]
            track.add_own(round_.proposed_depths[b], num_drafts)
            if round_.proposed_depths[b] and not num_drafts:  # all forced: they say nothing of its other drafts
                continue
            if num_drafts:
                track.shared.compare(track.own, num_accepted > 0)
                track.own.fade(DECAY)
                track.shared.fade(SHARED_DECAY)
            # How long the proposer's drafts are is not known where a grammar forces some of them.
            beside_grammar = round_.num_grammar is not None and round_.num_grammar[b] > 0
            num_requested = max(num_drafts, 1) if beside_grammar else min(round_.k, context.limits[b])
            track.own.add(num_requested, num_drafts, num_accepted)
            track.shared.add(num_requested, num_drafts, num_accepted)
        self._judge_trial(round_)

    def _charge_budget(self, round_: Round, num_drafting: int, catch_up: float, is_prefill: bool) -> None:
        """Take the time that the round lost against plain decoding from the budget, or add the time that it won.

        Typical times are used, so that an outlier does not count against drafting. A probe also pays for the proposer's
        catching up. If drafting was decided on, catching up pays for all later rounds and is not counted.
        """
        plain, batch = self._plain, len(round_.depths)
        # Rounds of requests with their own K do not depend on decisions.
        if plain is None or self._has_own_k:
            return
        cache_len = len(self._requests[0].token_ids)
        seconds = self.costs.round(round_.k, round_.lens, max(round_.proposed_depths), num_drafting, cache_len)
        if not is_prefill:
            seconds = min(round_.times.total, seconds)
        if round_.num_grammar is not None:  # these rows would also be scored without drafts
            seconds -= self.costs.widening(round_.num_grammar, cache_len)
        won = sum(round_.num_accepted) / batch - ((seconds + catch_up) / plain - 1)
        self._add_to_budget(won, round_.times.total / plain + won)

    def _add_to_budget(self, won: float, spent: float) -> None:
        """Add the time that a round won against plain decoding, and the share of its time that may be lost; in plain rounds."""
        self._budget = min(self._budget + won + EXPLORATION_SHARE * spent, self._most_budget)

    # --- decisions ----------------------------------------------------------------------------------------------------------

    def _decide(self, context: Context, before: list[int]) -> None:
        """Decide the lengths again. The lengths ``before`` are kept unless others promise more."""
        batch = len(self._batch)
        self._rounds_since_decision = 0
        # A grammar's drafts do not depend on K, so only the rows that they add matter.
        rates = [track.grammar_rate for track in self._batch]
        bare, costs = self._round_costs(context), self._round_costs(context, rates)
        self._plain = None if bare is None else bare.plain
        if bare is None or costs is None:
            self._lens = [0] * batch
            return
        longest, lengths = self._candidates()
        expected, gains, made, catch_up = [OPTIMISTIC_RATE] * longest, [], [], []
        for b, (track, request) in enumerate(zip(self._batch, self._requests, strict=True)):
            own, limit = request.num_draft_tokens if request.may_draft else 0, context.limits[b]
            gains.append(track.gains(expected, longest if own is None else own))  # at most its own K
            made.append(track.made_rates(longest))
            catch_up.append(self.costs.catch_up(self._num_unseen(b)) / min(PREFILL_HORIZON, 1 + limit))
        # The mean draft is shorter than requested where the proposer stops early, and takes less time and rows.
        lasting = [sum(chances) / batch for chances in zip(*[accumulate([1.0, *each[1:]], mul) for each in made], strict=True)]
        depths, nodes = list(accumulate(lasting, initial=0.0)), [*map(mul, self._nodes(longest), lasting)]

        def allocation_at(costs: RoundCosts) -> Allocation:
            draft = costs.draft
            at_depth = replace(costs, draft=lambda k, num_drafting: draft(depths[int(k)], num_drafting))
            return Allocation(gains, [each[0] for each in made], nodes, catch_up, at_depth, sum(rates) / batch)

        allocation = allocation_at(costs)
        speed, lens = self._best(allocation, lengths)
        plain = batch / costs.plain
        self._is_trial &= self._num_drafted < TRIAL_ROUNDS and self._budget >= 1
        may_pay = (
            self._is_trial
            and not self._has_grammars
            and allocation_at(costs.at_best).best_uniform(lengths)[0] > HYSTERESIS * plain
        )
        if max(before) <= longest:
            kept = allocation.speed(before) if any(before) else plain
            if max(speed, plain) < HYSTERESIS * kept and (any(before) or not may_pay):
                speed, lens = kept, before
        if speed <= plain and not may_pay:
            lens = [0] * batch
        if any(lens):
            self._wait = 0
        elif self._k > 0:
            self._wait = self._pause
        self._lens, self._expected_speedup = lens, max(speed / plain, 1.0)
        best, depth = max(speed, plain), depths[max(self._k, 1)]
        step, widening = costs.draft(2, batch) - costs.draft(1, batch), costs.score(1 + depth) - costs.score(1)
        self._draft_prices = DraftPrices(best * step, best * max(widening, 0.0) / (batch * depth))

    def _candidates(self) -> tuple[int, list[int]]:
        """Return the longest draft that may be requested now, and the lengths up to it that are compared."""
        longest = min(2 * self._longest_so_far + 1, self.max_k)
        return longest, [k for k in self._lengths if 0 < k <= longest]

    def _best(self, allocation: Allocation, lengths: Sequence[int]) -> tuple[float, list[int]]:
        """Return the best speed of the batch with drafts, and its lengths: one for all requests unless they differ."""
        speed, lens = allocation.best_uniform(lengths)
        if not all([request.may_draft for request in self._requests]):
            lens = self._zero_left_out(lens)
            speed = allocation.speed(lens) if any(lens) else 0.0
        if not allocation.are_alike(ALIKE):
            apart = allocation.best([k for k in lengths if k in CAPS or k == lengths[-1]])
            speed, lens = apart if apart[0] >= HYSTERESIS * speed else (speed, lens)
        return speed, lens

    def _pays(self, request: Request, batch: int) -> bool:
        """Return whether drafts for a batch of requests like this one are expected to pay; True while costs are unknown."""
        costs = self._costs[request.params.is_greedy].round_costs(batch, len(request.token_ids))
        if costs is None:
            return True
        longest, lengths = self._candidates()
        gains = self._track(request).gains([OPTIMISTIC_RATE] * longest, longest)
        speed, _ = self._best_alike(gains, batch, costs, lengths)
        return speed > batch / costs.plain

    def _best_alike(self, gains: list[float], batch: int, costs: RoundCosts, lengths: Sequence[int]) -> tuple[float, list[int]]:
        """Return the best speed, and its lengths, of a batch of requests with the same ``gains`` whose drafts are all made."""
        allocation = Allocation([gains] * batch, [1.0] * batch, self._nodes(len(gains)), [0.0] * batch, costs)
        return allocation.best_uniform(lengths)

    def _nodes(self, k: int) -> list[int]:
        """Return the tokens that each depth of a proposal up to k adds to a pass, at least one."""
        totals = [self._num_nodes(depth) for depth in range(k + 1)]
        return [max(1, after - before) for before, after in pairwise(totals)]

    def _round_costs(self, context: Context, num_grammar: Sequence[float] = ()) -> RoundCosts | None:
        return self.costs.round_costs(len(self._batch), context.cache_len, num_grammar)

    def _probe(self, context: Context) -> int:
        """Probe with a few drafts after a pause, in case the text became predictable."""
        k, loss = self._probe_plan(context)
        while loss > self._most_budget and self._give_up():
            k, loss = self._probe_plan(context)
        if k == 0:
            return 0
        if loss > self._budget:
            self._wait = 1 + int((loss - self._budget) / EXPLORATION_SHARE)
            return 0
        self._is_probe, self._last_probe_loss, self._most_budget = True, max(1.0, loss), MAX_BUDGET
        return k

    def _longest_wait(self, context: Context) -> float:
        """Return the pause after which a probe costs half of the largest budget: the proposer must process the tokens of all
        rounds of the pause first. Infinite if this cost grows faster than the budget, or the requests end before.
        """
        growth = self.costs.catch_up(sum([request.may_draft for request in self._requests])) / (self._plain or 1.0)
        _, loss = self._probe_plan(context)
        wait = max(MAX_BUDGET - loss, 0.0) / growth // 2 if 0 < growth < EXPLORATION_SHARE else inf
        left = max([request.params.max_tokens - request.num_output_tokens for request in self._requests])
        return wait if wait < left else inf

    def _give_up(self) -> bool:
        """Leave half of the requests in which the proposer is far behind out for good. Return whether there are any.

        No budget pays for processing all their tokens, and hidden states kept for that would grow without limit.
        """
        rows = [b for b, request in enumerate(self._requests) if request.follows_policy]
        rows = sorted([b for b in rows if self._num_unseen(b) > FAR_BEHIND], key=self._num_unseen)
        for b in rows[len(rows) // 2 :]:
            self._requests[b].may_draft = False
        return bool(rows)

    def _probe_plan(self, context: Context) -> tuple[int, float]:
        """Return the K of a probe and the plain rounds that it loses if its drafts are rejected; K = 0 if none is possible."""
        rows = [b for b, request in enumerate(self._requests) if request.may_draft]
        costs = self._round_costs(context) if rows else None
        if costs is None:  # costs were reset since the last decision: measure a plain round first
            return 0, 0.0
        batch, longest = len(self._batch), min(MAX_PROBE, self.max_k)
        lengths = range(1, longest + 1)
        _, (k, *_) = self._best_alike([PROBE_RATE**depth for depth in lengths], batch, costs, lengths)
        lens, cache_len = self._zero_left_out([sum(self._nodes(k))] * batch), len(context.requests[0].token_ids)
        seconds = self.costs.round(k, lens, k, len(rows), cache_len)
        seconds += self.costs.catch_up(sum([self._num_unseen(b) for b in rows]))
        return k, seconds / costs.plain - 1

    def _judge_probe(self, round_: Round, context: Context) -> None:
        """Double the pause after a failed probe.

        After a successful one, continue until the estimate changes or the budget is empty.
        """
        outcomes = zip(self._requests, round_.depths, round_.num_accepted, strict=True)
        made = [(drafts, accepted) for request, drafts, accepted in outcomes if drafts and request.num_draft_tokens is None]
        if not made:  # nothing was learned
            self._wait = self._pause
            return
        self._decide(context, self._lens)
        if self._k:
            self._pause, self._new_request_factor = FIRST_PAUSE, 1
        elif all([drafts == accepted for drafts, accepted in made]):
            self._wait = 0
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self._wait = int(min(self._pause * self._last_probe_loss, self._longest_wait(context)))
            self._new_request_factor = min(2 * self._new_request_factor, MAX_NEW_REQUEST_FACTOR)
