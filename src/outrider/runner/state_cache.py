"""The cache of recurrent layers: for each request a ring of states, the state after position p in slot p mod S.

A pass starts from the state after the last cached position and writes the state after each of its positions, so a verdict is
applied by setting the length: no state is copied or recomputed. States older than S positions are lost; a request that rolls
back further is prefilled again from its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Any)  # sortable
Shape = TypeVar("Shape")


def grouped(shapes: Mapping[Key, Shape]) -> tuple[tuple[tuple[Shape, int], ...], dict[Key, tuple[int, int]]]:
    """Group ``shapes``: each different one with its number, and the group of each key with its index in that group."""
    groups: dict[Shape, list[Key]] = {}
    for key, shape in sorted(shapes.items()):
        groups.setdefault(shape, []).append(key)
    places = {key: (group, index) for group, keys in enumerate(groups.values()) for index, key in enumerate(keys)}
    return tuple((shape, len(keys)) for shape, keys in groups.items()), places


class StateKey(NamedTuple):
    """Key of one recurrent state: its layer and its number in the layer. A convolution's state is its last inputs."""

    layer: int
    number: int
    is_conv: bool


class StateShape(NamedTuple):
    """Shape of a recurrent state at one position."""

    sizes: tuple[int, ...]
    taps: int = 0  # kernel size of a convolution, 0 for other states


@dataclass(frozen=True)
class StateShapes:
    """Shapes of a model's recurrent states; states of one shape share a tensor."""

    kinds: tuple[tuple[StateShape, int], ...] = ()  # each shape, and the number of its states
    places: Mapping[StateKey, tuple[int, int]] = field(default_factory=dict)  # kind of each state, and index in it

    def floats_per_row(self, slots: int) -> int:
        """Return the number of floats stored for one request."""
        return sum(torch.Size(store).numel() for store in self.stores(1, slots))

    def stores(self, rows: int, slots: int) -> list[tuple[int, ...]]:
        """Return the shape [L, R, S, ...] of each store; convolutions need ``taps`` more slots."""
        return [(count, rows, slots + shape.taps, *shape.sizes) for shape, count in self.kinds]


NO_STATES = StateShapes()


class StateCache:
    """Rings of ``max_drafts + 2`` states for the rows of a KV cache; ``stores``: [L, R, S, ...] float32, one of each shape."""

    def __init__(self, shapes: StateShapes, max_drafts: int, device: torch.device) -> None:
        self.shapes, self.slots = shapes, max_drafts + 2  # the state before the drafts must outlive self-drafting too
        self._device = device
        self._lost: list[int] = []  # by row: states before this position are overwritten
        self.stores = self._allocate(0)

    def _allocate(self, rows: int) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):
            return tuple(torch.zeros(shape, device=self._device) for shape in self.shapes.stores(rows, self.slots))

    def keep_rows(self, rows: Sequence[int | None]) -> None:
        """Rearrange the rows: row i becomes the former row ``rows[i]``, or empty if None."""
        stores, lost = self._allocate(len(rows)), [0 if source is None else self._lost[source] for source in rows]
        for new, old in zip(stores, self.stores, strict=True):
            for row, source in enumerate(rows):
                if source is not None:
                    new[:, row] = old[:, source]
        self.stores, self._lost = stores, lost

    def record_write(self, rows: Sequence[int], bases: Sequence[int], ends: Sequence[int]) -> None:
        """Record that a pass writes states at positions ``bases`` to ``ends``, exclusive; base 0 starts a new sequence."""
        if self.stores:
            for row, base, end in zip(rows, bases, ends, strict=True):
                self._lost[row] = max(self._lost[row] if base else 0, end - self.slots)

    def num_usable(self, row: int, num_tokens: int) -> int:
        """Return ``num_tokens`` if the row's state after that many tokens is still stored, else 0."""
        return num_tokens if not self.stores or num_tokens > self._lost[row] else 0

    def copy(self, source: int, target: int) -> None:
        """Copy the states of one row to another."""
        for store in self.stores:
            store[:, target] = store[:, source]
        if self.stores:
            self._lost[target] = self._lost[source]
