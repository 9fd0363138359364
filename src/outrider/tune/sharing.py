"""Distribute a round's drafts over requests to maximise tokens per second.

The value of a further draft is its acceptance probability, and every draft takes one row of the pass. So the optimum is among
few candidates: the best drafts of all requests, one more each time.

Plain Python: the arrays of a batch are so small that numpy would take five times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from sys import maxsize
from typing import NamedTuple

from outrider.runner.cost_book import RoundCosts

EPSILON = 1e-9  # negligible probability


@dataclass
class Allocation:
    """The drafts of a batch ranked by value."""

    gains: Sequence[Sequence[float]]  # [B][N]: accepted tokens that a draft at each depth adds
    made: Sequence[float]  # [B]: share of rounds with drafts
    nodes: Sequence[float]  # [N]: rows of the pass for each depth
    catch_up: Sequence[float]  # [B]: the proposer's seconds per emitted token to prefill what it has not seen
    costs: RoundCosts
    grammar_rate: float = 0.0  # rows that a grammar adds for each accepted draft, beyond those in ``costs``
    depths: Sequence[float] = range(maxsize)  # by K: depth of the mean draft if K are requested; the default: K

    def __post_init__(self) -> None:
        self.batch = len(self.gains)

    def are_alike(self, within: float) -> bool:
        """Return whether the expected gains of the first drafts of all requests differ by less than that share of the best."""
        firsts = [gains[0] * made for gains, made in zip(self.gains, self.made, strict=True)]
        return max(firsts) - min(firsts) <= within * max(firsts)

    def best_uniform(self, lengths: Sequence[int]) -> tuple[float, list[int]]:
        """Return the best tokens per second with one K of ``lengths`` for all requests, and that K per request."""
        speeds = self.uniform_speeds(lengths)
        at = speeds.index(max(speeds))
        return speeds[at], [lengths[at]] * self.batch

    def uniform_speeds(self, lengths: Sequence[int]) -> list[float]:
        """Return tokens per second with one K for all requests, for each of the ascending ``lengths``; equals ``speed``."""
        costs, p_plain = self.costs, prod([1 - made for made in self.made])
        p_drafted = 1 - p_plain
        share = 1.0 if costs.is_padded else sum(self.made) / self.batch / max(p_drafted, EPSILON)
        gained, total_catch_up, width, reached, speeds = 0.0, sum(self.catch_up), 1.0, 0, []
        for k in lengths:
            for depth in range(reached, k):
                for gains, made, own_catch_up in zip(self.gains, self.made, self.catch_up, strict=True):
                    gained += gains[depth] * made
                    total_catch_up += gains[depth] * made * own_catch_up
                width += self.nodes[depth] * share
            reached = k
            seconds = costs.draft(self.depths[k], self.batch) + p_plain * costs.plain + total_catch_up
            seconds += p_drafted * (costs.score(width + self.grammar_rate * gained / self.batch) + costs.overhead)
            speeds.append((self.batch + gained) / seconds)
        return speeds

    def best(self, lengths: Sequence[int]) -> tuple[float, list[int]]:
        """Return the best tokens per second with drafts up to one of ``lengths``, and the K of each request."""
        found, lens = 0.0, [0] * self.batch
        for k in lengths:
            chosen = [draft for draft in self._ranked if draft.depth <= k]
            speeds = self._speeds(k, chosen)
            most = max(speeds)
            if most > found:
                found, lens = most, [0] * self.batch
                for draft in chosen[: speeds.index(most) + 1]:
                    lens[draft.b] += 1
        return found, lens

    def speed(self, lens: Sequence[int]) -> float:
        """Return tokens per second with one K per request; ``lens[b]`` at most N, at least one above 0."""
        if min(lens) == max(lens):
            return self.uniform_speeds(lens[:1])[0]
        return self._speeds(max(lens), [draft for draft in self._ranked if draft.depth <= lens[draft.b]])[-1]

    @cached_property
    def _ranked(self) -> list[_Draft]:
        """Return every draft by descending value. Parents precede their children."""
        ranks, drafts = [], []
        for b, (gains, made) in enumerate(zip(self.gains, self.made, strict=True)):
            least = float("inf")
            for depth, (gain, nodes) in enumerate(zip(gains, self.nodes, strict=True), 1):
                least = min(least, gain / nodes)
                ranks.append(-least)
                drafts.append(_Draft(b, depth, gain * made, nodes))  # weighted by the share of rounds in which it exists
        return [drafts[at] for at in sorted(range(len(ranks)), key=ranks.__getitem__)]

    def _speeds(self, k: int, drafts: Iterable[_Draft]) -> list[float]:
        """Return tokens per second with the first draft, the first two, ..., when requesting k."""
        costs, batch, made, catch_up = self.costs, self.batch, self.made, self.catch_up
        grammar_rate = self.grammar_rate / batch
        score, overhead, is_padded = costs.score, costs.overhead, costs.is_padded
        gained, total_catch_up, tokens, num_drafting, deepest = 0.0, 0.0, 0.0, 0, 0
        p_plain = 1.0  # probability that no request has a draft and the pass is plain
        p_drafted = fixed_seconds = width = 0.0
        speeds = []
        for b, depth, gain, nodes in drafts:
            if depth == 1:
                num_drafting, p_plain, total_catch_up = num_drafting + 1, p_plain * (1 - made[b]), total_catch_up + catch_up[b]
                p_drafted = 1 - p_plain
                fixed_seconds = costs.draft(self.depths[k], num_drafting) + p_plain * costs.plain + p_drafted * overhead
            gained, total_catch_up = gained + gain, total_catch_up + catch_up[b] * gain
            if not is_padded:
                tokens += made[b] * nodes
                width = 1 + tokens / batch / max(p_drafted, EPSILON)
            elif depth > deepest:
                deepest, tokens = depth, tokens + nodes
                width = 1 + tokens
            speeds.append(
                (batch + gained) / (fixed_seconds + total_catch_up + p_drafted * score(width + grammar_rate * gained))
            )
        return speeds


class _Draft(NamedTuple):
    """A possible draft of a request."""

    b: int
    depth: int  # from 1
    gain: float  # expected accepted drafts that it adds
    nodes: float  # tokens in the pass that its depth adds
