"""What a method at a draft length would take for the recorded texts: rounds played from its replay and its prices.

The draft-length policy is the real one, shown the rounds that are played; nothing is run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from outrider.engine import FixedLength, LengthPolicy, PhaseTimes, Round
from outrider.engine.policy import POLICIES
from outrider.proposers.base import Proposer
from outrider.runner.costs import PassCosts
from outrider.search.prices import Prices
from outrider.search.traces import Replay
from outrider.types import Context, Request, SamplingParams

DRAWS = 4  # times that texts are played where it takes luck for a draft to survive


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


class _Row:
    """One text on its way."""

    def __init__(self, index: int, replay: Replay, luck: random.Random) -> None:
        trace = replay.texts[index]
        self.index, self.length, self._replay = index, trace.num_tokens, replay
        params = SamplingParams(max_tokens=max(self.length, 1), temperature=trace.temperature)
        prompt = [0] * trace.num_prompt_tokens
        self.request = Request(f"played-{index}", prompt, len(prompt), params, 0, torch.Generator())
        self._luck = [luck.random() for _ in range(self.length)]

    @property
    def left(self) -> int:
        return self.length - self.request.num_output_tokens

    def draft(self, k: int) -> tuple[int, int]:
        """(drafts on the longest path, accepted) of a round that asks for k."""
        k = min(k, self.left - 1)
        if k <= 0:
            return 0, 0
        place = self.request.num_output_tokens
        drafted = self._replay.drafts(self.index, place, k)
        accepted = 0
        while accepted < min(k, len(drafted.chances)) and self._luck[place + accepted] < drafted.chances[accepted]:
            accepted += 1
        return min(drafted.depth, k), accepted


def predict(proposer: Proposer, k: int | str, replay: Replay, prices: Prices, batch: int) -> Played:
    """Plays every text, ``batch`` at a time as ``bench.measure.generate`` does. ``k`` 0: plain decoding."""
    draws = 1 if replay.is_certain else DRAWS
    total = Played(0.0, 0, 0)
    for draw in range(draws):
        passes = PassCosts(prices.is_padded)
        policy = _policy(proposer, k, passes)
        for start in range(0, len(replay.texts), batch):
            luck = random.Random(draw << 20 | start)  # the same for all that are compared
            rows = [_Row(index, replay, luck) for index in range(start, min(start + batch, len(replay.texts)))]
            played = _play(rows, policy, passes, prices, proposer, k != 0)
            total = Played(total.seconds + played.seconds / draws, total.rounds + played.rounds, total.tokens + played.tokens)
    return total


def _policy(proposer: Proposer, k: int | str, passes: PassCosts) -> LengthPolicy:
    """As ``engine.config.build_policy`` makes it, over a table of its own."""
    if isinstance(k, int):
        return FixedLength(min(k, proposer.max_drafts))
    policy: LengthPolicy = POLICIES.get(k)(min(proposer.max_drafts, proposer.auto_drafts), passes, proposer.num_nodes)
    return policy


def _play(
    rows: list[_Row], policy: LengthPolicy, passes: PassCosts, prices: Prices, proposer: Proposer, drafts: bool
) -> Played:
    """One batch, from the prompts to the last token of the longest answer."""
    num_prompt_tokens = sum(row.request.num_prompt_tokens for row in rows)
    seconds = num_prompt_tokens * (prices.drafted_prompt if drafts else prices.prompt)
    tokens = sum(row.length for row in rows)
    num_rounds, is_prefill = 0, True
    rows = [row for row in rows if row.length]
    requests = tuple(row.request for row in rows)
    while rows:
        context = Context(requests, tuple(row.left - 1 for row in rows), None)  # type: ignore[arg-type]
        lengths = policy.next_lengths(context)
        k = max(lengths)
        drafted = [row.draft(length) for row, length in zip(rows, lengths, strict=True)]
        depths, accepted = [depth for depth, _ in drafted], [count for _, count in drafted]
        price = prices.round(k, depths)
        num_rounds += len(rows)
        seconds += 0.0 if is_prefill else price.total
        for row, count in zip(rows, accepted, strict=True):
            row.request.token_ids.extend([0] * (count + 1))
        times = PhaseTimes(price.draft, price.score, 0.0, price.outside)
        first_layer = prices.first_layer if max(depths) else 0
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
