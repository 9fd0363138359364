"""Recorded texts, replays and prices made by hand."""

from __future__ import annotations

from outrider.proposers.base import ScriptedProposer
from outrider.search.prediction import Studied
from outrider.search.prices import Price, Prices
from outrider.search.traces import Drafted, Replay, Trace
from outrider.search.traffic import Text
from outrider.types import Context, SamplingParams
from tests.engine.toy import TableRunner, greedy_continuation


def recorded(runner: TableRunner, prompt: list[int], length: int) -> Text:
    """What greedy decoding says."""
    return Text(list(prompt), SamplingParams(max_tokens=length, seed=0), greedy_continuation(runner, prompt, length))


def fickle(runner: TableRunner, wrong: set[int]) -> ScriptedProposer:
    """Drafts as greedy decoding goes on, but for the tokens at the places ``wrong`` of the whole text."""

    def chains(context: Context, k: int) -> list[list[int]]:
        found = []
        for request, limit in zip(context.requests, context.limits, strict=True):
            chain = greedy_continuation(runner, request.token_ids, min(k, limit))
            at = len(request.token_ids)
            found.append([1 + token % 16 if at + i in wrong else token for i, token in enumerate(chain)])
        return found

    return ScriptedProposer.of_chains(chains)


def sure(num_tokens: int, right: set[int], k: int, num_prompt_tokens: int = 0) -> Trace:
    """Of a draft that is right at some places of the output, tried at all of them."""
    rounds = {}
    for place in range(num_tokens - 1):
        depth = min(k, num_tokens - 1 - place)
        chances: list[float] = []
        while len(chances) < depth and (not chances or chances[-1]):
            chances.append(float(place + len(chances) in right))
        rounds[place] = Drafted(depth, tuple(chances))
    return Trace(num_prompt_tokens, num_tokens, 0.0, rounds)


def replay(num_tokens: int, right: set[int], k: int = 4) -> Replay:
    return Replay({k: [sure(num_tokens, right, k)]})


def prices(draft: float = 0.0, row: float = 0.0, longest: int = 8) -> Prices:
    """A plain round takes a second, a draft's step ``draft`` and each further row of a pass ``row``; prompts nothing."""
    rounds = {0: Price(0.0, 1.0, 0.0, 0)} | {k: Price(draft * k, 1.0 + row * k, 0.0, k) for k in (1, longest)}
    return Prices(rounds, draft, 0.0, 0.0)


def alone(replay: Replay, prices: Prices) -> list[Studied]:
    """Of a proposer that takes no turns."""
    return [Studied(replay, prices)]
