"""The KV cache: preallocated, ragged, and free to roll back.

Every request owns a row. A pass writes behind the row's committed slots; what a verdict rejects is simply overwritten by the
next pass, so rollback moves no data. Only an accepted *tree* path that is not contiguous is gathered into place. A row of a
request that ended may stay until it is needed: the next request that begins with the same text goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from outrider.types import OutriderError

SHARED = 16  # tokens from which on a common beginning is worth taking over
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

    def __init__(
        self,
        shape: CacheShape,
        rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        budget: int | None = None,
    ) -> None:
        """``budget``: bytes that keys and values may take, where requests are admitted before they come; None: no limit."""
        super().__init__(layers=[])
        self.shape, self.max_rows, self.max_len = shape, rows, max_len
        self.dtype, self._device = dtype, device
        self._row_of: dict[str, int] = {}
        self._texts: dict[str, Sequence[int]] = {}  # of requests with a row, as they grow, where rows are to be kept
        self._kept: dict[int, list[int]] = {}  # row of an ended request -> its text; the least recently used first
        self._budget = None if budget is None else budget // (shape.floats_per_token * dtype.itemsize)  # slots, all rows'
        self._promised: dict[str, int] = {}  # slots set apart for requests
        if self._budget is not None:
            self.max_len = min(max_len, self._budget - SLACK)
            if self.max_len < 2:
                raise OutriderError("the memory for the cache does not hold a single text: raise kv_memory")
        self.num_looked_up = self.num_reused = 0  # tokens of prompts, and those of them that a kept row had
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
            if not self._free and not self._grow_rows():
                self._free.append(self._evicted())
            found = self._row_of[request_id] = self._free.pop()
            self.cached_lens[found] = 0
        return found

    def release(self, request_ids: Sequence[str]) -> None:
        """Frees the rows of requests that ended; unknown ids are ignored."""
        for request_id in request_ids:
            self._texts.pop(request_id, None)
            self._promised.pop(request_id, None)
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._free.append(row)

    # -- common beginnings ----------------------------------------------------------------------------------------------------

    def row_for(self, request_id: str, text: Sequence[int]) -> int:
        """The request's row; a new request starts with the longest beginning of its text that any row holds."""
        if request_id in self._row_of:
            self._texts[request_id] = text
            return self._row_of[request_id]
        row, length = self._longest_beginning(text)
        self.num_looked_up += len(text)
        if row is None:
            found = self.row(request_id)
        else:
            self.num_reused += length
            found = self._taken_over(request_id, row, length)
            self.cached_lens[found] = length
        self._texts[request_id] = text
        return found

    def retire(self, request_ids: Sequence[str]) -> None:
        """Keeps what is cached of requests that ended, until their rows are needed."""
        for request_id in request_ids:
            text, row = self._texts.get(request_id), self._row_of.get(request_id)
            if text is not None and row is not None and self.cached_lens[row] >= SHARED:
                del self._row_of[request_id]
                self._kept[row] = list(text[: self.cached_lens[row]])

    def _longest_beginning(self, text: Sequence[int]) -> tuple[int | None, int]:
        """The row that holds most of a text's beginning, all but the last token at most, and how much that is."""
        held: list[tuple[int, Sequence[int]]] = [*self._kept.items()]
        held += [(self._row_of[name], known) for name, known in self._texts.items() if name in self._row_of]
        best, longest = None, SHARED - 1
        for row, known in held:
            most = min(len(known), self.cached_lens[row], len(text) - 1)
            if most > longest:
                if list(known[: longest + 1]) != list(text[: longest + 1]):
                    continue  # most rows hold another text
                length = next((i for i in range(longest + 1, most) if known[i] != text[i]), most)
                best, longest = row, length
        return best, longest

    def _taken_over(self, request_id: str, source: int, length: int) -> int:
        """A row for a request that begins with the first tokens of another row: that row itself where nothing else is free."""
        known = self._kept.get(source)
        if known is not None and (length == len(known) or not (self._free or self._grow_rows())):
            del self._kept[source]
            self._row_of[request_id] = source
            return source
        if known is not None:
            self._kept[source] = self._kept.pop(source)  # now the most recently used
        target = self.row(request_id)
        for store in (self.keys, self.values):
            store[:, target, :, :length] = store[:, source, :, :length]
        return target

    def _evicted(self) -> int:
        """The row of the ended request that was least recently used. Raises ``OutriderError`` where there is none."""
        if not self._kept:
            raise OutriderError(f"more than {self.max_rows} requests at once: raise max_batch")
        row = next(iter(self._kept))
        del self._kept[row]
        return row

    # -- memory ---------------------------------------------------------------------------------------------------------------

    def admit(self, request_id: str, num_tokens: int) -> bool:
        """Sets memory apart for a text of so many tokens; False where it does not fit beside what was promised before.

        At most ``max_len``. Between rounds only: rows that hold nothing under way may have to go for it.
        """
        if self._budget is None:
            return True
        slots = max(num_tokens + SLACK, *self._promised.values(), 0)
        rows = len(self._promised) + 1
        if rows * slots > self._budget:
            return False
        if max(len(self.cached_lens), rows) * max(self.capacity, slots) > self._budget:
            self._compact(slots)
        self._promised[request_id] = num_tokens + SLACK
        return True

    def _compact(self, slots: int) -> None:
        """Only the rows of requests under way, of no more than so many slots: everything kept is dropped."""
        lens, moved, slots = self.cached_lens, list(self._row_of.items()), min(slots, self.capacity)
        keys = self._allocate(len(moved), slots, self.shape.key_dim)
        values = self._allocate(len(moved), slots, self.shape.value_dim)
        for row, (_, source) in enumerate(moved):
            used = lens[source]
            keys[:, row, :, :used] = self.keys[:, source, :, :used]
            values[:, row, :, :used] = self.values[:, source, :, :used]
        self.keys, self.values = keys, values
        self._row_of = {name: row for row, (name, _) in enumerate(moved)}
        self.cached_lens = [lens[source] for _, source in moved]
        self._kept.clear()
        self._free.clear()

    def cached_len(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        return 0 if row is None else self.cached_lens[row]

    def reserve(self, slots: int) -> None:
        """Makes every row hold at least ``slots`` slots: beyond the window too, where drafts or padding may reach."""
        if slots <= self.capacity:
            return
        wanted = min(self.max_len + SLACK, max(2 * self.capacity, 256))
        if self._budget is not None:
            wanted = min(wanted, self._budget // max(len(self.cached_lens), 1))
        # Beyond the budget (that of a draft, for which nothing is set apart) it grows by little, but not with every token.
        self._resize(self.keys.shape[1], wanted if wanted >= slots else slots + SLACK)

    def _grow_rows(self) -> bool:
        """Makes more rows. False where all that there may be are there."""
        have = len(self.cached_lens)
        rows = min(self.max_rows, max(1, 2 * have))
        if self._budget is not None:
            most = self._budget // max(self.capacity, *self._promised.values(), 1)
            rows = min(rows, max(most, len(self._row_of) + 1))
        if rows <= have:
            return False
        self._resize(rows, self.capacity)
        self._free.extend(reversed(range(have, rows)))
        self.cached_lens.extend([0] * (rows - have))
        return True

    def _resize(self, rows: int, slots: int) -> None:
        """Both or, where there is no memory for the second, none: they are used as one."""
        self.keys, self.values = self._resized(self.keys, rows, slots), self._resized(self.values, rows, slots)

    def _resized(self, old: Tensor, rows: int, slots: int) -> Tensor:
        new = self._allocate(rows, slots, old.shape[4])
        for row in [*self._row_of.values(), *self._kept]:
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

    def copy(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Gives ``target_id`` what is cached of the first tokens of ``source_id``, if that is more than it has."""
        used = min(self.cached_len(source_id), num_tokens)
        if used <= self.cached_len(target_id):
            return
        source, target = self.row(source_id), self.row(target_id)
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
