"""Choice of tree sizes by expected tokens per second, from measured times of drafting and scoring.

The question is that of Sequoia (Chen et al. 2024, arXiv 2402.12374): each node adds one row to the target's pass. If rows are
nearly free (a memory-bound GPU), the largest tree is the fastest; otherwise (most CPUs, full batches) a smaller one, often a
chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

from outrider.options import option, whole
from outrider.proposers.base import Proposer
from outrider.proposers.head_method import HeadConfig
from outrider.proposers.tree_chances import DraftedTree
from outrider.proposers.trees import TreeShape, best_tree, shape_of
from outrider.runner import ModelRunner
from outrider.runner.cost_book import CACHE_BUCKET
from outrider.types import Context, Verdict

DECAY = 0.9  # weight of earlier rounds in moving averages
REFRESH = 16  # rounds after which costs are read again from the cost book


@dataclass(frozen=True)
class TreeSizeConfig(HeadConfig):
    """Precision of a head, and the size of its trees."""

    max_nodes: int | None = option(whole(1), None, "Maximum drafts in a tree (default: the fastest number).")


@dataclass(frozen=True)
class TreeCosts:
    """Costs of one round in seconds."""

    batch: int
    draft_seconds: float  # spent on drafting so far
    passes: Sequence[float]  # target pass with 0, 1, ... nodes per request

    def best_size(self, gains: Sequence[float]) -> tuple[int, float]:
        """Return the number of nodes, at least 1, with the most tokens per second, and that speed.

        ``gains``: expected accepted drafts that each further node adds over the batch, best first.
        """
        tokens = accumulate(gains, initial=float(self.batch))
        speeds = [each / (self.draft_seconds + seconds) for each, seconds in zip(tokens, self.passes, strict=False)]
        best = max(range(1, len(speeds)), key=speeds.__getitem__)
        return best, speeds[best]

    def level_pays(self, gain: float, seconds: float, gains: Sequence[float]) -> bool:
        """Return whether to draft another level, which takes ``seconds`` and whose best node is expected to add ``gain``."""
        size, speed = self.best_size(gains)
        row = self.passes[min(size + 1, len(self.passes) - 1)] - self.passes[size]
        return gain > speed * (seconds + row)


class TreeSizes:
    """Tree sizes of one proposer: fixed by the user, or the size with the most tokens per second."""

    def __init__(self, target: ModelRunner, fixed: int | None, hidden: tuple[int, ...] = ()) -> None:
        """``fixed``: drafts per proposal; None: chosen by costs. Unknown costs are measured now, for 0 and all nodes.

        ``hidden``: the hidden states that passes report. Another kind of pass would be compiled besides.
        """
        self.is_fixed = fixed is not None
        # With CPU matrix units 15 drafts and the root fill a tile of 16 rows; one more row costs as much as the whole tile.
        self.max_nodes = fixed or (60 if target.device.type == "cuda" else 15)
        self._costs = target.costs
        self._current: dict[tuple[int, int], tuple[int, TreeCosts]] = {}  # (batch, cache bucket) -> rounds until refresh, costs
        self._step = 0.0  # seconds per drafting step
        self._nodes_per_level = 2.0
        self._best_trees: dict[int, tuple[Sequence[Sequence[float]], list[tuple[int, ...]], list[float]]] = {}
        self._shapes: dict[tuple[int, int], TreeShape] = {}
        if not self.is_fixed and self._costs.plain_round(1, 0) is None:
            for width in (1, 1 + self.max_nodes):
                self._costs.record_pass(width, 1, 0, target.measure_pass(width, 1, 0, repeat=1, hidden=hidden))

    def expected(self, k: int) -> int:
        """Return the number of nodes expected for trees of depth k, from recent rounds."""
        return max(1, min(self.max_nodes, round(self._nodes_per_level * k))) if k else 0

    def costs(self, context: Context) -> TreeCosts | None:
        """Return the costs of this round before any drafting; None if the size is fixed."""
        if self.is_fixed:
            return None
        batch, cache_len = len(context.requests), context.cache_len
        key = batch, cache_len // CACHE_BUCKET
        left, found = self._current.get(key, (0, None))
        if found is None or left == 0:
            left, found = REFRESH, TreeCosts(batch, 0.0, self._costs.tree_scores(self.max_nodes, batch, cache_len))
        self._current[key] = left - 1, found
        return found

    def learn(self, num_nodes: int, depth: int, steps: int, started: float) -> None:
        """Record the tree of a round, drafted in ``steps`` steps since ``started`` (``perf_counter``)."""
        seconds = (perf_counter() - started) / steps
        self._step = min(seconds, DECAY * self._step + (1 - DECAY) * seconds) if self._step else seconds
        self._nodes_per_level = DECAY * self._nodes_per_level + (1 - DECAY) * num_nodes / depth

    def shape(self, acceptance: Sequence[Sequence[float]], context: Context, is_levelwise: bool) -> TreeShape:
        """Return the shape of the best tree by ``acceptance`` (see ``trees.best_tree``), which has one row per depth.

        ``is_levelwise``: whether each level takes one drafting step; otherwise all levels together do.
        """
        k = len(acceptance)
        if k not in self._best_trees or self._best_trees[k][0] != acceptance:
            self._best_trees[k] = acceptance, *best_tree(acceptance, self.max_nodes)
            self._shapes = {key: shape for key, shape in self._shapes.items() if key[0] != k}
        _, paths, gains = self._best_trees[k]
        size, costs = len(paths), self.costs(context)
        if costs is not None:
            depths = accumulate([len(path) for path in paths], max, initial=0)
            passes = [
                seconds + self._step * (depth if is_levelwise else 1)
                for seconds, depth in zip(costs.passes, depths, strict=False)
            ]
            size, _ = TreeCosts(costs.batch, 0.0, passes).best_size([costs.batch * gain for gain in gains])
        if (k, size) not in self._shapes:
            self._shapes[k, size] = shape_of(paths[:size])
        return self._shapes[k, size]


class TreeProposer(Proposer):
    """Base class of proposers that draft trees of ``TreeSizes`` and learn from their acceptance."""

    def __init__(self, target: ModelRunner, max_nodes: int | None, needs_hidden: tuple[int, ...]) -> None:
        """``max_nodes``: see ``TreeSizeConfig``."""
        self.needs_hidden = needs_hidden
        self._sizes = TreeSizes(target, max_nodes, needs_hidden)
        self._trees: dict[str, DraftedTree] = {}  # request -> its tree of this round, until the verdict

    def num_nodes(self, k: int) -> int:
        return self._sizes.expected(k)

    def commit(self, context: Context, verdict: Verdict) -> None:
        """Update the acceptance estimates from the verdict."""
        for request_id, path, token in zip(context.request_ids, verdict.paths, verdict.next_tokens, strict=True):
            if request_id in self._trees:
                self._trees.pop(request_id).learn(path, token)
