"""Declares the operators of a pass, such as ``outrider::linear`` and ``outrider::attend``.

On a CPU ``outrider.native`` computes them in C++, and on a GPU attention runs in Triton (triton_attention.py). Attention and
recurrent layers (recurrence.py) have references in torch, which run everywhere else. Layers are packed only where the C++ is
loaded: their references are in tests/runner/references.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider import native
from outrider.runner import huge_pages

PANEL = 32  # adjacent outputs in a packed weight
DEEP = 32  # inputs per step of bfloat16 products

_library = torch.library.Library("outrider", "DEF")


def define(signature: str, fake: Callable[..., Tensor], reference: Callable[..., Tensor] | None = None) -> None:
    """Declare an operator. ``fake`` returns an output of its shape and dtype, for ``torch.export``.

    ``reference``: computes the operator where the C++ does not.
    """
    name = signature.partition("(")[0]
    _library.define(f"{signature} -> Tensor")
    torch.library.register_fake(f"outrider::{name}", fake)
    if reference is not None:
        _library.impl(name, reference, "CompositeExplicitAutograd")


def has_fast_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32: AMX or AVX-512 BF16."""
    return native.load() and bool(torch.ops.outrider.has_fast_bfloat16())


def can_use_bfloat16_products(weight: Tensor) -> bool:
    """Return whether a layer with this weight [outputs, inputs] multiplies in bfloat16."""
    return weight.is_cpu and weight.dtype == torch.bfloat16 and weight.shape[1] % DEEP == 0 and has_fast_bfloat16()


def pack_weight(weight: Tensor, in_pairs: bool = False) -> Tensor:
    """Pack [outputs, inputs] to [panels, inputs, 32]: the weights of 32 outputs per input, zero-padded.

    ``in_pairs``: [panels, inputs / 2, 32, 2], pairs of inputs for bfloat16 products.
    """
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    padded = weight if outputs % PANEL == 0 else functional.pad(weight, (0, 0, 0, panels * PANEL - outputs))
    transposed = padded.view(panels, PANEL, inputs // 2, 2) if in_pairs else padded.view(panels, PANEL, inputs)
    transposed = transposed.transpose(1, 2)
    return huge_pages.empty(transposed.shape, weight.dtype).copy_(transposed) if weight.is_cpu else transposed.contiguous()


def is_interleaved(packed: Tensor) -> bool:
    """Return whether neighbouring inputs of an output are adjacent in a packed weight: pairs in bfloat16."""
    return packed.dim() == 4


def unpack_weight(packed: Tensor, outputs: int) -> Tensor:
    """Unpack [panels, inputs, 32] or [panels, inputs / 2, 32, 2] to [outputs, inputs]."""
    return packed.transpose(1, 2).reshape(packed.shape[0] * PANEL, -1)[:outputs]


def reference_attend(  # noqa: PLR0913 - an operator's signature, shared with C++
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
    """Write this pass's keys and values to the cache from slot ``base``, then attend to all visible slots.

    The T tokens of a pass are concatenated, those of request b up to ``ends[b]``, at most W each. query
    [1, H, T, D]; key, value [1, Hkv, T, D]; keys, values [L, R, Hkv, S, D], changed in place; cache_rows, bases, ends [B];
    positions [1, T]; visible bool [B, W, M], M >= W: which of the last M slots, a text of W tokens at their end, each token
    sees; those before are seen by all. ``window``: a token sees the last ``window`` positions; ``chunk``: it sees its own
    chunk of ``chunk`` positions; 0: no limit. sinks [H]: score of an attention sink without a value -> [1, T, H, D].
    """
    width, capacity = visible.shape[1], keys.shape[3]
    lens = ends.diff(prepend=ends.new_zeros(1))
    index = torch.arange(query.shape[2], device=ends.device)
    row = torch.searchsorted(ends, index, right=True)  # [T]: request of each token
    place = index - (ends - lens)[row]  # index within its request
    slots = bases[row] + place
    keys[layer][cache_rows[row], :, slots] = key[0].transpose(0, 1).to(keys.dtype)
    values[layer][cache_rows[row], :, slots] = value[0].transpose(0, 1).to(values.dtype)
    padded = query.new_zeros(len(bases), width, query.shape[1], query.shape[3])
    padded[row, place] = query[0].transpose(0, 1)
    query = padded.transpose(1, 2)  # [B, H, W, D]
    spread = positions.new_zeros(len(bases), width)
    spread[row, place] = positions[0]
    seen = _visible_slots(bases, spread, visible, capacity, window, chunk)  # [B, W, S]
    unwritten = (torch.arange(capacity, device=bases.device) >= (bases + lens)[:, None])[:, None, :, None]
    # Masked slots are multiplied by zero, so stale or unwritten values must be finite.
    all_keys = keys[layer][cache_rows].to(query.dtype).masked_fill_(unwritten, 0)
    all_values = values[layer][cache_rows].to(query.dtype).masked_fill_(unwritten, 0)
    if softcap == 0 and sinks is None:
        out = functional.scaled_dot_product_attention(
            query, all_keys, all_values, attn_mask=seen[:, None], scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        groups = query.shape[1] // key.shape[1]
        scores = query @ all_keys.repeat_interleave(groups, 1).transpose(2, 3) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None], float("-inf")).float()
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., :capacity].to(query.dtype)
        out = weights @ all_values.repeat_interleave(groups, 1)
    return out.transpose(1, 2)[row, place][None]


