"""How many drafts to ask for, each round: the K, zero included, with the most expected tokens a second over the batch.

Knows acceptance counts and seconds, no method. A method never seen is expected to be good, so that the first rounds try it and
what it is worth is soon known. Three things keep that from being slower than plain decoding: K = 0 is a choice like any other;
drafting that does not pay is only tried again after a pause that doubles; and time lost by drafting comes out of a purse, into
which a small part of all time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.stats import Round
from outrider.runner.costs import PassCosts
from outrider.tune.acceptance import OPTIMISM, Acceptance
from outrider.tune.cost import CostModel
from outrider.types import Context, Request

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 23)  # what is chosen from, beside the longest
PERIOD = 6  # rounds between decisions
FRESH = 16  # drafted rounds in which every one is decided on
HYSTERESIS = 1.02  # a change of K must promise this much
MEMORY = 0.93  # of a request's counts, per round: about 14 rounds
SHARED_MEMORY = 0.99  # of the counts that new requests begin with
PROBE_MEMORY = 0.5  # of the counts when a probe adds to them: what was seen before the pause may be over
FIRST_REACH = 1  # a draft may be twice as long as the longest so far, and one more
HORIZON = 64  # tokens over which a proposer's reading of the prompt must have paid

FIRST_PAUSE, LONGEST_PAUSE = 8, 256  # rounds without drafts before the next probe
NEW_REQUEST_WAIT, NEW_REQUEST_PAUSE = 4, 16  # at most, when a request joins: its text may be another
PROBE_RATE = 0.8  # a probe drafts as many tokens as would pay at this acceptance, at most MAX_PROBE
MAX_PROBE = 4
RETRY = 4  # rounds, beside those in which the purse fills, until a probe that could not be paid is considered again

INCOME = 0.02  # of all time, may be lost
FIRST_PURSE, FULL_PURSE, DEBT = 4.0, 6.0, 4.0  # in plain rounds: to begin with, at most, and owed at most

RECHECK = 48  # drafted rounds after which a plain one is run, if drafting wins no more than THIN
THIN = 1.3


@dataclass(slots=True)
class Track:
    """What the policy keeps of a request."""

    shared: Acceptance  # of all requests of its temperature
    own: Acceptance
    num_seen: int = 0  # committed tokens that the proposer has been asked about

    def gains(self, expected: Sequence[float]) -> list[float]:
        """Expected accepted drafts at K = 0..len(expected), if the proposer has drafts."""
        gains, product = [0.0], 1.0
        for rate in self.own.rates(self.shared.rates(expected)):
            product *= rate
            gains.append(gains[-1] + product)
        return gains

    def made_rate(self) -> float:
        return self.own.made_rate(self.shared.made_rate(1.0))


class DraftLengthPolicy:
    """``next_k`` for a batch: one K that is best for the sum of its requests."""

    def __init__(self, max_k: int, passes: PassCosts, num_nodes: Callable[[int], int] = int) -> None:
        """``num_nodes``: drafts of a proposal whose longest path is k; k itself for chains."""
        self.max_k = max_k
        self._costs = {
            is_greedy: CostModel(passes, num_nodes) for is_greedy in (True, False)
        }  # drawing takes longer than an argmax
        self.costs = self._costs[True]
        self._lengths = [k for k in LENGTHS if k < max_k] + [max_k]
        self._tracks: dict[str, Track] = {}
        self._shared: dict[float, Acceptance] = {}  # by temperature: it moves acceptance more than anything else
        self._purse = FIRST_PURSE
        self._reach = FIRST_REACH  # the longest draft so far
        self._requests: tuple[Request, ...] = ()
        self._batch: list[Track] = []
        self._k = 0  # what was decided, and on what
        self._edge = 1.0  # its expected speed over that of plain decoding
        self._plain: float | None = None  # seconds of a round without drafts
        self._age = 0  # rounds since
        self._wait, self._pause = 0, FIRST_PAUSE
        self._is_probe = False
        self._num_drafted = 0
        self._num_unchecked = 0  # drafted rounds since the last one without drafts

    def next_k(self, context: Context) -> int:
        """Drafts to ask for this round."""
        self._is_probe = False
        if context.requests is not self._requests:
            self._enter(context)
        elif self._wait > 0:
            return 0
        elif self._plain is None or (self._k and (self._age >= PERIOD or self._num_drafted < FRESH)):
            self._decide(context)
        self._age += 1
        if self._plain is None:
            return 0
        if self._k == 0:
            return self._probe(context) if self._wait <= 0 else 0
        if self._purse < 0:
            self._wait = self._pause
            return 0
        if self._num_unchecked >= RECHECK and self._edge < THIN:
            return 0
        return self._k

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        """Learns from a round: what was accepted, what it cost, and whether drafting won or lost time."""
        batch, longest, times = len(round_.depths), max(round_.depths), round_.times
        if round_.k == 0:
            if not is_prefill:
                self.costs.observe(0, batch, times, False, False)
                self._num_unchecked = 0
            self._wait -= 1
            if self._plain is not None:
                self._purse = min(self._purse + INCOME * times.total / self._plain, FULL_PURSE)
            return
        num_unseen = self._num_unseen(sum(round_.num_accepted) + batch)
        catch_up, plain = 0.0, self._plain or 0.0
        if num_unseen > 0:
            catch_up = self.costs.observe_catch_up(
                times.draft - self.costs.draft(longest or round_.k, batch, plain), num_unseen, plain
            )
        if not is_prefill:
            self.costs.observe(longest or round_.k, batch, times, num_unseen > 0, longest > 0, round_.first_layer)
        self._learn(context, round_)
        self._book(round_, catch_up if self._is_probe else 0.0, is_prefill)
        if self._is_probe:
            self._judge_probe(round_, context)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests that ended; what all of them taught stays."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)

    # --- what is known ------------------------------------------------------------------------------------------------------

    def _enter(self, context: Context) -> None:
        """Another batch: finds what is known of its requests."""
        self._requests = context.requests
        if any([request.request_id not in self._tracks for request in context.requests]):
            self._wait, self._pause = min(self._wait, NEW_REQUEST_WAIT), min(self._pause, NEW_REQUEST_PAUSE)
        self._batch = [self._track(request) for request in context.requests]
        self.costs = self._costs[all([request.params.is_greedy for request in context.requests])]
        self._decide(context)

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request.request_id)
        if track is None:
            temperature = round(request.params.temperature, 1)
            shared = self._shared.get(temperature)
            if shared is None:
                nearest = min(self._shared, key=lambda other: abs(other - temperature), default=None)
                shared = Acceptance.empty(self.max_k) if nearest is None else self._shared[nearest].heir()
                self._shared[temperature] = shared
            track = self._tracks[request.request_id] = Track(shared, Acceptance.empty(self.max_k))
        return track

    def _num_unseen(self, num_new: int = 0) -> int:
        """Committed tokens that the proposer had not been asked about, before ``num_new`` were added."""
        total = sum([len(request.token_ids) for request in self._requests]) - num_new
        return total - sum([track.num_seen for track in self._batch])

    def _learn(self, context: Context, round_: Round) -> None:
        memory = PROBE_MEMORY if self._is_probe else MEMORY
        self._num_drafted += 1
        self._num_unchecked += 1
        self._reach = max(self._reach, *round_.depths)
        for b, track in enumerate(self._batch):
            track.num_seen = len(self._requests[b].token_ids)
            if context.limits[b] <= 0:
                continue  # no draft was of use
            num_drafts, num_accepted = round_.depths[b], round_.num_accepted[b]
            if num_drafts:
                track.own.fade(memory)
                track.shared.fade(SHARED_MEMORY)
            track.own.add(num_drafts, num_accepted)
            track.shared.add(num_drafts, num_accepted)

    def _book(self, round_: Round, catch_up: float, is_prefill: bool) -> None:
        """Takes out of the purse what the round lost against plain decoding, or puts into it what it won.

        At usual prices: a hiccup is not the drafts' fault. A probe pays for the text that the proposer had to catch up with.
        Where drafting was decided on, that is paid once and for all that follows.
        """
        plain, batch = self._plain, len(round_.depths)
        if plain is None:
            return
        seconds = self.costs.round(round_.k, max(round_.depths), batch, len(self._requests[0].token_ids))
        if not is_prefill:
            seconds = min(round_.times.total, seconds)
        won = 1 + sum(round_.num_accepted) / batch - (seconds + catch_up) / plain
        income = INCOME * (round_.times.total / plain + won)
        self._purse = min(max(self._purse + won + income, -DEBT), FULL_PURSE)

    # --- decisions ----------------------------------------------------------------------------------------------------------

    def _decide(self, context: Context) -> None:
        batch = len(self._batch)
        self._age = 0
        cache_len = max([len(request.token_ids) for request in context.requests])
        self._plain = self.costs.plain_round(batch, cache_len)
        if self._plain is None:
            self._k = 0
            return
        longest = min(2 * self._reach + 1, self.max_k)
        expected = [OPTIMISM] * longest
        total, idle = [0.0] * (longest + 1), 1.0  # idle: chance that no request has a draft, and the pass is a plain one
        for track, request in zip(self._batch, self._requests, strict=True):
            made, gains, own = track.made_rate(), track.gains(expected), request.num_draft_tokens
            if own is not None:  # no more drafts than it wants, whatever the others get
                gains = [gains[min(k, own)] for k in range(longest + 1)]
            idle *= 1 - made
            total = [so_far + made * gain for so_far, gain in zip(total, gains, strict=True)]
        tokens = batch * min(HORIZON, 1 + sum(context.limits) / batch)
        catch_up = self.costs.catch_up(self._num_unseen()) / tokens
        lengths = [k for k in self._lengths if k <= longest]
        speeds = self._speeds(lengths, total, idle, cache_len, catch_up)
        best = max(range(len(lengths)), key=speeds.__getitem__)
        if self._k in lengths and speeds[best] < HYSTERESIS * speeds[lengths.index(self._k)]:
            best = lengths.index(self._k)
        if lengths[best] > 0:
            self._wait = 0
        elif self._k > 0:
            self._wait = self._pause
        self._k, self._edge = lengths[best], speeds[best] / speeds[0]

    def _speeds(
        self, lengths: Sequence[int], total: Sequence[float], idle: float, cache_len: int, catch_up: float
    ) -> list[float]:
        """Expected tokens a second at each K. ``total``: accepted drafts of the batch at K = 0, 1, ...

        ``catch_up``: seconds for each token that it takes the proposer to read what it has not seen.
        """
        assert self._plain is not None
        batch, speeds = len(self._batch), []
        for k, (draft, score) in zip(lengths, self.costs.drafted_rounds(lengths, batch, cache_len), strict=True):
            tokens = batch + total[k]
            seconds = draft + (1 - idle) * score + idle * self._plain + catch_up * tokens
            speeds.append(tokens / seconds if k else batch / self._plain)
        return speeds

    def _probe(self, context: Context) -> int:
        """After a pause, a few drafts: has the text become predictable?"""
        assert self._plain is not None
        batch, cache_len = len(self._batch), len(context.requests[0].token_ids)
        total = [0.0]
        for k in range(1, min(MAX_PROBE, self.max_k) + 1):
            total.append(total[-1] + batch * PROBE_RATE**k)
        speeds = self._speeds(range(len(total)), total, 0.0, cache_len, 0.0)
        k = max(range(1, len(total)), key=speeds.__getitem__)
        seconds = self.costs.round(k, k, batch, cache_len) + self.costs.catch_up(self._num_unseen())
        lacking = seconds / self._plain - 1 - self._purse
        if lacking > 0:
            self._wait = RETRY + int(lacking / INCOME)
            return 0
        self._is_probe = True
        return k

    def _judge_probe(self, round_: Round, context: Context) -> None:
        """A probe that failed doubles the pause; one that held goes on, until the estimate says so or the purse is empty."""
        self._decide(context)
        made = [(drafts, accepted) for drafts, accepted in zip(round_.depths, round_.num_accepted, strict=True) if drafts]
        if self._k:
            self._pause = FIRST_PAUSE
        elif made and all([drafts == accepted for drafts, accepted in made]):
            self._wait = 0
        else:
            if made:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._wait = self._pause
