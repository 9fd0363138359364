"""Tree sizes: expected tokens against the measured seconds of drafting and scoring.

A node costs one row of the target's pass. Where rows are nearly free (a memory-bound GPU) trees grow to their limit; elsewhere
(most CPUs, full batches) smaller trees pay, often a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

from outrider.proposers.trees import TreeShape, grown, shape_of
from outrider.runner import ModelRunner
from outrider.runner.cost_book import CACHE_BUCKET
from outrider.types import Context

MEMORY = 0.9  # decay of earlier rounds
REFRESH = 16  # rounds after which costs are looked up again


@dataclass(frozen=True)
class TreeCosts:
    """Seconds of one round: drafted so far, and of the pass over 0, 1, ... nodes."""

    batch: int
    drafted: float
    passes: Sequence[float]

    def best_size(self, worths: Sequence[float]) -> tuple[int, float]:
        """Return the number of nodes with the most tokens per second, at least one, and that speed.

        ``worths``: expected accepted drafts that each further node adds over the batch, best first.
        """
        tokens = accumulate(worths, initial=float(self.batch))
        speeds = [each / (self.drafted + seconds) for each, seconds in zip(tokens, self.passes, strict=False)]
        best = max(range(1, len(speeds)), key=speeds.__getitem__)
        return best, speeds[best]

    def level_pays(self, worth: float, seconds: float, worths: Sequence[float]) -> bool:
        """Return whether a level that takes ``seconds`` to draft pays if one of its nodes adds ``worth``."""
        size, speed = self.best_size(worths)
        row = self.passes[min(size + 1, len(self.passes) - 1)] - self.passes[size]
        return worth > speed * (seconds + row)


class TreeSizes:
    """Tree sizes of one proposer: fixed by the user, else as many nodes as pay."""

    def __init__(self, target: ModelRunner, fixed: int | None) -> None:
        """``fixed``: drafts in a proposal; None: as many as pay, with costs measured here at both ends if unknown."""
        self.is_fixed = fixed is not None
        # With CPU matrix units 15 drafts and the root fill a tile of 16 rows; one more row costs as much as the whole tile.
        self.most = fixed or (60 if target.device.type == "cuda" else 15)
        self._costs = target.costs
        self._current: dict[tuple[int, int], tuple[int, TreeCosts]] = {}  # (batch, cache bucket) -> rounds until renewed, costs
        self._step = 0.0  # seconds per drafting step
        self._nodes_a_level = 2.0
        self._grown: dict[int, tuple[Sequence[Sequence[float]], list[tuple[int, ...]], list[float]]] = {}
        self._shapes: dict[tuple[int, int], TreeShape] = {}
        if not self.is_fixed and self._costs.plain_round(1, 0) is None:
            for width in (1, 1 + self.most):
                self._costs.record_pass(width, 1, 0, target.pass_cost(width, 1, 0, repeat=1))

    def expected(self, k: int) -> int:
        """Return the recent number of nodes of trees of depth k."""
        return max(1, min(self.most, round(self._nodes_a_level * k))) if k else 0

    def costs(self, context: Context) -> TreeCosts | None:
        """The costs of this round before any drafting; None where the size is fixed."""
        if self.is_fixed:
            return None
        batch, cache_len = len(context.requests), max([len(request.token_ids) for request in context.requests])
        key = batch, cache_len // CACHE_BUCKET
        left, found = self._current.get(key, (0, None))
        if found is None or left == 0:
            left, found = REFRESH, TreeCosts(batch, 0.0, self._costs.tree_scores(self.most, batch, cache_len))
        self._current[key] = left - 1, found
        return found

    def learn(self, num_nodes: int, depth: int, steps: int, started: float) -> None:
        """Record a round's tree, drafted in ``steps`` steps since ``started``."""
        seconds = (perf_counter() - started) / steps
        self._step = min(seconds, MEMORY * self._step + (1 - MEMORY) * seconds) if self._step else seconds
        self._nodes_a_level = MEMORY * self._nodes_a_level + (1 - MEMORY) * num_nodes / depth

    def shape(self, acceptance: Sequence[Sequence[float]], context: Context, is_levelwise: bool) -> TreeShape:
        """Return the static tree with the depth of ``acceptance`` (see ``trees.grown``).

        ``is_levelwise``: each level takes one drafting step.
        """
        k = len(acceptance)
        if k not in self._grown or self._grown[k][0] != acceptance:
            self._grown[k] = acceptance, *grown(acceptance, self.most)
            self._shapes = {key: shape for key, shape in self._shapes.items() if key[0] != k}
        _, paths, worths = self._grown[k]
        size, costs = len(paths), self.costs(context)
        if costs is not None:
            depths = accumulate([len(path) for path in paths], max, initial=0)
            passes = [
                seconds + self._step * (depth if is_levelwise else 1)
                for seconds, depth in zip(costs.passes, depths, strict=False)
            ]
            size, _ = TreeCosts(costs.batch, 0.0, passes).best_size([costs.batch * worth for worth in worths])
        if (k, size) not in self._shapes:
            self._shapes[k, size] = shape_of(paths[:size])
        return self._shapes[k, size]