def _visible_slots(bases: Tensor, positions: Tensor, visible: Tensor, capacity: int, window: int, chunk: int) -> Tensor:
    """Return the visibility of slots, bool [B, W, S]. Slot s < base has position s; slot base + j has positions[:, j]."""
    width, mask_slots = visible.shape[1:]
    slot = torch.arange(capacity, device=positions.device)
    own = slot - bases[:, None]  # [B, S]: index within this pass, if 0 <= own < W
    in_pass = (own >= 0) & (own < width)
    index = own.clamp(0, width - 1)
    column = own + mask_slots - width  # index in visible, if 0 <= column < M
    seen = torch.where(
        ((column >= 0) & (column < mask_slots))[:, None],
        visible.gather(2, column.clamp(0, mask_slots - 1)[:, None].expand(-1, width, -1)),
        (column < 0)[:, None].expand(-1, width, -1),
    )
    if window > 0 or chunk > 0:
        place = torch.where(in_pass, positions.gather(1, index), slot)  # [B, S]
    if window > 0:
        seen = seen & (positions[:, :, None] - place[:, None] < window)
    if chunk > 0:
        seen = seen & (positions[:, :, None] // chunk == place[:, None] // chunk)
    return seen


define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, int layer, Tensor cache_rows, Tensor bases,"
    " Tensor ends, Tensor positions, Tensor visible, float scale, float softcap, int window, int chunk=0, Tensor? sinks=None)",
    lambda query, key, value, *_: query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]),
    reference_attend,
)


def _attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Compute what ``reference_attend`` does, in Triton if a head is small enough."""
    from outrider.runner import triton_attention

    if max(key.shape[3], value.shape[3]) > triton_attention.LARGEST_HEAD:
        return reference_attend(query, key, value, *rest)
    with torch.cuda.device(query.device):  # Triton runs on the current device, whatever its tensors are on
        return triton_attention.attend(query, key, value, *rest)


if find_spec("triton") is not None:  # it comes with torch for CUDA on Linux
    _library.impl("attend", _attend_on_gpu, "CUDA")

# x [..., inputs] times a packed weight -> [..., outputs] in x's dtype; sums are float32. For a weight in pairs x is rounded to
# bfloat16; for one in blocks (blocks.py) and 8 activation bits to codes with a scale per block.
define(
    "linear(Tensor x, Tensor packed, Tensor? bias, int outputs, int activation_bits)",
    lambda x, packed, bias, outputs, activation_bits: x.new_empty(*x.shape[:-1], outputs),
)
# activation(first half of the outputs) * second half
define(
    "linear_gated(Tensor x, Tensor packed, str activation, int activation_bits)",
    lambda x, packed, *_: x.new_empty(*x.shape[:-1], len(packed) * PANEL // 2),
)
# activation(x), contiguous, in x's shape and dtype
define("activate(Tensor x, str activation)", lambda x, _: torch.empty_like(x, memory_format=torch.contiguous_format))
# rows [..., inputs] float32 of a packed weight for token_ids [...]
define(
    "embed(Tensor token_ids, Tensor packed, int inputs)",
    lambda token_ids, packed, inputs: packed.new_empty(*token_ids.shape, inputs, dtype=torch.float32),
)
