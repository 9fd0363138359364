"""``outrider::attend`` on a GPU, in Triton: a kernel writes new keys and values, one attends, one joins parts of long texts.

Slots are read in parts of PART, so that few tokens of a long text still occupy the whole GPU ("flash-decoding"); each part
keeps a running maximum (FlashAttention, Dao et al. 2022). Parts begin at fixed slots, so the sums of a token do not depend on
the number of other tokens or requests. The reference, ``kernels.reference_attend``, takes some forty operations per layer.

In the kernels, names such as ``keys_head`` are strides: of the tensor ``keys``, from one head to the next.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

PART = 128  # slots
WARPS, STAGES = 4, 2
TOGETHER = 16  # parts
LARGEST_HEAD = 256  # numbers of a key or value of which a block fits the shared memory of any GPU
WIDE = 64  # tokens of a request: above it, each reads all slots in one part, because there are enough of them


@triton.jit(do_not_specialize=["batch"])
def _write(  # noqa: PLR0913
    key_ptr, value_ptr, keys_ptr, values_ptr, rows_ptr, bases_ptr, ends_ptr, batch,
    key_head, key_token, key_dim, value_head, value_token, value_dim,
    keys_row, keys_head, keys_slot, values_row, values_head, values_slot,
    BATCH: tl.constexpr, KEY_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Copy the key and the value of one token and head into their slots."""
    token, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, BATCH)
    ends = tl.load(ends_ptr + index, mask=index < batch, other=1 << 40)
    request = tl.sum((ends <= token).to(tl.int32), 0)
    start = tl.max(tl.where(ends <= token, ends, 0), 0)
    slot = tl.load(bases_ptr + request) + token - start
    row = tl.load(rows_ptr + request)
    dim = tl.arange(0, KEY_DIM)
    key = tl.load(key_ptr + head * key_head + token * key_token + dim * key_dim, mask=dim < KEY_SIZE)
    place = keys_ptr + row * keys_row + head * keys_head + slot * keys_slot
    tl.store(place + dim, key.to(keys_ptr.dtype.element_ty), mask=dim < KEY_SIZE)
    dim = tl.arange(0, VALUE_DIM)
    value = tl.load(value_ptr + head * value_head + token * value_token + dim * value_dim, mask=dim < VALUE_SIZE)
    place = values_ptr + row * values_row + head * values_head + slot * values_slot
    tl.store(place + dim, value.to(values_ptr.dtype.element_ty), mask=dim < VALUE_SIZE)


