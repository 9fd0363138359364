"""What rounds take: a few of each draft length, run as they are run in service, plain ones among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.contenders import Contender, Contenders
from outrider.engine import Observation, PhaseTimes, Round
from outrider.search.traffic import Text
from outrider.types import Context, OutriderError

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

    @property
    def plain(self) -> float:
        """Seconds of a round without drafts."""
        return self.rounds[0].total

    def round(self, k: int, depth: int) -> Price:
        """Of a round that asked for k drafts and got a longest path of ``depth``."""
        if not depth:
            return replace(self.rounds[0], draft=self.vain) if k else self.rounds[0]
        known = [each for each in sorted(self.rounds) if each] or [0]
        lines = zip(*(_phases(self.rounds[each]) for each in known), strict=True)
        return Price(*(_on_line(depth, known, line) for line in lines))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Prices:
        rounds = {int(depth): Price(**price) for depth, price in found["rounds"].items()}
        return cls(**(found | {"rounds": rounds}))


def _phases(price: Price) -> tuple[float, float, float]:
    return price.draft, price.score, price.outside


def _on_line(depth: int, known: Sequence[int], values: Sequence[float]) -> float:
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

    def next_k(self, context: Context) -> int:
        if any(not request.num_output_tokens for request in context.requests):
            return max(self.lengths)
        return self.lengths[min(self.asked // ROUNDS, len(self.lengths) - 1)]

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        self.asked += not is_prefill

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""


@dataclass
class _Watch:
    """Rounds of a full batch, as the engine settles them."""

    batch: int
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
        """Medians by the longest path drafted; 0 is of rounds that asked for nothing."""
        found: dict[int, list[PhaseTimes]] = {}
        for number, round_ in self.rounds:
            depth = max(round_.depths)
            if number % ROUNDS and (depth or not round_.k):
                found.setdefault(depth, []).append(round_.times)
        return {
            depth: Price(
                median(each.draft for each in times) if depth else 0.0,
                median(each.score for each in times),
                median(each.verify + each.host for each in times),
            )
            for depth, times in sorted(found.items())
            if len(times) >= ENOUGH or not depth
        }

    def vain(self) -> float:
        """Seconds of drafting that comes to nothing; where it always came to something, the least that it took."""
        seconds = [round_.times.draft for _, round_ in self.rounds if round_.k and not max(round_.depths)]
        return median(seconds) if seconds else min((round_.times.draft for _, round_ in self.rounds if round_.k), default=0.0)


def measure(contenders: Contenders, method: str, texts: Sequence[Text], batch: int, longest: int) -> Prices:
    """Runs rounds of every measured length up to ``longest``, and prices those that came to drafts.

    Where there never was a draft rounds are priced by passes of their width alone. Raises ``OutriderError`` where the proposer
    fails and where no answer is long enough for a round to be measured.
    """
    # Plain rounds at both ends: every prediction is a ratio to them.
    blocks, watch = _Blocks([0, *(k for k in MEASURED if k < longest), longest, 0]), _Watch(batch)
    num_tokens, undrafted = 0, 0.0
    with contenders.active(Contender(method, longest)):
        llm = contenders.llm
        faults = llm.stats.faults
        llm.warmup(longest, batch)
        for group in _groups(texts, batch):
            num_tokens += sum(len(text.prompt) for text in group)
            alone = _Watch(batch)
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
        if len(rounds) == 1:
            cache_len = int(fmean(len(text.prompt) for text in texts))
            one = llm.runner.pass_cost(1, batch, cache_len)
            for k in blocks.lengths[1:-1]:
                wider = llm.runner.pass_cost(1 + llm.proposer.num_nodes(k), batch, cache_len)
                rounds[k] = Price(vain, rounds[0].score * max(wider / one, 1.0), rounds[0].outside)
    first_layer = max(round_.first_layer for _, round_ in watch.rounds)
    return Prices(rounds, vain, undrafted / num_tokens, sum(watch.prompts) / num_tokens, first_layer)


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
