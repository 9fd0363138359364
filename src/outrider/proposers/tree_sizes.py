"""How large a token tree pays: the tokens it promises against the seconds of drafting and of scoring it, both as measured.

A node costs a row of the target's pass. Where rows are nearly free (a GPU that waits for its weights) trees grow to their
limit; where they are not (most CPUs, full batches) a tree of the nodes that pay is smaller, and a chain often best.
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

MEMORY = 0.9  # of what was seen of earlier rounds
REFRESH = 16  # rounds after which costs are looked up again


@dataclass(frozen=True)
class TreeCosts:
    """Seconds of one round: drafted so far, and of the pass over 0, 1, ... nodes."""

    batch: int
    drafted: float
    passes: Sequence[float]

    def best_size(self, worths: Sequence[float]) -> tuple[int, float]:
        """The number of nodes with the most tokens a second, at least one, and that speed.

        ``worths``: expected accepted drafts that each further node adds over the batch, best first.
        """
        tokens = accumulate(worths, initial=float(self.batch))
        speeds = [each / (self.drafted + seconds) for each, seconds in zip(tokens, self.passes, strict=False)]
        best = max(range(1, len(speeds)), key=speeds.__getitem__)
        return best, speeds[best]

    def level_pays(self, worth: float, seconds: float, worths: Sequence[float]) -> bool:
        """Whether a level that takes so many seconds to draft pays if one of its nodes adds as much as ``worth``."""
        size, speed = self.best_size(worths)
        row = self.passes[min(size + 1, len(self.passes) - 1)] - self.passes[size]
        return worth > speed * (seconds + row)


class TreeSizes:
    """The sizes of one proposer's trees: fixed where the user says so, else what pays."""

    def __init__(self, target: ModelRunner, fixed: int | None) -> None:
        """``fixed``: drafts in a proposal; None: as many as pay, measured here at the two ends where nobody has yet."""
        self.is_fixed = fixed is not None
        # On a CPU's matrix units 15 drafts and the root fill a tile of 16 rows: one more would cost as much as all of them.
        self.most = fixed or (60 if target.device.type == "cuda" else 15)
        self._costs = target.costs
        self._current: dict[tuple[int, int], tuple[int, TreeCosts]] = {}  # (batch, cache bucket) -> rounds until renewed, costs
        self._step = 0.0  # seconds of a step of drafting
        self._nodes_a_level = 2.0
        self._grown: dict[int, tuple[Sequence[Sequence[float]], list[tuple[int, ...]], list[float]]] = {}
        self._shapes: dict[tuple[int, int], TreeShape] = {}
        if not self.is_fixed and self._costs.plain_round(1, 0) is None:
            for width in (1, 1 + self.most):
                self._costs.record_pass(width, 1, 0, target.pass_cost(width, 1, 0, repeat=1))

    def expected(self, k: int) -> int:
        """Nodes of a tree of depth k, as they lately were."""
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
        """Adds a round's tree, drafted in so many steps from ``started`` on."""
        seconds = (perf_counter() - started) / steps
        self._step = min(seconds, MEMORY * self._step + (1 - MEMORY) * seconds) if self._step else seconds
        self._nodes_a_level = MEMORY * self._nodes_a_level + (1 - MEMORY) * num_nodes / depth

    def shape(self, acceptance: Sequence[Sequence[float]], context: Context, is_levelwise: bool) -> TreeShape:
        """The static tree, as deep as ``acceptance`` is long (see ``trees.grown``).

        ``is_levelwise``: each level takes a step of drafting of its own.
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
