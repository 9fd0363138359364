"""What a method at a draft length would take for the recorded texts: rounds played from replays and prices.

Of a method that takes turns those of each part are known, as it drafts alone; who drafts is decided anew at each place of the
text. Its own rounds would have to be told apart by who drafted: one costs next to nothing and the other a model's passes.

The draft-length policy is the real one, shown the rounds that are played, and the time that it takes counts; nothing else runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from outrider.engine import FixedLength, LengthPolicy
from outrider.engine.policy import POLICIES
from outrider.proposers.base import Proposer, Turn
from outrider.runner.costs import PassCosts
from outrider.search.prices import Price, Prices
from outrider.search.traces import Replay
from outrider.types import Context, PhaseTimes, Request, Round, SamplingParams

DRAWS = 4  # times that texts are played where it takes luck for a draft to survive


@dataclass(frozen=True)
class Studied:
    """What is known of one that drafts, at one batch size."""

    replay: Replay
    prices: Prices


@dataclass(frozen=True)
class Played:
    """What came of it."""

    seconds: float  # prompts included
    rounds: int  # of single requests
    tokens: int

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return self.tokens / max(self.rounds, 1)


@dataclass(frozen=True)
class _Round:
    """Of one text."""

    found: tuple[int, ...] = (0,)  # drafts on the longest path of each turn that was asked
    taken: int = 0  # the turn whose drafts were scored
    depth: int = 0  # of them on the longest path
    num_accepted: int = 0


class _Row:
    """One text on its way."""

    def __init__(self, index: int, replays: Sequence[Replay], luck: random.Random) -> None:
        trace = replays[0].texts[index]
        self.index, self.length, self._replays = index, trace.num_tokens, replays
        params = SamplingParams(max_tokens=max(self.length, 1), temperature=trace.temperature)
        prompt = [0] * trace.num_prompt_tokens
        self.request = Request(f"played-{index}", prompt, len(prompt), params, 0, torch.Generator())
        self._luck = [luck.random() for _ in range(self.length)]

    @property
    def left(self) -> int:
        return self.length - self.request.num_output_tokens

    def draft(self, k: int, turns: Sequence[Turn]) -> _Round:
        """A round that asks for k drafts."""
        k = min(k, self.left - 1)
        if k <= 0:
            return _Round()
        place = self.request.num_output_tokens
        found = []
        for turn, replay in zip(turns, self._replays, strict=True):
            found.append(replay.drafts(self.index, place, min(max(k, turn.enough), turn.most)))
            if found[-1].depth >= turn.enough:
                break
        taken = max((i for i, drafted in enumerate(found) if drafted.depth), default=0)
        chances, num_accepted = found[taken].chances[:k], 0
        while num_accepted < len(chances) and self._luck[place + num_accepted] < chances[num_accepted]:
            num_accepted += 1
        return _Round(tuple(drafted.depth for drafted in found), taken, min(found[taken].depth, k), num_accepted)


def predict(proposer: Proposer, k: int | str, studied: Sequence[Studied], batch: int) -> Played:
    """Plays every text, ``batch`` at a time as ``bench.measure.generate`` does. ``k`` 0: plain decoding.

    ``studied``: each of the proposer's turns, along the same texts; plain rounds cost what the first has them cost.
    """
    replays, first = [each.replay for each in studied], studied[0].prices
    prices = [each.prices.at_pace(first.plain) for each in studied]
    num_texts, draws = len(replays[0].texts), 1 if all(replay.is_certain for replay in replays) else DRAWS
    total = Played(0.0, 0, 0)
    for draw in range(draws):
        passes = PassCosts(first.is_padded)
        policy = _policy(proposer, k, passes)
        for start in range(0, num_texts, batch):
            luck = random.Random(draw << 20 | start)  # the same for all that are compared
            rows = [_Row(index, replays, luck) for index in range(start, min(start + batch, num_texts))]
            played = _play(rows, policy, passes, prices, proposer, k != 0)
            total = Played(total.seconds + played.seconds / draws, total.rounds + played.rounds, total.tokens + played.tokens)
        if isinstance(policy, _Clocked):
            total = replace(total, seconds=total.seconds + policy.seconds / draws)
    return total


def _price(prices: Sequence[Prices], k: int, rounds: Sequence[_Round]) -> Price:
    """Of a round of the batch: all who were asked drafted; the pass costs what the last of those has it cost who are scored."""
    scored = prices[_scored(rounds)].round(k, [each.depth for each in rounds])
    draft = 0.0
    for turn, each in enumerate(prices):
        found = [round_.found[turn] for round_ in rounds if turn < len(round_.found)]
        if found:
            draft += each.round(k, found).draft
    return replace(scored, draft=draft)


def _scored(rounds: Sequence[_Round]) -> int:
    """The last turn of which drafts are scored."""
    return max((each.taken for each in rounds if each.depth), default=0)


@dataclass
class _Clocked:
    """A policy that decides each round, and the seconds that this takes: rounds were priced with one that does not."""

    inner: LengthPolicy
    seconds: float = 0.0

    def next_lengths(self, context: Context) -> list[int]:
        started = perf_counter()
        lengths = self.inner.next_lengths(context)
        self.seconds += perf_counter() - started
        return lengths

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        started = perf_counter()
        self.inner.observe(context, round_, is_prefill)
        self.seconds += perf_counter() - started

    def release(self, request_ids: Sequence[str]) -> None:
        self.inner.release(request_ids)


def _policy(proposer: Proposer, k: int | str, passes: PassCosts) -> LengthPolicy:
    """As ``engine.config.build_policy`` makes it, over a table of its own."""
    if isinstance(k, int):
        return FixedLength(min(k, proposer.max_drafts))
    return _Clocked(POLICIES.get(k)(min(proposer.max_drafts, proposer.auto_drafts), passes, proposer.num_nodes))


def _play(
    rows: list[_Row], policy: LengthPolicy, passes: PassCosts, prices: Sequence[Prices], proposer: Proposer, drafts: bool
) -> Played:
    """One batch, from the prompts to the last token of the longest answer."""
    num_prompt_tokens = sum(row.request.num_prompt_tokens for row in rows)
    seconds = num_prompt_tokens * prices[0].prompt
    if drafts:
        seconds += num_prompt_tokens * sum(each.drafted_prompt - each.prompt for each in prices)
    tokens = sum(row.length for row in rows)
    turns, num_rounds, is_prefill = proposer.turns, 0, True
    rows = [row for row in rows if row.length]
    requests = tuple(row.request for row in rows)
    while rows:
        context = Context(requests, tuple(row.left - 1 for row in rows), None)  # type: ignore[arg-type]
        lengths = policy.next_lengths(context)
        k = max(lengths)
        drafted = [row.draft(length, turns) for row, length in zip(rows, lengths, strict=True)]
        depths, accepted = [each.depth for each in drafted], [each.num_accepted for each in drafted]
        price = _price(prices, k, drafted)
        num_rounds += len(rows)
        seconds += 0.0 if is_prefill else price.total
        for row, count in zip(rows, accepted, strict=True):
            row.request.token_ids.extend([0] * (count + 1))
        times = PhaseTimes(price.draft, price.score, 0.0, price.outside)
        first_layer = prices[_scored(drafted)].first_layer if max(depths) else 0
        lens = [proposer.num_nodes(depth) if depth else 0 for depth in depths]
        if not is_prefill:
            table = passes.behind(first_layer)
            table.observe(table.width(lens), len(rows), len(requests[0].token_ids), price.score)
        policy.observe(context.limited(lengths), Round(k, lens, depths, accepted, times, first_layer), is_prefill)
        is_prefill = False
        ended = [row.request.request_id for row in rows if row.left <= 0]
        if ended:
            policy.release(ended)
            rows = [row for row in rows if row.left > 0]
            requests = tuple(row.request for row in rows)
    return Played(seconds, num_rounds, tokens)
