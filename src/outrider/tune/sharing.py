"""The width of a pass, shared out: of all the drafts that a round could score, those of the requests for which they pay.

A further draft of a request is worth the chance that it survives, and every one takes the same room in the pass. So the most
tokens a second are found among few candidates: the best drafts of all requests, one more each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoundPrices:
    """Seconds of a round's parts, for the batch at hand."""

    plain: float  # a whole round without drafts
    outside: float  # verifier and host of a round with drafts
    draft: Callable[[int, Ints], Floats]  # (k, requests drafted for) -> seconds
    score: Callable[[Floats], Floats]  # width -> seconds
    is_padded: bool  # a pass runs as many tokens of each request as of the one with the most


class Shares:
    """The drafts of a batch in the order of their worth."""

    def __init__(self, worths: Floats, made: Floats, nodes: Ints, reading: Floats, prices: RoundPrices) -> None:
        """``worths`` [B, N]: accepted drafts that depth i + 1 adds, if the request has drafts; ``made`` [B]: how often it has.

        ``nodes`` [N]: tokens in the pass at each depth; ``reading`` [B]: seconds that a proposer owes for each emitted token,
        because it has not seen the text before.
        """
        self.batch, self._nodes, self._prices = len(worths), nodes, prices
        self._worths, self._made, self._reading = worths, made, reading

    def best_together(self, lengths: Sequence[int]) -> tuple[float, list[int]]:
        """The most tokens a second that one K of ``lengths`` for all requests brings, and that K for each."""
        speeds = self.together(lengths)
        at = int(speeds.argmax())
        return float(speeds[at]), [lengths[at]] * self.batch

    def together(self, lengths: Sequence[int]) -> Floats:
        """Tokens a second if all requests have one K, for each of ``lengths``: as ``speed`` says, all at once."""
        at, prices, everybody = np.array(lengths) - 1, self._prices, np.array([self.batch])
        made, nobody = self._made, float(np.prod(1 - self._made))
        worths = (self._worths * made[:, None]).cumsum(axis=1)[:, at]
        drafts = self._nodes.cumsum()[at] * (1 - nobody if prices.is_padded else made.sum() / self.batch)
        widths = 1 + drafts / max(1 - nobody, 1e-9)
        seconds = np.array([prices.draft(k, everybody)[0] for k in lengths]) + nobody * prices.plain
        seconds += (1 - nobody) * (prices.score(widths) + prices.outside) + self._reading @ (1 + worths)
        speeds: Floats = (self.batch + worths.sum(axis=0)) / seconds
        return speeds

    def best(self, lengths: Sequence[int]) -> tuple[float, list[int]]:
        """The most tokens a second that drafts no longer than one of ``lengths`` bring, and the K of each request."""
        found, lens = 0.0, [0] * self.batch
        rows, depths = self._ranked
        for k in lengths:
            chosen = depths <= k
            speeds = self._speeds(k, chosen)
            at = int(speeds.argmax())
            if speeds[at] > found:
                found, lens = float(speeds[at]), np.bincount(rows[chosen][: at + 1], minlength=self.batch).tolist()
        return found, lens

    def speed(self, lens: Sequence[int]) -> float:
        """Tokens a second if each request has its own K; ``lens[b]`` at most N, one of them above 0."""
        if min(lens) == max(lens):
            return float(self.together(lens[:1])[0])
        rows, depths = self._ranked
        return float(self._speeds(max(lens), depths <= np.array(lens)[rows])[-1])

    @cached_property
    def _ranked(self) -> tuple[Ints, Ints]:
        """Request and depth of every draft, the most worth first. None stands before the one that it hangs on."""
        ranks = np.minimum.accumulate(self._worths / self._nodes, axis=1)
        order = np.argsort(-ranks, axis=None, kind="stable")
        rows, depths = np.divmod(order, self._worths.shape[1])
        return rows, depths + 1

    def _speeds(self, k: int, chosen: NDArray[np.bool_]) -> Floats:
        """Tokens a second with the first one of the chosen drafts, the first two, ..., asking for k."""
        rows, depths, prices = self._ranked[0][chosen], self._ranked[1][chosen], self._prices
        rows_made, reading = self._made[rows], self._reading[rows]
        worths = self._worths[rows, depths - 1] * rows_made  # a draft that is rarely made is as rarely paid for
        is_first = depths == 1
        num_drafting = is_first.cumsum()
        nobody = np.where(
            is_first, 1 - rows_made, 1.0
        ).cumprod()  # chance that no request has a draft, and the pass is a plain one
        drafts = (rows_made * self._nodes[depths - 1]).cumsum() / self.batch
        if prices.is_padded:
            drafts = self._nodes.cumsum()[np.maximum.accumulate(depths) - 1] * (1 - nobody)
        widths = 1 + drafts / np.maximum(1 - nobody, 1e-9)
        seconds = prices.draft(k, num_drafting) + nobody * prices.plain + (1 - nobody) * (prices.score(widths) + prices.outside)
        seconds += (reading * (is_first + worths)).cumsum()
        speeds: Floats = (self.batch + worths.cumsum()) / seconds
        return speeds
