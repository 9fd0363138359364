"""Times of contenders on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from outrider.registry import PLAIN

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """A batch of prompts: the one at ``index`` of those with ``batch`` prompts each."""

    batch: int
    index: int


class Measurements:
    """Times of contenders relative to plain decoding, which runs in every turn.

    In a turn, plain decoding and each contender generate outputs for the same group of prompts, one after the other. Ratios
    within a turn cancel changes in the machine's speed. All contenders generate the same number of tokens for a group, so
    times are comparable.
    """

    def __init__(self) -> None:
        self._relative: dict[str, dict[Group, list[float]]] = {}  # label -> seconds / plain decoding's seconds, one per turn
        self._plain: dict[Group, list[float]] = {}  # seconds

    def add_turn(self, group: Group, seconds: Mapping[str, float]) -> None:
        """Add one turn. ``seconds``: label -> seconds, plain decoding included."""
        plain = seconds[PLAIN]
        self._plain.setdefault(group, []).append(plain)
        for label, each in seconds.items():
            self._relative.setdefault(label, {}).setdefault(group, []).append(each / plain)

    def num_turns(self, label: str, group: Group) -> int:
        """Return the number of turns of a contender."""
        return len(self._relative.get(label, {}).get(group, []))

    def groups(self, label: str) -> list[Group]:
        """Return the groups of prompts that a contender ran on."""
        return list(self._relative.get(label, {}))

    def seconds(self, labels: Sequence[str], groups: Sequence[Group]) -> Array:
        """Return the median seconds over all turns: [contenders, groups]."""
        rows = [[median(self._plain[group]) * median(self._relative[label][group]) for group in groups] for label in labels]
        return np.array(rows, dtype=np.float64)