@triton.jit
def _seen(  # noqa: PLR0913
    visible_ptr, positions_ptr, slot, place, position, base, length, width, mask_slots,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return which slots [S] the tokens at these places of a request, and at these positions, see: [R, S]."""
    column = slot - (base + width - mask_slots)  # in ``visible``; slots before it are seen by all
    is_real = place < length
    has_column = (column >= 0) & (column < mask_slots)
    at = visible_ptr + place[:, None] * mask_slots + column[None]
    is_seen = tl.load(at, mask=is_real[:, None] & has_column[None], other=0) != 0
    is_seen = (is_seen | (column < 0)[None]) & is_real[:, None]
    if (WINDOW > 0) | (CHUNK > 0):
        own = slot - base
        is_own = (own >= 0) & (own < length)
        theirs = tl.where(is_own, tl.load(positions_ptr + own, mask=is_own, other=0), slot)
        if WINDOW > 0:
            is_seen = is_seen & (position[:, None] - theirs[None] < WINDOW)
        if CHUNK > 0:
            is_seen = is_seen & (position[:, None] // CHUNK == theirs[None] // CHUNK)
    return is_seen


@triton.jit
def _weighed(scores, best):
    """Return the new maxima [R], the factors of what was added before [R], and the weights [R, S] of new scores."""
    higher = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # no slot seen yet
    return higher, tl.exp(best - safe), tl.exp(scores - safe[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "width", "mask_slots", "part_slots"])
def _attend(  # noqa: PLR0913
    query_ptr, keys_ptr, values_ptr, rows_ptr, bases_ptr, ends_ptr, positions_ptr, visible_ptr, out_ptr, sums_ptr,
    query_head, query_token, query_dim, keys_row, keys_head, keys_slot, values_row, values_head, values_slot,
    num_tokens, num_heads, width, mask_slots, part_slots, scale,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, IS_WHOLE: tl.constexpr,
    GROUP: tl.constexpr, KEY_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS pairs of a token and a head of one group to the slots of one part."""
    blocks = tl.cdiv(width * GROUP, ROWS)
    request, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    group, part = tl.program_id(1), tl.program_id(2)
    start = tl.load(ends_ptr + request - 1, mask=request > 0, other=0)
    length = tl.load(ends_ptr + request) - start
    base, row = tl.load(bases_ptr + request), tl.load(rows_ptr + request)

    pair = block * ROWS + tl.arange(0, ROWS)
    place, head = pair // GROUP, group * GROUP + pair % GROUP
    is_real = place < length
    token = start + place
    key_dim, value_dim = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    queries = query_ptr + head[:, None] * query_head + token[:, None] * query_token + key_dim[None] * query_dim
    query = tl.load(queries, mask=is_real[:, None] & (key_dim < KEY_SIZE)[None], other=0.0)
    position = tl.load(positions_ptr + token, mask=is_real, other=0)
    visible = visible_ptr + request * width * mask_slots

    low = part.to(tl.int64) * part_slots
    high = tl.minimum(low + part_slots, base + length)
    if WINDOW > 0:
        low = tl.maximum(low, tl.maximum(base + width - mask_slots - WINDOW, 0) // SLOTS * SLOTS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    for begin in range(low, high, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        is_written = slot < high
        places = keys_ptr + row * keys_row + group * keys_head + slot[None] * keys_slot + key_dim[:, None]
        keys = tl.load(places, mask=is_written[None] & (key_dim < KEY_SIZE)[:, None], other=0.0)
        scores = tl.dot(query, keys.to(query.dtype), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
        is_seen = _seen(visible, positions_ptr + start, slot, place, position, base, length, width, mask_slots, WINDOW, CHUNK)
        scores = tl.where(is_seen & is_written[None], scores, float("-inf"))
        best, shrink, weights = _weighed(scores, best)
        stored = values_ptr + row * values_row + group * values_head + slot[:, None] * values_slot + value_dim[None]
        values = tl.load(stored, mask=is_written[:, None] & (value_dim < VALUE_SIZE)[None], other=0.0).to(query.dtype)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(query.dtype), values, input_precision=PRECISION)

    of_pair = token * num_heads + head
    if IS_WHOLE:
        mixed = mixed / total[:, None]
    else:
        of_pair += part * num_tokens * num_heads
        tl.store(sums_ptr + of_pair * 2, best, mask=is_real)
        tl.store(sums_ptr + of_pair * 2 + 1, total, mask=is_real)
    at = out_ptr + of_pair[:, None] * VALUE_SIZE + value_dim[None]
    tl.store(at, mixed.to(out_ptr.dtype.element_ty), mask=is_real[:, None] & (value_dim < VALUE_SIZE)[None])


@triton.jit(do_not_specialize=["num_pairs", "num_heads", "num_parts"])
def _join(  # noqa: PLR0913
    parts_ptr, sums_ptr, sinks_ptr, out_ptr, num_pairs, num_heads, num_parts,
    HAS_SINKS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add the parts of one pair of a token and a head, TOGETHER at a time."""
    pair, dim, index = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, TOGETHER)
    best = float("-inf")
    for first in range(0, num_parts, TOGETHER):
        stored = (first + index) * num_pairs + pair
        bests = tl.load(sums_ptr + stored * 2, mask=first + index < num_parts, other=float("-inf"))
        best = tl.maximum(best, tl.max(bests, 0))
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + pair % num_heads).to(tl.float32)
        best = tl.maximum(best, sink)
        total = tl.exp(sink - best)
    else:
        total = 0.0
    mixed = tl.zeros([DIM], tl.float32)
    for first in range(0, num_parts, TOGETHER):
        stored, is_part = (first + index) * num_pairs + pair, first + index < num_parts
        shares = tl.exp(tl.load(sums_ptr + stored * 2, mask=is_part, other=float("-inf")) - best)
        total += tl.sum(shares * tl.load(sums_ptr + stored * 2 + 1, mask=is_part, other=0.0), 0)
        values = parts_ptr + stored[:, None] * SIZE + dim[None]
        values = tl.load(values, mask=(is_part & (shares > 0))[:, None] & (dim < SIZE)[None], other=0.0)
        mixed += tl.sum(shares[:, None] * values, 0)
    tl.store(out_ptr + pair * SIZE + dim, (mixed / total).to(out_ptr.dtype.element_ty), mask=dim < SIZE)


def attend(  # noqa: PLR0913 - an operator's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    cache_rows: Tensor,
    bases: Tensor,
    ends: Tensor,
    positions: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float,
    window: int,
    chunk: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute what ``kernels.reference_attend`` does, on tensors of a GPU."""
    (batch, width, mask_slots), (heads, tokens, key_size) = visible.shape, query.shape[1:]
    kv_heads, value_size, capacity = key.shape[1], value.shape[3], keys.shape[3]
    keys, values, visible = keys[layer], values[layer], visible.contiguous()
    where: tuple[Any, ...] = (cache_rows.contiguous(), bases.contiguous(), ends.contiguous())
    key_dim, value_dim = max(16, next_power_of_2(key_size)), max(16, next_power_of_2(value_size))
    sizes = {"KEY_SIZE": key_size, "KEY_DIM": key_dim, "VALUE_SIZE": value_size, "VALUE_DIM": value_dim}
    strides = (*keys.stride()[:3], *values.stride()[:3])
    own_strides = (*key.stride()[1:], *value.stride()[1:])
    most = max(16, next_power_of_2(batch))  # few sizes: each is compiled
    _write[tokens, kv_heads](key, value, keys, values, *where, batch, *own_strides, *strides, BATCH=most, **sizes, num_warps=1)
    group = heads // kv_heads
    rows = 16 if width <= WIDE else 64
    slots = 64 if max(key_dim, value_dim) * query.element_size() <= 256 else 32
    parts = -(-capacity // PART) if width <= WIDE else 1
    is_whole = parts == 1 and sinks is None
    out = query.new_empty(1, tokens, heads, value_size)
    mixed, sums = out, out  # with one part its sums are not stored
    if not is_whole:
        mixed = query.new_empty(parts, tokens, heads, value_size, dtype=torch.float32)
        sums = query.new_empty(parts, tokens, heads, 2, dtype=torch.float32)
    _attend[batch * -(-width * group // rows), kv_heads, parts](
        *(query, keys, values, *where, positions.contiguous(), visible.view(torch.uint8), mixed, sums),
        *(*query.stride()[1:], *strides),
        *(tokens, heads, width, mask_slots, PART if parts > 1 else capacity, scale),
        SOFTCAP=softcap, WINDOW=window, CHUNK=chunk, IS_WHOLE=is_whole,
        GROUP=group, **sizes, ROWS=rows, SLOTS=slots, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if not is_whole:
        sizes = {"SIZE": value_size, "DIM": value_dim, "TOGETHER": TOGETHER, "HAS_SINKS": sinks is not None}
        _join[(tokens * heads,)](mixed, sums, query if sinks is None else sinks, out, tokens * heads, heads, parts, **sizes)
    return out
