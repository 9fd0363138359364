"""KV cache that grows with its longest sequence, and in which rollback moves no data.

Every request owns a row, of which a part is valid. A pass writes after the row's committed slots; rejected drafts are
overwritten by the next pass. Only an accepted *tree* path that is not contiguous is gathered into place. The row of a finished
request may be kept until it is needed: a later request with the same prefix continues from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from outrider.runner import attention, recurrence
from outrider.runner.state_cache import NO_STATES, StateCache, StateShapes, grouped
from outrider.types import OutriderError, owner_of

MIN_SHARED_PREFIX = 16  # minimum common prefix worth reusing, in tokens
TEMPORARY = itertools.count()  # numbers of temporary rows
INDEXED = "its layers select tokens by a separate index, which Outrider's cache does not store"
SLACK = 64  # slots of a row beyond ``max_len``, for padding and for drafts past the end; more only when needed


class LayerShape(NamedTuple):
    """Shape of one layer's cache entry for a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class CacheShape:
    """What the layers of a model store for a token, and where: layers of one shape share a pair of tensors."""

    kinds: tuple[tuple[LayerShape, int], ...]  # each shape, and the number of its layers
    layer_places: tuple[tuple[int, int] | None, ...]  # by layer: its kind and its index in it; None: no entry
    states: StateShapes = NO_STATES  # of recurrent layers
    # Whether the model uses its own attention code: requests run one after another, each with all its keys and values.
    by_request: bool = False

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int) -> CacheShape:
        """Return the shape for layers that all store the same."""
        return cls.of({layer: LayerShape(num_kv_heads, key_dim, value_dim) for layer in range(num_layers)})

    @classmethod
    def of(
        cls, layers: Mapping[int, LayerShape], shared: Mapping[int, int] | None = None, states: StateShapes = NO_STATES
    ) -> CacheShape:
        """Return the shape for ``layers``: entries by layer; ``shared``: layers that read another layer's entries."""
        kinds, places = grouped(layers)
        places |= {layer: places[source] for layer, source in (shared or {}).items()}
        by_layer = tuple(places.get(layer) for layer in range(max(places, default=-1) + 1))
        return cls(kinds, by_layer, states)

    @property
    def is_recurrent(self) -> bool:
        """Return whether some layers keep a recurrent state: drafts must form one chain, and padding would change the state."""
        return bool(self.states.kinds)

    @property
    def floats_per_token(self) -> int:
        """Return the numbers stored per committed token over all layers."""
        return sum(count * kind.num_kv_heads * (kind.key_dim + kind.value_dim) for kind, count in self.kinds)

    def stores(self, rows: int, slots: int) -> list[tuple[int, ...]]:
        """Return the shape [L, R, Hkv, S, D] of each store: keys and values, in turn, of each kind of layer."""
        return [
            (count, rows, kind.num_kv_heads, slots, dim) for kind, count in self.kinds for dim in (kind.key_dim, kind.value_dim)
        ]


