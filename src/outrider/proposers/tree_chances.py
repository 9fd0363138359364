"""Acceptance probabilities of tree nodes, estimated from earlier rounds.

Accuracies measured in training and the head's own confidences are priors only. The current text may be easier or harder. And
in greedy decoding the head's likeliest token is accepted more often than its probability, because the target takes its
likeliest token, too: trees grown by uncalibrated confidences are too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.options import number, several
from outrider.proposers.trees import TreeShape

Floats = NDArray[np.float64]

RATES = several(number(0, 1), "a list of numbers from 0 to 1 (0.6,0.2)")  # kind of an option: acceptance rates
CENTRES = tuple(range(-6, 7))  # bin centres in log-odds of the confidence
MIN_CONFIDENCE = 1 / (1 + math.exp(-CENTRES[0]))  # confidences are clamped to this and to 1 minus this
CONFIDENCE_WEIGHT = 4.0  # weight of the head's own confidence as a prior, in drafts per bin
ACCURACY_WEIGHT = 16.0  # weight of the measured accuracy as a prior, in observations
MAX_COUNT = 200.0  # counts are halved when they exceed it, so that old observations decay
REFRESH = 16  # observations between updates of the rates, which select a new tree shape


class Calibration:
    """Calibrates a head's confidence to the measured acceptance.

    Counts in bins of the log-odds, linearly interpolated (histogram binning: Zadrozny and Elkan 2001; Guo et al. 2017,
    section 4), separately for the likeliest child and its siblings. Before any observation the result is the confidence.
    """

    def __init__(self) -> None:
        confidences = [1 / (1 + math.exp(-at)) for at in CENTRES]
        self._tried = [[CONFIDENCE_WEIGHT] * len(CENTRES) for _ in range(2)]  # [first child or other][bin]
        self._accepted = [[CONFIDENCE_WEIGHT * rate for rate in confidences] for _ in range(2)]
        self._rates: Floats | None = None  # cached ratio of the two

    def chances(self, confidences: Floats) -> Floats:
        """Map confidences [..., R], siblings with the likeliest first, to acceptance probabilities of the same shape.

        Impossible tokens, such as those that a grammar forbids, keep probability zero.
        """
        if self._rates is None:
            self._rates = np.array(self._accepted) / np.array(self._tried)
        inner = np.clip(confidences, MIN_CONFIDENCE, 1 - MIN_CONFIDENCE)
        odds = np.log(inner) - np.log1p(-inner)
        chances: Floats = np.interp(odds, CENTRES, self._rates[1])
        chances[..., 0] = np.interp(odds[..., 0], CENTRES, self._rates[0])
        chances[confidences <= 0] = 0.0
        return chances

    def chance(self, confidence: float) -> float:
        """Map the confidence of a likeliest child as ``chances`` does; much faster for a single value."""
        if confidence <= 0:
            return 0.0
        below, part = _place(confidence)
        tried, accepted = self._tried[0], self._accepted[0]
        chance = accepted[below] / tried[below]
        return chance + part * (accepted[below + 1] / tried[below + 1] - chance)

    def learn(self, confidences: Sequence[float], taken: int | None) -> None:
        """Count the children of one node, likeliest first; ``taken``: index of the accepted one, None if there is none."""
        for rank, confidence in enumerate(confidences):
            tried, accepted = self._tried[rank > 0], self._accepted[rank > 0]
            below, above = _place(confidence)
            for at, part in ((below, 1 - above), (below + 1, above)):
                tried[at] += part
                accepted[at] += part * (rank == taken)
                if tried[at] > MAX_COUNT:
                    tried[at], accepted[at] = tried[at] / 2, accepted[at] / 2
        self._rates = None


def _place(confidence: float) -> tuple[int, float]:
    """Return the bin below a confidence, and how far it lies towards the next one: 0 to 1."""
    inner = min(max(confidence, MIN_CONFIDENCE), 1 - MIN_CONFIDENCE)
    place = math.log(inner / (1 - inner)) - CENTRES[0]
    below = min(int(place), len(CENTRES) - 2)
    return below, place - below


class SiblingRates:
    """Acceptance rate by depth and rank, given that the parent was accepted.

    Starts from measured accuracies. ``table``: the rates, from which ``trees.best_tree`` selects the shape of a tree.
    """

    def __init__(self, measured: Sequence[Sequence[float]]) -> None:
        """``measured[d][r]``: prior rate of the draft of rank r at depth d + 1."""
        self.table = tuple(tuple(row) for row in measured)
        self._tried = [[ACCURACY_WEIGHT] * len(row) for row in measured]
        self._accepted = [[ACCURACY_WEIGHT * rate for rate in row] for row in measured]
        self._num_new = 0  # observations since the table was updated

    def learn(self, ranks: Sequence[int], taken: Sequence[int | None]) -> None:
        """Count one observation: ``ranks[d]`` drafts at depth d + 1, of which the target accepted rank ``taken[d]``."""
        for tried, accepted, count, rank in zip(self._tried, self._accepted, ranks, taken, strict=False):
            for at in range(min(count, len(tried))):
                tried[at] += 1
                accepted[at] += at == rank
            if tried[0] > MAX_COUNT:
                tried[:], accepted[:] = [each / 2 for each in tried], [each / 2 for each in accepted]
        self._num_new += 1
        if self._num_new == REFRESH:
            self._num_new = 0
            counts = zip(self._accepted, self._tried, strict=True)
            self.table = tuple(tuple(a / b for a, b in zip(accepted, tried, strict=True)) for accepted, tried in counts)


class DraftedTree(Protocol):
    """The tree of a request in this round, which updates acceptance estimates from the verdict."""

    def learn(self, path: list[int], next_token: int) -> None:
        """Update estimates. ``path``: the accepted nodes from the root; ``next_token``: the token after them."""
        ...


@dataclass(frozen=True)
class GrownTree:
    """A tree of point masses: C candidates, the indices ``nodes`` of those in the tree, and the calibration to update."""

    tokens: list[int]
    parents: list[int]
    confidences: list[float]
    nodes: list[int]
    calibration: Calibration

    def learn(self, path: list[int], next_token: int) -> None:
        """See ``DraftedTree.learn``. Candidates outside the tree are compared with the target's tokens, too."""
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
    """A sampled tree: the first ``count`` nodes of a shape, and the rates to update."""

    shape: TreeShape
    count: int
    rates: SiblingRates

    def learn(self, path: list[int], next_token: int) -> None:
        """See ``DraftedTree.learn``."""
        ranks: list[int] = []
        taken: list[int | None] = []
        for at, node in zip([-1, *path], [*path, None], strict=True):
            siblings = [child for child in self.shape.children(at) if child < self.count]
            if not siblings:
                break
            ranks.append(len(siblings))
            taken.append(None if node is None else siblings.index(node))
        self.rates.learn(ranks, taken)
