"""How many drafts to ask for, each round: the K, zero included, with the most expected tokens a second over the batch.

Knows acceptance counts and seconds, no method. Three things keep it from being slower than plain decoding: K = 0 is a choice
like any other; drafting that does not pay is only tried again after a pause that doubles; and each request has a budget, a
small part of its time, which the time lost by drafting must not exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.costs import PassCosts
from outrider.engine.stats import Round
from outrider.tune.cost import CostModel
from outrider.types import Context, Request

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)  # what is chosen from, beside the longest
PERIOD = 4  # rounds between decisions
HYSTERESIS = 1.02  # a change of K must promise this much
MEMORY = 0.93  # of a request's counts, per round: about 14 rounds
GLOBAL_MEMORY = 0.998  # of the counts that new requests begin with
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 4.0  # acceptance before anything was seen, and its weight in drafts
SHRINKAGE = 2.0  # weight, in drafts, of the position before (scaled as for all requests) in a position's estimate
PROBE_MEMORY = 0.5  # of the counts when a probe adds to them: what was seen before the pause may be over
FIRST_PAUSE, LONGEST_PAUSE = 8, 256  # rounds without drafts before the next probe
PROBE_RATE = 0.7  # a probe drafts as many tokens as would pay at this acceptance, at most MAX_PROBE
MAX_PROBE = 4
BUDGET, FIRST_BUDGET = 0.012, 1.5  # time that may be lost: a part of all time, and so many plain rounds to begin with

MAX_SAVED = 1.0  # rounds' worth of won time that counts against later losses


@dataclass(slots=True)
class Acceptance:
    """Decaying counts by position: drafts that were reached, and accepted; rounds asked, and with a draft made.

    Instead of every count shrinking, the unit in which new ones are counted grows.
    """

    reached: list[float]
    accepted: list[float]
    asked: float = 0.0
    made: float = 0.0
    unit: float = 1.0

    @classmethod
    def empty(cls, max_k: int) -> Acceptance:
        return cls([0.0] * max_k, [0.0] * max_k)

    def fade(self, memory: float) -> None:
        """What was counted so far weighs less from now on."""
        self.unit /= memory
        if self.unit > 1e9:
            self.reached = [count / self.unit for count in self.reached]
            self.accepted = [count / self.unit for count in self.accepted]
            self.asked, self.made, self.unit = self.asked / self.unit, self.made / self.unit, 1.0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a round."""
        unit = self.unit
        self.asked += unit
        if num_drafts:
            self.made += unit
        for i in range(min(num_accepted + 1, num_drafts, len(self.reached))):
            self.reached[i] += unit
        for i in range(min(num_accepted, len(self.reached))):
            self.accepted[i] += unit

    def rates(self) -> list[float]:
        """Acceptance by position given that it was reached; a position rarely reached leans on the one before."""
        rates, before = [], PRIOR_RATE
        weight = PRIOR_WEIGHT * self.unit
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            before = (weight * before + accepted) / (weight + reached)
            weight = SHRINKAGE * self.unit
            rates.append(before)
        return rates

    def made_rate(self, prior: float, weight: float) -> float:
        """The part of the rounds in which the proposer had a draft."""
        weight *= self.unit
        return (weight * prior + self.made) / (weight + self.asked)


@dataclass(slots=True)
class Track:
    """What the policy keeps of a request."""

    shared: Acceptance  # of all requests of its temperature
    own: Acceptance
    lost: float = 0.0  # seconds that drafting cost beyond plain decoding, less what it won lately
    elapsed: float = 0.0
    pause: int = FIRST_PAUSE
    wait: int = FIRST_PAUSE
    behind: int = 0  # committed tokens that the proposer has not been asked about

    def gains(self, max_k: int) -> list[float]:
        """Expected accepted drafts at K = 0..max_k, if the proposer has drafts."""
        shared = self.shared.rates()
        gains, product, rate, before = [0.0], 1.0, shared[0], shared[0]
        weight = SHRINKAGE * self.own.unit
        for i in range(max_k):
            prior = min(rate * shared[i] / before, 1.0)
            before = shared[i]
            rate = (weight * prior + self.own.accepted[i]) / (weight + self.own.reached[i])
            product *= rate
            gains.append(gains[-1] + product)
        return gains

    def made_rate(self) -> float:
        return self.own.made_rate(self.shared.made_rate(1.0, 1.0), SHRINKAGE)