class PassThrough(Cache):
    """transformers' cache interface without storage: ``update`` returns what ``attention.update_cache`` does."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return attention.update_cache(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return [T]: position minus index of each token of the pass, which models add to the index; 0 outside of passes."""
        return attention.position_offsets()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length + attention.num_earlier(), 0

    @property
    def is_compileable(self) -> bool:
        return True

    # Recurrent layers see no earlier state and so take the code path of whole sequences, where they call Outrider's functions,
    # which read the states themselves.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        recurrence.set_next_state(layer_idx, state_idx)

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        recurrence.set_next_state(layer_idx, state_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        return recurrent_states

    def has_previous_state(self, *_: object, **__: object) -> bool:
        return False

    def is_recording_past(self, *_: object) -> bool:
        return False

    def update_indexer(self, *_: object, **__: object) -> NoReturn:
        raise OutriderError(INDEXED)


@dataclass
class _Row:
    """A row in use: of a running request, or of a finished one until the row is needed."""

    owner: str
    token_ids: Sequence[int] = ()  # its sequence, if rows are kept
    is_running: bool = True


class KVCache(PassThrough):
    """Keys and values of up to ``rows`` requests under transformers' ``Cache`` interface.

    ``stores`` are keys and values, in turn, of each kind of layer: [L, R, Hkv, S, D], L being the layers of that kind. S starts
    small and doubles when a request outgrows it, so memory follows use. transformers' ``update`` passes the new states
    through: Outrider's attention writes them itself, in one operation with the reading.
    """

    def __init__(
        self,
        shape: CacheShape,
        rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        budget: int | None = None,
        max_drafts: int = 16,
    ) -> None:
        """``budget``: byte limit of keys and values, with reservation at admission; None: no limit."""
        super().__init__()
        self.shape, self.max_rows, self.max_len = shape, rows, max_len
        self.dtype, self.device = dtype, device
        self.keeps_prefixes = True  # whether requests start from the entries of others, finished ones included
        self.lookahead = 0  # tokens after its own that an entry depends on, in the caches of heads that read the next token
        self._row_of: dict[str, int] = {}  # of running requests
        self._rows: dict[int, _Row] = {}  # rows in use; those of finished requests in the order of their last use
        self.states = StateCache(shape.states, max_drafts, device)
        bytes_per_slot = max(1, shape.floats_per_token * dtype.itemsize)
        self._state_slots = -(-self.row_bytes(0) // bytes_per_slot)  # a row's states, in slots
        self._budget = None if budget is None else budget // bytes_per_slot  # slots of all rows
        self._reserved: dict[str, int] = {}  # reserved slots by request
        if self._budget is not None:
            self.max_len = min(max_len, self._budget - SLACK - self._state_slots)
            if self.max_len < 2:
                raise OutriderError("kv_memory=... is too small for a single sequence: raise it")
        self.num_looked_up = self.num_reused = 0  # prompt tokens, and those found in kept rows
        self.on_compact: Callable[[Sequence[int]], None] | None = None  # called with the former row of each row
        self.cached_lens: list[int] = []  # by row: number of cached tokens
        self.capacity = 0  # slots of each row, at present
        self.stores = self._allocate(0, 0)

    def _allocate(self, rows: int, slots: int) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):  # it outlives the current pass and is written outside of passes too
            # attention never reads unwritten slots
            shapes = self.shape.stores(rows, slots)
            return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)

    def row_bytes(self, slots: int) -> int:
        """Return the memory of a row with that many slots, recurrent states included."""
        states = 4 * self.shape.states.floats_per_row(self.states.slots)
        return slots * self.shape.floats_per_token * self.dtype.itemsize + states

    @property
    def num_rows(self) -> int:
        """Return the number of rows at present."""
        return len(self.cached_lens)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that a pass reads and writes: ``stores``, then those of recurrent states."""
        return (*self.stores, *self.states.stores)

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def row(self, request_id: str) -> int:
        """Return the request's row, a free one for a new request. Raises ``OutriderError`` if none is free."""
        found = self._row_of.get(request_id)
        if found is None:
            if not self._free and not self._grow_rows():
                self._evict_row()
            found = self._free[0]
            self.cached_lens[found] = 0
            self._row_of[request_id], self._rows[found] = found, _Row(owner_of(request_id))
        return found

    @property
    def _free(self) -> list[int]:
        return [row for row in range(self.num_rows) if row not in self._rows]

    def release(self, request_ids: Sequence[str]) -> None:
        """Free the rows of finished requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._reserved.pop(request_id, None)
            row = self._row_of.pop(request_id, None)
            if row is not None:
                del self._rows[row]

    @contextmanager
    def temporary_rows(self, count: int) -> Iterator[list[int]]:
        """Lend empty rows, for checks and measurements. Raises ``OutriderError`` if too few are free."""
        names = [f"temporary-{next(TEMPORARY)}" for _ in range(count)]
        try:
            yield [self.row(name) for name in names]
        finally:
            self.release(names)

    # -- common prefixes ------------------------------------------------------------------------------------------------------

    def row_with_prefix(self, request_id: str, sequence: Sequence[int], limit: int | None = None) -> int:
        """Return the request's row; a new one starts with the longest cached prefix (see ``longest_prefix``)."""
        if not self.keeps_prefixes:
            return self.row(request_id)
        found = self._row_of.get(request_id)
        if found is None:
            source, length = self.longest_prefix(request_id, sequence, limit)
            self.num_looked_up += len(sequence)
            self.num_reused += length
            found = self.row(request_id) if source is None else self._claim_row(request_id, source, length)
            self.cached_lens[found] = length
        self._rows[found].token_ids = sequence
        return found

    def retire(self, request_ids: Sequence[str]) -> None:
        """Forget finished requests. With ``keeps_prefixes`` their caches are kept until the rows are needed."""
        for request_id in request_ids:
            row = self._row_of.get(request_id)
            if row is not None and self._rows[row].token_ids and self.cached_lens[row] >= MIN_SHARED_PREFIX:
                del self._row_of[request_id]
                kept = self._rows[row] = self._rows.pop(row)  # the most recently used
                kept.token_ids, kept.is_running = list(kept.token_ids[: self.cached_lens[row] + self.lookahead]), False
        self.release(request_ids)

    def longest_prefix(self, request_id: str, sequence: Sequence[int], limit: int | None = None) -> tuple[int | None, int]:
        """Return the row of the request's owner with the longest cached prefix of ``sequence[:-1]``, and its length.

        (None, 0) if that is shorter than ``MIN_SHARED_PREFIX``. ``limit``: the longest to use.
        """
        ahead = self.lookahead
        most_in_common = len(sequence) - 1 if limit is None else min(len(sequence) - 1, limit + ahead)
        owner = owner_of(request_id)
        held = [(row, each) for row, each in self._rows.items() if each.owner == owner]
        best, longest = None, MIN_SHARED_PREFIX - 1
        # Rows of finished requests first: a request can take one over, and needs a copy of a running one's.
        for row, each in sorted(held, key=lambda pair: pair[1].is_running):
            most = min(len(each.token_ids), self.cached_lens[row] + ahead, most_in_common)
            length = _common_prefix(each.token_ids, sequence, longest + 1 + ahead, most) - ahead
            if length > longest and self.states.num_usable(row, length):
                best, longest = row, length
        return best, longest if best is not None else 0

    def _claim_row(self, request_id: str, source: int, length: int) -> int:
        """Return a row for a request that shares a prefix with another row.

        That row itself if nothing else is in it, or hardly anything and no other is free.
        """
        if not self._rows[source].is_running:
            known = self._rows[source] = self._rows.pop(source)  # the most recently used
            num_lost = len(known.token_ids) - length - self.lookahead
            if num_lost == 0 or (num_lost < MIN_SHARED_PREFIX and not (self._free or self._grow_rows())):
                known.is_running = True
                self._row_of[request_id] = source
                return source
        target = self.row(request_id)
        if target != source:  # the same if no other row could be evicted
            self._copy_row(source, target, length)
        return target

    def _copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row to another."""
        for store in self.stores:
            store[:, target, :, :length] = store[:, source, :, :length]
        self.states.copy(source, target)

    def rollback(self, row: int, num_tokens: int) -> None:
        """Limit a row to its first ``num_tokens`` cached tokens; 0 if the recurrent state after them was overwritten.

        Drafts written after them may have overwritten it.
        """
        self.cached_lens[row] = self.states.num_usable(row, min(num_tokens, self.cached_lens[row]))

    def _evict_row(self) -> None:
        """Free the least recently used row of a finished request. Raises ``OutriderError`` if there is none."""
        kept = next((row for row, each in self._rows.items() if not each.is_running), None)
        if kept is None:
            raise OutriderError(f"more than {self.max_rows} concurrent requests: raise max_batch")
        del self._rows[kept]

    # -- memory ---------------------------------------------------------------------------------------------------------------

    def admit(self, request_id: str, num_tokens: int) -> bool:
        """Reserve memory for a sequence of that length, at most ``max_len``; return False if it does not fit.

        Call it only between rounds: kept rows may be dropped.
        """
        if self._budget is None:
            return True
        slots = max([num_tokens + SLACK, *self._reserved.values()])
        each = slots + self._state_slots
        rows = len(self._reserved) + 1
        if rows * each > self._budget:
            return False
        if max(self.num_rows, rows) * max(self.capacity + self._state_slots, each) > self._budget:
            self._compact(slots)
        self._reserved[request_id] = num_tokens + SLACK
        return True

    def _compact(self, slots: int) -> None:
        """Shrink to the rows of running requests, of at most ``slots`` slots; drop everything kept. ``reserve`` grows them."""
        sources = list(self._row_of.values())
        self._reallocate(sources, min(slots, self.capacity), num_drafted=0)
        self._rows = {row: self._rows[source] for row, source in enumerate(sources)}
        self._row_of = {name: row for row, name in enumerate(self._row_of)}
        if self.on_compact is not None:
            self.on_compact(sources)

    def cached_len(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        return 0 if row is None else self.cached_lens[row]

    def reserve(self, slots: int, num_drafted: int = 2 * SLACK) -> None:
        """Grow every row to at least ``slots`` slots, beyond the context if drafts or padding need it.

        ``num_drafted``: entries after each row's committed ones that are kept.
        """
        if slots <= self.capacity:
            return
        wanted = min(self.max_len + SLACK, max(2 * self.capacity, 256))
        if self._budget is not None:
            wanted = min(wanted, self._budget // max(self.num_rows, 1) - self._state_slots)
        # Beyond the budget (drafts have no reservations) it grows in small steps, but not with every token.
        self._reallocate(range(self.num_rows), wanted if wanted >= slots else slots + SLACK, num_drafted)

    def _grow_rows(self) -> bool:
        """Add rows. Return False at the maximum."""
        have = self.num_rows
        rows = min(self.max_rows, max(1, 2 * have))
        if self._budget is not None:
            most = self._budget // (max(self.capacity, *self._reserved.values(), 1) + self._state_slots)
            rows = min(rows, max(most, len(self._row_of) + 1))
        if rows <= have:
            return False
        self._reallocate([*range(have), *[None] * (rows - have)], self.capacity)
        return True

    def _reallocate(self, sources: Sequence[int | None], slots: int, num_drafted: int = 2 * SLACK) -> None:
        """Allocate all stores, or none if memory runs out: row i becomes the former row ``sources[i]``, or empty if None."""
        stores = self._allocate(len(sources), slots)
        for row, source in enumerate(sources):
            if source in self._rows:
                used = min(self.cached_lens[source] + num_drafted, self.capacity)
                for new, old in zip(stores, self.stores, strict=True):
                    new[:, row, :, :used] = old[:, source, :, :used]
        if [*sources] != [*range(self.num_rows)]:
            self.states.keep_rows(sources)
        self.cached_lens[:] = [0 if source is None else self.cached_lens[source] for source in sources]  # passes hold the list
        self.stores, self.capacity = stores, slots

    def pass_layout(self, tensors: Sequence[Tensor], hidden: Tensor | None = None) -> attention.PassLayout:
        """Return the layout of a pass over this cache, with the ``tensors`` of ``PassLayout.tensors``."""
        positions, rows, bases, ends, visible, *stores = tensors
        shape, inputs = self.shape, (positions, rows, bases, ends, visible)
        return attention.PassLayout(shape.layer_places, shape.states, *inputs, tuple(stores), hidden)

    # -- commit -------------------------------------------------------------------------------------------------------------

    def gather_path(self, row: int, first_slot: int, path: Sequence[int]) -> None:
        """Gather the accepted path of a tree, with node i in slot first_slot + i, to the slots from first_slot."""
        for depth, node in enumerate(path):  # a node's slot is not before its depth's, so none is overwritten before it is read
            if node != depth:
                for store in self.stores:
                    store[:, row, :, first_slot + depth] = store[:, row, :, first_slot + node]

    def copy_prefix(self, source_id: str, target_id: str, num_tokens: int) -> bool:
        """Copy the cached prefix of ``source_id`` to ``target_id``, if it is longer than its own.

        Return whether ``target_id`` holds ``num_tokens`` now.
        """
        used, source = min(self.cached_len(source_id), num_tokens), self._row_of.get(source_id)
        if source is None or self.states.num_usable(source, used) <= self.cached_len(target_id):
            return self.cached_len(target_id) >= num_tokens
        target = self.row(target_id)
        self._copy_row(source, target, used)
        self.cached_lens[target] = used
        return used >= num_tokens


def _common_prefix(first: Sequence[int], second: Sequence[int], least: int, most: int) -> int:
    """Return the length of the common prefix of two sequences, ``most`` at most; 0 if it is shorter than ``least``."""
    if most < least or list(first[:least]) != list(second[:least]):  # usual, and fast
        return 0
    return next((i for i in range(least, most) if first[i] != second[i]), most)
