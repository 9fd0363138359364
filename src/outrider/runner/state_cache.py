"""The cache of recurrent layers: for each request a ring of states, the state after position p in slot p mod S.

A pass starts from the state after the last cached position and writes the state after each of its positions, so a verdict is
applied by counting: no state is copied, and none is computed twice. What is older than S positions is gone; a request that
has to go back further is read again from its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class StateKey(NamedTuple):
    """One recurrent state of a model: which layer, and which of its states; a convolution's are its last inputs."""

    layer: int
    number: int
    is_conv: bool


class StateShape(NamedTuple):
    """What one such state holds at one position."""

    sizes: tuple[int, ...]
    taps: int = 0  # of a convolution: it reads the inputs at so many positions, the present one included


@dataclass(frozen=True)
class StateShapes:
    """The recurrent states of a model: those of one shape share a tensor."""

    kinds: tuple[tuple[StateShape, int], ...] = ()  # each shape that occurs, and how many states have it
    places: Mapping[StateKey, tuple[int, int]] = field(default_factory=dict)  # the kind of each state, and its index there

    @classmethod
    def of(cls, shapes: Mapping[StateKey, StateShape]) -> StateShapes:
        """``shapes``: that of each state."""
        counts: dict[StateShape, int] = {}
        places: dict[StateKey, tuple[int, int]] = {}
        for key, shape in sorted(shapes.items()):
            places[key] = (list(dict.fromkeys([*counts, shape])).index(shape), counts.get(shape, 0))
            counts[shape] = counts.get(shape, 0) + 1
        return cls(tuple(counts.items()), places)

    def floats_per_row(self, slots: int) -> int:
        """Numbers kept for one request."""
        return sum(count * (slots + shape.taps) * torch.Size(shape.sizes).numel() for shape, count in self.kinds)


def store_shapes(shapes: StateShapes, slots: int, rows: int) -> list[tuple[int, ...]]:
    """Of each store: [L, R, S, ...]; a convolution reads further back than a state."""
    return [(count, rows, slots + shape.taps, *shape.sizes) for shape, count in shapes.kinds]


NO_STATES = StateShapes()


class StateCache:
    """Rings of ``max_drafts + 2`` states for the rows of a KV cache; ``stores``: [L, R, S, ...] float32, one of each shape."""

    def __init__(self, shapes: StateShapes, max_drafts: int, device: torch.device) -> None:
        self.shapes, self.slots = shapes, max_drafts + 2  # the state before the drafts outlives a draft of the model's own, too
        self._device = device
        self._lost: list[int] = []  # by row: positions up to which, the last one excluded, states are gone
        self.stores = self._allocate(0)

    def _allocate(self, rows: int) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):
            return tuple(torch.zeros(shape, device=self._device) for shape in store_shapes(self.shapes, self.slots, rows))

    def keep_rows(self, rows: Sequence[int | None]) -> None:
        """Makes row i what row ``rows[i]`` was, or an empty one."""
        stores, lost = self._allocate(len(rows)), [0 if source is None else self._lost[source] for source in rows]
        for new, old in zip(stores, self.stores, strict=True):
            for row, source in enumerate(rows):
                if source is not None:
                    new[:, row] = old[:, source]
        self.stores, self._lost = stores, lost

    def wrote(self, rows: Sequence[int], bases: Sequence[int], ends: Sequence[int]) -> None:
        """A pass writes these rows' states at positions ``bases`` to ``ends``, exclusive; from 0 on a text begins anew."""
        if self.stores:
            for row, base, end in zip(rows, bases, ends, strict=True):
                self._lost[row] = max(self._lost[row] if base else 0, end - self.slots)

    def usable(self, row: int, num_tokens: int) -> int:
        """How many of a row's first ``num_tokens`` tokens, cached by now, need not be read again: all of them, or none."""
        return num_tokens if not self.stores or num_tokens > self._lost[row] else 0

    def copy(self, source: int, target: int) -> None:
        """Gives a row the states of another one."""
        for store in self.stores:
            store[:, target] = store[:, source]
        if self.stores:
            self._lost[target] = self._lost[source]
