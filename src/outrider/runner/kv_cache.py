"""The KV cache: preallocated, ragged, and free to roll back.

Every request owns a row. A pass writes behind the row's committed slots; what a verdict rejects is simply overwritten by the
next pass, so rollback moves no data. Only an accepted *tree* path that is not contiguous is gathered into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from outrider.types import OutriderError

SLACK = 64  # slots behind max_len for the padding of a pass and for drafts that reach over the end; more only when needed


@dataclass(frozen=True)
class CacheShape:
    """What one layer stores of one token."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def floats_per_token(self) -> int:
        """Numbers kept per committed token, all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache(Cache):
    """Keys and values of up to ``rows`` requests under transformers' ``Cache`` interface.

    ``keys`` and ``values`` are [L, R, Hkv, S, D]. S starts small and doubles when a request outgrows it, so memory follows
    use. transformers' ``update`` passes the new states through: Outrider's attention writes them itself, in one operation with
    the reading.
    """

    def __init__(self, shape: CacheShape, rows: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        self.shape, self.max_rows, self.max_len = shape, rows, max_len
        self.dtype, self._device = dtype, device
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []
        self.cached_lens: list[int] = []  # by row: tokens whose keys and values stand in the cache
        self.keys = self._allocate(0, 0, shape.key_dim)
        self.values = self._allocate(0, 0, shape.value_dim)

    def _allocate(self, rows: int, slots: int, dim: int) -> Tensor:
        shape = (self.shape.num_layers, rows, self.shape.num_kv_heads, slots, dim)
        with torch.inference_mode(False):  # it outlives the pass that it grew in, and is written to outside of passes too
            return torch.empty(shape, dtype=self.dtype, device=self._device)  # attention never reads what was not written

    @property
    def capacity(self) -> int:
        """Slots a row has at present."""
        return int(self.keys.shape[3])

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def row(self, request_id: str) -> int:
        """The request's row, a free one for a request not seen before. Raises ``OutriderError`` when all are taken."""
        found = self._row_of.get(request_id)
        if found is None:
            if not self._free:
                self._grow_rows()
            found = self._row_of[request_id] = self._free.pop()
            self.cached_lens[found] = 0
        return found

    def release(self, request_ids: Sequence[str]) -> None:
        """Frees the rows of requests that ended; unknown ids are ignored."""
        for request_id in request_ids:
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._free.append(row)

    def cached_len(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        return 0 if row is None else self.cached_lens[row]

    def reserve(self, slots: int) -> None:
        """Makes every row hold at least ``slots`` slots: beyond the window too, where a ragged pass's padding may reach."""
        if slots <= self.capacity:
            return
        wanted = max(slots, min(self.max_len + SLACK, max(2 * self.capacity, 256)))
        self.keys = self._resized(self.keys, self.keys.shape[1], wanted)
        self.values = self._resized(self.values, self.values.shape[1], wanted)

    def _grow_rows(self) -> None:
        have = len(self.cached_lens)
        if have >= self.max_rows:
            raise OutriderError(f"more than {self.max_rows} requests at once: raise max_batch")
        rows = min(self.max_rows, max(1, 2 * have))
        self.keys = self._resized(self.keys, rows, self.capacity)
        self.values = self._resized(self.values, rows, self.capacity)
        self._free.extend(reversed(range(have, rows)))
        self.cached_lens.extend([0] * (rows - have))

    def _resized(self, old: Tensor, rows: int, slots: int) -> Tensor:
        new = self._allocate(rows, slots, old.shape[4])
        for row in self._row_of.values():
            used = min(self.cached_lens[row] + 2 * SLACK, old.shape[3])  # with the drafts of a round not committed yet
            if row < old.shape[1] and used:
                new[:, row, :, :used] = old[:, row, :, :used]
        return new

    # -- commit -------------------------------------------------------------------------------------------------------------

    def keep(self, row: int, first_slot: int, path: Sequence[int]) -> None:
        """Gathers the accepted path of a tree, whose node i stands in slot first_slot + i, to the slots from first_slot on."""
        moved = [(first_slot + depth, first_slot + node) for depth, node in enumerate(path) if node != depth]
        if not moved:
            return
        to, source = (torch.tensor(slots, device=self._device) for slots in zip(*moved, strict=True))
        for store in (self.keys, self.values):
            store[:, row, :, to] = store[:, row, :, source]

    def copy(self, source_id: str, target_id: str) -> None:
        """Gives ``target_id`` the cached text of ``source_id``."""
        source, target = self.row(source_id), self.row(target_id)
        used = self.cached_lens[source]
        for store in (self.keys, self.values):
            store[:, target, :, :used] = store[:, source, :, :used]
        self.cached_lens[target] = used

    def read(self, request_id: str) -> tuple[Tensor, Tensor]:
        """Copies of the committed keys and values of a request: [L, Hkv, T, D] each."""
        row, used = self.row(request_id), self.cached_len(request_id)
        return self.keys[:, row, :, :used].clone(), self.values[:, row, :, :used].clone()

    # -- transformers' interface ----------------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    @property
    def is_compileable(self) -> bool:
        return True


def cache_shape(config: PreTrainedConfig) -> CacheShape:
    """Reads a text config. Raises ``OutriderError`` for architectures whose state cannot be rolled back or differs by layer."""
    known = {"full_attention", "sliding_attention"}
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = ("mamba", "rwkv", "recurrent", "linear_attn", "ssm", "hybrid", "jamba", "zamba", "xlstm")
    hints = [word for word in recurrent if word in str(config.model_type).lower()]
    if kinds - known or hints or getattr(config, "attention_chunk_size", None):
        odd = ", ".join(sorted(kinds - known)) or (f"model type {config.model_type}" if hints else "chunked attention")
        raise OutriderError(
            f"{config.model_type} keeps state that cannot be rolled back token by token ({odd}):"
            " speculation needs a plain KV cache"
        )
    if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0):
        raise OutriderError(f"{config.model_type} shares KV between layers, which Outrider's cache does not support")
    heads = _one_number(config, "num_attention_heads")
    kv_heads = 1 if getattr(config, "multi_query", False) else _one_number(config, "num_key_value_heads", heads)
    dim = _one_number(config, "head_dim", _one_number(config, "hidden_size") // heads)
    key_dim = value_dim = dim
    if getattr(config, "qk_nope_head_dim", None) is not None:  # multi-head latent attention: keys and values differ
        key_dim, value_dim = int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim), int(config.v_head_dim)
        kv_heads = heads
    return CacheShape(_one_number(config, "num_hidden_layers"), kv_heads, key_dim, value_dim)


def _one_number(config: PreTrainedConfig, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None) or default
    if not isinstance(value, int):
        raise OutriderError(f"{config.model_type} gives no {name} that holds for all layers: Outrider's cache does not fit it")
    return value
