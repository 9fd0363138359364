"""Distribute a round's drafts over requests to maximise tokens per second.

The value of a further draft is its acceptance probability, and every draft takes one row of the pass. So the optimum is among
few candidates: the best drafts of all requests, one more each time.

Plain Python: the arrays of a batch are so small that numpy would take five times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
        speeds = [self.speed([k] * self.batch) for k in lengths]
        at = speeds.index(max(speeds))
        return speeds[at], [lengths[at]] * self.batch

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
        gained, catch_up, tokens, p_plain, longest = 0.0, 0.0, 0.0, 1.0, max(lens)
        for k, gains, made, own_catch_up in zip(lens, self._total_gains, self.made, self.catch_up, strict=True):
            if k:
                gain = made * gains[k]
                gained, catch_up = gained + gain, catch_up + own_catch_up * (1 + gain)
                tokens, p_plain = tokens + made * self._total_nodes[k], p_plain * (1 - made)
        if self.costs.is_padded:
            tokens = self._total_nodes[longest]
        drafting = self.costs.draft(self.depths[longest], self.batch - lens.count(0))
        return self._speed(drafting, p_plain, gained, catch_up, tokens)

    @cached_property
    def _total_gains(self) -> list[list[float]]:
        """Return [B][N + 1]: accepted tokens with the first drafts."""
        return [[*accumulate(gains, initial=0.0)] for gains in self.gains]

    @cached_property
    def _total_nodes(self) -> list[float]:
        """Return [N + 1]: rows of the pass up to a depth."""
        return [*accumulate(self.nodes, initial=0.0)]

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
        costs, made, own_catch_up = self.costs, self.made, self.catch_up
        gained, catch_up, tokens, drafting, p_plain, num_drafting, deepest = 0.0, 0.0, 0.0, 0.0, 1.0, 0, 0
        speeds = []
        for b, depth, gain, nodes in drafts:
            if depth == 1:
                num_drafting, p_plain, catch_up = num_drafting + 1, p_plain * (1 - made[b]), catch_up + own_catch_up[b]
                drafting = costs.draft(self.depths[k], num_drafting)
            gained, catch_up = gained + gain, catch_up + own_catch_up[b] * gain
            if not costs.is_padded:
                tokens += made[b] * nodes
            elif depth > deepest:
                deepest, tokens = depth, tokens + nodes
            speeds.append(self._speed(drafting, p_plain, gained, catch_up, tokens))
        return speeds

    def _speed(self, drafting: float, p_plain: float, gained: float, catch_up: float, tokens: float) -> float:
        """Return tokens per second.

        ``drafting``, ``catch_up``: seconds of the proposer; ``p_plain``: probability that no request has a draft, so that the
        round is plain; ``tokens``: mean drafts in the pass, of all requests together, or of each if padded.
        """
        costs, batch, p_drafted = self.costs, self.batch, 1 - p_plain
        width = 1 + (tokens if costs.is_padded else tokens / batch / max(p_drafted, EPSILON))
        seconds = drafting + catch_up + p_plain * costs.plain
        seconds += p_drafted * (costs.score(width + self.grammar_rate * gained / batch) + costs.overhead)
        return (batch + gained) / seconds


class _Draft(NamedTuple):
    """A possible draft of a request."""

    b: int
    depth: int  # from 1
    gain: float  # expected accepted drafts that it adds
    nodes: float  # tokens in the pass that its depth adds
