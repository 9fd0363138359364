"""Acceptance probabilities of tree nodes, estimated from earlier rounds.

Accuracies measured on held-out text and the head's own confidences are priors only: the current text may be easier or harder,
and a head that learned whole distributions is less confident in its likeliest token than that token is often right when the
target takes its own likeliest. A tree grown by such confidences ends too early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.proposers.trees import TreeShape
from outrider.types import Context, Verdict

Floats = NDArray[np.float64]

CENTRES = tuple(range(-6, 7))  # bin centres: log-odds
LEAST = 1 / (1 + math.exp(-CENTRES[0]))  # confidences below it, and above 1 minus it, share a bin
BELIEF = 4.0  # weight of the head's own confidence, in drafts per bin
MEASURED = 16.0  # weight of the measured prior, in observations
MOST = 200.0  # limit of the effective number of drafts: older ones decay
REFRESH = 16  # observations between updates of the rates, which select a new tree shape


class Calibration:
    """Calibrates a head's confidence to the measured acceptance.

    Counts in bins of the log-odds, linearly interpolated (histogram binning: Zadrozny and Elkan 2001; Guo et al. 2017,
    section 4), with the likeliest child apart from its siblings. With few observations the confidence itself is used.
    """

    def __init__(self) -> None:
        believed = [1 / (1 + math.exp(-at)) for at in CENTRES]
        self._tried = [[BELIEF] * len(CENTRES) for _ in range(2)]  # [first child or other][bin]
        self._kept = [[BELIEF * rate for rate in believed] for _ in range(2)]
        self._rates: Floats | None = None  # cached rates of both rows

    def chances(self, confidences: Floats) -> Floats:
        """Map confidences [..., R], siblings with the likeliest first, to acceptance probabilities of the same shape.

        Impossible tokens, such as those that a grammar forbids, keep probability zero.
        """
        if self._rates is None:
            self._rates = np.array(self._kept) / np.array(self._tried)
        inner = np.clip(confidences, LEAST, 1 - LEAST)
        odds = np.log(inner) - np.log1p(-inner)
        chances: Floats = np.interp(odds, CENTRES, self._rates[1])
        chances[..., 0] = np.interp(odds[..., 0], CENTRES, self._rates[0])
        chances[confidences <= 0] = 0.0
        return chances

    def learn(self, confidences: Sequence[float], taken: int | None) -> None:
        """Count the children of one node, likeliest first: the target accepted number ``taken`` of confidences c1, c2, ..."""
        for rank, confidence in enumerate(confidences):
            tried, kept = self._tried[rank > 0], self._kept[rank > 0]
            inner = min(max(confidence, LEAST), 1 - LEAST)
            place = min(max(math.log(inner / (1 - inner)) - CENTRES[0], 0.0), len(CENTRES) - 1.0)
            below = min(int(place), len(CENTRES) - 2)
            for at, part in ((below, below + 1 - place), (below + 1, place - below)):
                tried[at] += part
                kept[at] += part * (rank == taken)
                if tried[at] > MOST:
                    tried[at], kept[at] = tried[at] / 2, kept[at] / 2
        self._rates = None


class SiblingRates:
    """Acceptance rate by depth and rank, given that the parent was accepted.

    Starts from the measured prior; ``table`` selects a tree of fixed shape (see ``trees.grown``).
    """

    def __init__(self, measured: Sequence[Sequence[float]]) -> None:
        """``measured[d][r]``: prior rate of the draft of rank r at depth d + 1."""
        self.table = tuple(tuple(row) for row in measured)
        self._tried = [[MEASURED] * len(row) for row in measured]
        self._kept = [[MEASURED * rate for rate in row] for row in measured]
        self._news = 0

    def learn(self, ranks: Sequence[int], taken: Sequence[int | None]) -> None:
        """Count one observation: ``ranks[d]`` drafts at depth d + 1, of which the target accepted rank ``taken[d]``."""
        for tried, kept, count, rank in zip(self._tried, self._kept, ranks, taken, strict=False):
            for at in range(min(count, len(tried))):
                tried[at] += 1
                kept[at] += at == rank
            if tried[0] > MOST:
                tried[:], kept[:] = [each / 2 for each in tried], [each / 2 for each in kept]
        self._news += 1
        if self._news == REFRESH:
            self._news = 0
            counts = zip(self._kept, self._tried, strict=True)
            self.table = tuple(tuple(a / b for a, b in zip(kept, tried, strict=True)) for kept, tried in counts)


class Drafted(Protocol):
    """A request's tree, until the verdict."""

    def learn(self, path: list[int], next_token: int) -> None:
        """``path``: the accepted nodes from the root; ``next_token``: the token after them."""
        ...


@dataclass(frozen=True)
class GrownTree:
    """The C candidates for one request's tree, and the chosen nodes."""

    tokens: list[int]
    parents: list[int]
    confidences: list[float]
    nodes: list[int]
    calibration: Calibration

    def learn(self, path: list[int], next_token: int) -> None:
        """``path``: the accepted nodes. Candidates outside the tree are compared, too."""
        children: dict[int, list[int]] = {}
        for each, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(each)
        at = -1
        for token in [*(self.tokens[self.nodes[node]] for node in path), next_token]:
            siblings = children.get(at, [])
            if not siblings:
                return
            taken = next((rank for rank, each in enumerate(siblings) if self.tokens[each] == token), None)
            self.calibration.learn([self.confidences[each] for each in siblings], taken)
            if taken is None:
                return
            at = siblings[taken]


@dataclass(frozen=True)
class DrawnTree:
    """The sampled tree of one request: the first ``count`` nodes of a shape."""

    shape: TreeShape
    count: int
    rates: SiblingRates

    def learn(self, path: list[int], next_token: int) -> None:
        """``path``: the accepted nodes."""
        ranks: list[int] = []
        taken: list[int | None] = []
        at = -1
        for node in (*path, None):
            siblings = [child for child in self.shape.children(at) if child < self.count]
            if not siblings:
                break
            ranks.append(len(siblings))
            taken.append(None if node is None else siblings.index(node))
            at = -1 if node is None else node
        self.rates.learn(ranks, taken)


def learn_from(drafted: dict[str, Drafted], context: Context, verdict: Verdict) -> None:
    """Pass the verdict to each request's tree once, for a proposer's ``commit``."""
    num_accepted, next_tokens = verdict.num_accepted.tolist(), verdict.next_token.tolist()
    for b, request_id in enumerate(context.request_ids):
        if request_id in drafted:
            drafted.pop(request_id).learn(verdict.path[b, : num_accepted[b]].tolist(), next_tokens[b])
