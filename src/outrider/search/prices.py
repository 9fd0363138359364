"""What rounds take: a few of each draft length, run as they are run in service, plain ones among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.contenders import Contender, Contenders
from outrider.engine import Observation
from outrider.search.traffic import Text
from outrider.types import Context, OutriderError, Round

if TYPE_CHECKING:
    from outrider.engine import LLM

ROUNDS = 6  # of each draft length; the first, which may have text to catch up with, does not count
MEASURED = (1, 2, 4, 8, 15)  # draft lengths, as far as a method goes; between them prices are straight lines
ENOUGH = 3  # rounds with drafts of one length for a price: fewer may have been hiccups
MOST_GROUPS = 16  # of prompts, over which the rounds are spread


@dataclass(frozen=True)
class Price:
    """Seconds of a round by phase."""

    draft: float
    score: float
    outside: float  # verifier and host
    depth: float  # of the drafts that were scored, as the pass's price goes: the requests' mean, or the longest

    @property
    def total(self) -> float:
        return self.draft + self.score + self.outside


@dataclass(frozen=True)
class Prices:
    """Of one method at one batch size."""

    rounds: dict[int, Price]  # by the longest path among the drafts; 0: nothing was asked for
    vain: float  # seconds of drafting that came to nothing
    prompt: float  # seconds that a token of a prompt takes, drafting off
    drafted_prompt: float  # and on
    first_layer: int = 0  # at which passes over drafts begin
    is_padded: bool = False  # passes cost as if every request had as many drafts as the one with the most

    @property
    def plain(self) -> float:
        """Seconds of a round without drafts."""
        return self.rounds[0].total

    def at_pace(self, plain: float) -> Prices:
        """Of a machine on which a round without drafts takes ``plain`` seconds: between two pricings it may slow down."""
        pace = plain / self.plain
        rounds = {
            longest: Price(price.draft * pace, price.score * pace, price.outside * pace, price.depth)
            for longest, price in self.rounds.items()
        }
        seconds = (self.vain * pace, self.prompt * pace, self.drafted_prompt * pace)
        return Prices(rounds, *seconds, self.first_layer, self.is_padded)

    def round(self, k: int, depths: Sequence[int]) -> Price:
        """Of a round that asked for k drafts and got longest paths of ``depths``."""
        longest = max(depths)
        if not longest:
            return replace(self.rounds[0], draft=self.vain) if k else self.rounds[0]
        known = [each for each in sorted(self.rounds) if each] or [0]
        prices = [self.rounds[each] for each in known]
        depth = _paid_depth(depths, self.is_padded)
        return Price(
            _on_line(longest, known, [price.draft for price in prices]),
            self._score(depth),
            _on_line(longest, known, [price.outside for price in prices]),
            depth,
        )

    def _score(self, depth: float) -> float:
        """Seconds of a pass over drafts of so many a request."""
        # A pass over drafts that begins behind the first layer is on no line with the plain one.
        points = {price.depth: price.score for longest, price in self.rounds.items() if longest or not self.first_layer}
        known = sorted(points or {0.0: self.rounds[0].score})
        return _on_line(depth, known, [points.get(each, self.rounds[0].score) for each in known])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Prices:
        rounds = {int(depth): Price(**price) for depth, price in found["rounds"].items()}
        return cls(**(found | {"rounds": rounds}))


def _usual(seconds: Iterable[float]) -> float:
    """Mean of all but the slowest, maybe a hiccup. Not the median: drafts of two methods in turn take very unlike times."""
    quickest = sorted(seconds)
    return fmean(quickest[: max(1, len(quickest) - 1)])


def _paid_depth(depths: Sequence[int], is_padded: bool) -> float:
    """By how many drafts a request the pass of a round is dearer."""
    return max(depths) if is_padded else fmean(depths)


def _on_line(depth: float, known: Sequence[float], values: Sequence[float]) -> float:
    """Between the values at known depths, and beyond the last as the slope up to it has it."""
    if depth <= known[-1] or len(known) == 1:
        return float(np.interp(depth, known, values))
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    return values[-1] + max(slope, 0.0) * (depth - known[-1])


@dataclass
class _Blocks:
    """A draft-length policy that asks for each length some rounds in a row; while prompts are read, for the longest."""

    lengths: Sequence[int]
    asked: int = 0  # decoding rounds so far

    @property
    def is_done(self) -> bool:
        return self.asked >= ROUNDS * len(self.lengths)

    def next_lengths(self, context: Context) -> list[int]:
        k = self.lengths[min(self.asked // ROUNDS, len(self.lengths) - 1)]
        if any(not request.num_output_tokens for request in context.requests):
            k = max(self.lengths)
        return [k] * len(context.requests)

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        self.asked += not is_prefill

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""


@dataclass
class _Watch:
    """Rounds of a full batch, as the engine settles them."""

    batch: int
    is_padded: bool
    prompts: list[float] = field(default_factory=list)  # seconds of each reading of some
    rounds: list[tuple[int, Round]] = field(default_factory=list)  # with the number of decoding rounds before them
    num_decoding: int = 0

    def see(self, seen: Observation) -> None:
        if seen.is_prefill:
            self.prompts.append(seen.round.times.total)
            return
        self.prompts.append(seen.round.times.read)  # of long prompts, while others of the batch decode already
        self.num_decoding += 1
        if len(seen.round.depths) == self.batch:
            self.rounds.append((self.num_decoding - 1, seen.round))

    def priced(self) -> dict[int, Price]:
        """By the longest path drafted; 0 is of rounds that asked for nothing."""
        found: dict[int, list[Round]] = {}
        for number, round_ in self.rounds:
            longest = max(round_.depths)
            if number % ROUNDS and (longest or not round_.k):
                found.setdefault(longest, []).append(round_)
        return {
            longest: Price(
                _usual(each.times.draft for each in rounds) if longest else 0.0,
                median(each.times.score for each in rounds),
                median(each.times.verify + each.times.host for each in rounds),
                fmean(_paid_depth(each.depths, self.is_padded) for each in rounds),
            )
            for longest, rounds in sorted(found.items())
            if len(rounds) >= ENOUGH or not longest
        }

    def vain(self) -> float:
        """Seconds of drafting that comes to nothing; where it always came to something, the least that it took."""
        seconds = [round_.times.draft for _, round_ in self.rounds if round_.k and not max(round_.depths)]
        return median(seconds) if seconds else min((round_.times.draft for _, round_ in self.rounds if round_.k), default=0.0)


def measure(contenders: Contenders, method: str, texts: Sequence[Text], batch: int, longest: int) -> Prices:
    """Runs rounds of every measured length up to ``longest``, and prices those that came to drafts.

    Lengths that never came are priced by how much dearer passes of their width are: the price of two drafts, stretched, makes
    ten look twice as dear as they are. Raises ``OutriderError`` where the proposer fails and where no answer is long enough for
    a round to be measured.
    """
    # Plain rounds at both ends: every prediction is a ratio to them.
    blocks, is_padded = _Blocks([0, *(k for k in MEASURED if k < longest), longest, 0]), contenders.llm.runner.costs.is_padded
    watch, num_tokens, undrafted = _Watch(batch, is_padded), 0, 0.0
    with contenders.active(Contender(method, longest)):
        llm = contenders.llm
        faults = llm.stats.faults
        llm.warmup(longest, batch)
        for group in _groups(texts, batch):
            num_tokens += sum(len(text.prompt) for text in group)
            alone = _Watch(batch, is_padded)
            _generate(llm, [replace(text, output=text.output[:2]) for text in group], _Blocks([0]), alone)
            _generate(llm, group, blocks, watch)
            undrafted += sum(alone.prompts)
            if blocks.is_done:
                break
        if llm.stats.faults > faults:
            raise OutriderError("it failed while its rounds were measured (--debug shows how)")
        rounds = watch.priced()
        if 0 not in rounds:
            raise OutriderError("the answers of the traffic are too short to measure a round: raise --max-tokens")
        vain = watch.vain()

        def pass_cost(k: int) -> float:
            width = 1 + (llm.proposer.num_nodes(k) if k else 0)
            cache_len = int(fmean(len(text.prompt) for text in texts))
            return llm.runner.pass_cost(width, batch, cache_len, hidden=llm.proposer.needs_hidden)

        rounds |= _unseen(rounds, vain, blocks.lengths, pass_cost)
    first_layer = max(round_.first_layer for _, round_ in watch.rounds)
    return Prices(rounds, vain, undrafted / num_tokens, sum(watch.prompts) / num_tokens, first_layer, is_padded)


def _unseen(
    rounds: dict[int, Price], vain: float, lengths: Sequence[int], pass_cost: Callable[[int], float]
) -> dict[int, Price]:
    """Prices of lengths beyond the longest that was seen, by how much dearer passes over so many drafts are."""
    longest = max(rounds)
    last, unseen = rounds[longest], [k for k in lengths if k > longest]
    if not unseen:
        return {}
    known, draft = pass_cost(round(last.depth)), last.draft if longest else vain
    return {k: Price(draft, last.score * max(pass_cost(k) / known, 1.0), last.outside, k) for k in unseen}


def _groups(texts: Sequence[Text], batch: int) -> Iterator[list[Text]]:
    """Batches of texts, the first ones again where there are no more."""
    for group in range(MOST_GROUPS):
        yield [texts[(group * batch + i) % len(texts)] for i in range(batch)]


def _generate(llm: LLM, group: Sequence[Text], policy: _Blocks, watch: _Watch) -> None:
    llm.engine.policy, llm.engine.observer = policy, watch.see
    try:
        for _ in llm.stream([text.prompt for text in group], [text.again for text in group]):
            pass
    finally:
        llm.engine.observer = None