@dataclass(slots=True)
class Decision:
    """One K, and what it was decided on."""

    k: int = 0
    age: int = PERIOD
    is_probe: bool = False
    plain_round: float | None = None
    tracks: list[Track] = field(default_factory=list)


class DraftLengthPolicy:
    """``next_k`` for a batch: one K that is best for the sum of its requests."""

    def __init__(self, max_k: int, passes: PassCosts) -> None:
        self.max_k = max_k
        self.costs = CostModel(passes)
        self._lengths = [k for k in LENGTHS if k < max_k] + [max_k]
        self._tracks: dict[str, Track] = {}
        self._shared: dict[float, Acceptance] = {}  # by temperature: it moves acceptance more than anything else
        self._requests: tuple[Request, ...] = ()
        self._now = Decision()

    def next_k(self, context: Context) -> int:
        """Drafts to ask for this round."""
        now = self._now
        if context.requests is not self._requests:
            self._requests = context.requests
            now.tracks = [self._track(request) for request in context.requests]
            now.age = PERIOD
        now.is_probe = False
        if now.age >= PERIOD:
            self._decide(context)
        now.age += 1
        if now.plain_round is None or self._is_over_budget():
            return 0
        if now.k == 0:
            return self._probe(context)
        return now.k

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        """Learns from a round: what was accepted, what it cost, and whether drafting won or lost time."""
        now, k = self._now, round_.k
        if now.plain_round is None:
            now.age = PERIOD
        longest, batch = max(round_.lens), len(now.tracks)
        behind = sum([track.behind for track in now.tracks])  # tokens that the proposer had not seen
        catch_up = 0.0
        if k and behind > 0:
            usual = self.costs.draft(k, batch, now.plain_round or 0.0)
            catch_up = self.costs.observe_catch_up(round_.times.draft - usual, behind)
        if not is_prefill:
            self.costs.observe(k, longest, batch, round_.times, behind > 0)
        if k:
            self._learn(round_)
        self._book(round_, now.is_probe, catch_up)
        for track, num_accepted in zip(now.tracks, round_.num_accepted, strict=True):
            track.behind = 0 if k else track.behind + 1 + num_accepted
            track.wait -= 1
        if now.is_probe and longest:
            self._judge_probe(round_, context)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests that ended; what all of them taught stays."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)

    # --- estimates ----------------------------------------------------------------------------------------------------------

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request.request_id)
        if track is None:
            key = round(request.params.temperature, 1)
            shared = self._shared.setdefault(key, Acceptance.empty(self.max_k))
            track = self._tracks[request.request_id] = Track(shared, Acceptance.empty(self.max_k))
            track.behind = len(request.token_ids)
        return track

    def _learn(self, round_: Round) -> None:
        memory = PROBE_MEMORY if self._now.is_probe else MEMORY
        for track, num_drafts, num_accepted in zip(self._now.tracks, round_.lens, round_.num_accepted, strict=True):
            if num_drafts:
                track.own.fade(memory)
                track.shared.fade(GLOBAL_MEMORY)
            track.own.add(num_drafts, num_accepted)
            track.shared.add(num_drafts, num_accepted)

    def _book(self, round_: Round, is_probe: bool, catch_up: float) -> None:
        """Adds what the round lost or won against plain decoding, at usual prices: a hiccup is not the drafts' fault.

        A probe pays for the text that the proposer had to catch up with. Where drafting was decided on, that is paid once
        and for all that follows.
        """
        now, plain = self._now, self._now.plain_round
        if plain is None:
            return
        seconds = plain
        if round_.k:
            cache_len = len(self._requests[0].token_ids)
            usual = self.costs.round(round_.k, max(round_.lens), len(now.tracks), cache_len)
            seconds = min(round_.times.total, usual) + (catch_up if is_probe else 0.0)
        for track, num_accepted in zip(now.tracks, round_.num_accepted, strict=True):
            track.elapsed += plain * (1 + num_accepted)
            # What was won may pay for a bad round or two, but not for long after.
            track.lost = max(track.lost + seconds - plain * (1 + num_accepted), -MAX_SAVED * seconds)

    def _is_over_budget(self) -> bool:
        return self._budget() < 0

    def _budget(self) -> float:
        """Seconds that may still be lost, over all requests of the batch: each round is lost to all of them."""
        now = self._now
        assert now.plain_round is not None
        first = FIRST_BUDGET * now.plain_round * len(now.tracks)
        return first + sum([BUDGET * track.elapsed - track.lost for track in now.tracks])

    # --- decisions ----------------------------------------------------------------------------------------------------------

    def _decide(self, context: Context) -> None:
        now, batch = self._now, len(context.requests)
        now.age = 0
        cache_len = max([len(request.token_ids) for request in context.requests])
        now.plain_round = self.costs.plain_round(batch, cache_len)
        if now.plain_round is None:
            now.k = 0
            return
        gains = [track.gains(self.max_k) for track in now.tracks]
        made = [track.made_rate() for track in now.tracks]
        total = [sum([rate * gain[k] for rate, gain in zip(made, gains, strict=True)]) for k in range(self.max_k + 1)]
        idle = 1.0  # chance that no request has a draft: then the pass is a plain one
        for rate in made:
            idle *= 1 - rate
        best, best_speed = now.k, self._speed(now.k, total, idle, batch, cache_len) * HYSTERESIS
        for k in self._lengths:
            speed = self._speed(k, total, idle, batch, cache_len)
            if speed > best_speed:
                best, best_speed = k, speed
        if best == 0 and now.k > 0:
            for track in now.tracks:
                track.wait = track.pause
        now.k = best

    def _speed(self, k: int, total: list[float], idle: float, batch: int, cache_len: int) -> float:
        """Expected tokens a second at K = k."""
        assert self._now.plain_round is not None
        if k == 0:
            return batch / self._now.plain_round
        draft, score = self.costs.drafted_round(k, batch, cache_len)
        return (batch + total[k]) / (draft + (1 - idle) * score + idle * self._now.plain_round)

    def _probe(self, context: Context) -> int:
        """After a pause, a few drafts: has the text become predictable?"""
        now = self._now
        if all([track.wait > 0 for track in now.tracks]):
            return 0
        catch_up = self.costs.catch_up(sum([track.behind for track in now.tracks]))
        if catch_up * len(now.tracks) > self._budget():
            return 0
        now.is_probe = True
        batch, cache_len = len(now.tracks), len(context.requests[0].token_ids)
        total = [0.0]
        for k in range(1, min(MAX_PROBE, self.max_k) + 1):
            total.append(total[-1] + batch * PROBE_RATE**k)
        return max(range(1, len(total)), key=lambda k: self._speed(k, total, 0.0, batch, cache_len))

    def _judge_probe(self, round_: Round, context: Context) -> None:
        """A probe that failed doubles the pause; one that held goes on, until the estimate says so or the budget ends it."""
        self._decide(context)
        for track, num_drafts, num_accepted in zip(self._now.tracks, round_.lens, round_.num_accepted, strict=True):
            if self._now.k:
                track.pause = FIRST_PAUSE
            elif num_drafts and num_accepted == num_drafts:
                track.wait = 0
            elif num_drafts:
                track.pause = min(2 * track.pause, LONGEST_PAUSE)
                track.wait = track.pause
