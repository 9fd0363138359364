"""Outrider's operators, first of all ``outrider::linear`` and ``outrider::attend``: a torch reference for every device, and
C++ for the CPU.

The reference is what the C++ is tested against, and what runs on CUDA and on machines without a C++ compiler.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider import cpp_library
from outrider.runner import huge_pages

logger = logging.getLogger(__name__)

PANEL = 32  # outputs whose weights stand side by side in a packed weight
DEEP = 32  # inputs that matrix units take at once

_library = torch.library.Library("outrider", "DEF")
_library.define("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor keys, Tensor values, int layer, Tensor cache_rows, Tensor bases,"
    " Tensor ends, Tensor positions, Tensor visible, float scale, float softcap, int window) -> Tensor"
)


_library.define("embed(Tensor token_ids, Tensor packed) -> Tensor")
_library.define("linear_scaled(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int outputs) -> Tensor")
_library.define("has_matrix_units() -> bool")

SCALED = 128  # inputs of an output that share a scale, where weights are codes of 8 or 4 bits
# What the codes of 4 bits stand for: quantiles of the normal distribution (NF4: Dettmers et al. 2023, appendix E) in bfloat16.
CODES = (
    *(-1.0, -0.6953125, -0.5234375, -0.39453125, -0.28515625, -0.1845703125, -0.0908203125, 0.0),
    *(0.07958984375, 0.1611328125, 0.24609375, 0.337890625, 0.44140625, 0.5625, 0.72265625, 1.0),
)


def has_matrix_units() -> bool:
    """Whether this CPU has matrix units (AMX) and the system lets this process use them."""
    return load_cpu_kernels() and bool(torch.ops.outrider.has_matrix_units())


def suits_matrix_units(weight: Tensor) -> bool:
    """Whether a layer of this weight [outputs, inputs] runs on the CPU's matrix units."""
    return weight.is_cpu and weight.dtype == torch.bfloat16 and weight.shape[1] % DEEP == 0 and has_matrix_units()


def pack_weight(weight: Tensor, in_pairs: bool = False) -> Tensor:
    """[outputs, inputs] -> [panels, inputs, 32]: for each input, the weights of 32 outputs side by side; zero-padded.

    ``in_pairs``: [panels, inputs / 2, 32, 2], for each two inputs, which is what matrix units read.
    """
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    padded = weight if outputs % PANEL == 0 else functional.pad(weight, (0, 0, 0, panels * PANEL - outputs))
    turned = padded.view(panels, PANEL, inputs // 2, 2) if in_pairs else padded.view(panels, PANEL, inputs)
    turned = turned.transpose(1, 2)
    return huge_pages.empty(turned.shape, weight.dtype).copy_(turned) if weight.is_cpu else turned.contiguous()


def is_in_pairs(packed: Tensor) -> bool:
    """Whether a packed weight is one for matrix units."""
    return packed.dim() == 4


def packed_shape(packed: Tensor) -> tuple[int, int, int]:
    """Panels, inputs and 32, of a packed weight of numbers in either form."""
    panels, inputs, lanes = packed.shape[:3]
    return panels, inputs * 2 if is_in_pairs(packed) else inputs, lanes


def one_by_one(packed: Tensor) -> Tensor:
    """[panels, inputs, 32] of a packed weight in either form."""
    return packed.transpose(2, 3).flatten(1, 2) if is_in_pairs(packed) else packed


def unpack_weight(packed: Tensor, outputs: int) -> Tensor:
    """The inverse of ``pack_weight``: [panels, inputs, 32] or [panels, inputs / 2, 32, 2] -> [outputs, inputs]."""
    return packed.transpose(1, 2).reshape(packed.shape[0] * PANEL, -1)[:outputs]


def reference_linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """x [..., inputs], packed [panels, inputs, 32] -> [..., outputs]: float32 arithmetic, the result in x's type.

    For a weight in pairs x is rounded to bfloat16 first: that is what matrix units multiply; sums are float32.
    """
    rows = x.bfloat16().float() if is_in_pairs(packed) else x.float()
    result = functional.linear(rows, unpack_weight(packed, outputs).float(), None if bias is None else bias.float())
    return result.to(x.dtype)


def pack_codes(codes: Tensor, bits: int, in_pairs: bool) -> Tensor:
    """uint8 or int8 codes [panels, inputs, 32] as the kernels read them.

    8 bits: int8, in the form of a packed weight. 4 bits: uint8 [panels, inputs, 16], output j + 16 in the high half of j's
    byte; in pairs [panels, inputs / 4, 32, 2]: 16 bits hold, lowest first, the codes of one lane of four rows of tiles.
    """
    panels, inputs, lanes = codes.shape
    if bits == 8:
        return codes.view(panels, inputs // 2, 2, lanes).transpose(2, 3) if in_pairs else codes
    if not in_pairs:
        return codes[..., : lanes // 2] | codes[..., lanes // 2 :] << 4
    halves = codes.view(panels, inputs // 4, 2, 2, 2, lanes // 2)  # pair, input of the pair, half of the outputs, output
    four = halves.permute(0, 1, 5, 3, 2, 4).reshape(panels, inputs // 4, lanes, 2, 2)
    return (four[..., 0] | four[..., 1] << 4).contiguous()


def _codes_one_by_one(packed: Tensor) -> Tensor:
    """The inverse of ``pack_codes``: [panels, inputs, 32]."""
    if packed.dtype == torch.int8:
        return one_by_one(packed)
    each = torch.stack([packed & 15, packed >> 4], -1)
    if not is_in_pairs(packed):
        return each.transpose(2, 3).flatten(2)
    panels, fours = packed.shape[:2]
    return each.view(panels, fours, PANEL // 2, 2, 2, 2).permute(0, 1, 4, 3, 5, 2).reshape(panels, fours * 4, PANEL)


def unpack_codes(packed: Tensor, scales: Tensor) -> Tensor:
    """What ``pack_codes`` gives, scales [groups, panels * 32] -> float32 [panels, inputs, 32]."""
    codes = _codes_one_by_one(packed)
    values = torch.tensor(CODES, device=codes.device)[codes.long()] if codes.dtype == torch.uint8 else codes.float()
    panels, inputs = codes.shape[:2]
    each = scales.view(-1, panels, PANEL).transpose(0, 1)  # [panels, groups, 32]
    return values * each.repeat_interleave(SCALED, 1)[:, :inputs]


def reference_linear_scaled(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``reference_linear`` for a weight of codes."""
    rows = x.bfloat16().float() if is_in_pairs(packed) else x.float()
    return reference_linear(rows, unpack_codes(packed, scales), bias, outputs).to(x.dtype)


def reference_embed(token_ids: Tensor, packed: Tensor) -> Tensor:
    """token_ids [...] -> [..., inputs] float32: rows of a packed weight, for an embedding that is tied to the output head."""
    return packed[token_ids // PANEL, :, token_ids % PANEL].flatten(token_ids.dim()).float()


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
) -> Tensor:
    """Writes this pass's keys and values to the slots from ``base`` on of the cache, then attends to all that is visible.

    The T tokens of a pass stand one behind the other, those of request b up to ``ends[b]``, at most W of each. query
    [1, H, T, D]; key, value [1, Hkv, T, D]; keys, values [L, R, Hkv, S, D], changed in place; cache_rows, bases, ends [B];
    positions [1, T]; visible bool [B, W, M], M >= W: which of the last M slots, a text of W tokens at their end, each token
    sees; those before are seen by all -> [1, T, H, D].
    """
    width, capacity = visible.shape[1], keys.shape[3]
    lens = ends.diff(prepend=ends.new_zeros(1))
    index = torch.arange(query.shape[2], device=ends.device)
    row = torch.searchsorted(ends, index, right=True)  # [T]: whose token it is
    place = index - (ends - lens)[row]  # among its own
    slots = bases[row] + place
    keys[layer][cache_rows[row], :, slots] = key[0].transpose(0, 1).to(keys.dtype)
    values[layer][cache_rows[row], :, slots] = value[0].transpose(0, 1).to(values.dtype)
    padded = query.new_zeros(len(bases), width, query.shape[1], query.shape[3])
    padded[row, place] = query[0].transpose(0, 1)
    query = padded.transpose(1, 2)  # [B, H, W, D]
    spread = positions.new_zeros(len(bases), width)
    spread[row, place] = positions[0]
    seen = _visible_slots(bases, spread, visible, capacity, window)  # [B, W, S]
    unwritten = (torch.arange(capacity, device=bases.device) >= (bases + lens)[:, None])[:, None, :, None]
    # A masked slot is multiplied by zero, so what earlier requests or nobody left there must be a number.
    all_keys = keys[layer][cache_rows].to(query.dtype).masked_fill_(unwritten, 0)
    all_values = values[layer][cache_rows].to(query.dtype).masked_fill_(unwritten, 0)
    if softcap == 0:
        out = functional.scaled_dot_product_attention(
            query, all_keys, all_values, attn_mask=seen[:, None], scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        groups = query.shape[1] // key.shape[1]
        scores = query @ all_keys.repeat_interleave(groups, 1).transpose(2, 3) * scale
        scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen[:, None], float("-inf")).float().softmax(-1).to(query.dtype)
        out = weights @ all_values.repeat_interleave(groups, 1)
    return out.transpose(1, 2)[row, place][None]


def _visible_slots(bases: Tensor, positions: Tensor, visible: Tensor, capacity: int, window: int) -> Tensor:
    """Which slots each query sees: bool [B, W, S]. Slot s < base holds position s; slot base + j holds positions[:, j]."""
    width, reach = visible.shape[1:]
    slot = torch.arange(capacity, device=positions.device)
    own = slot - bases[:, None]  # [B, S]: index within this pass, where 0 <= own < W
    in_pass = (own >= 0) & (own < width)
    index = own.clamp(0, width - 1)
    told = own + reach - width  # index in visible, where 0 <= told < M
    seen = torch.where(
        ((told >= 0) & (told < reach))[:, None],
        visible.gather(2, told.clamp(0, reach - 1)[:, None].expand(-1, width, -1)),
        (told < 0)[:, None].expand(-1, width, -1),
    )
    if window > 0:
        place = torch.where(in_pass, positions.gather(1, index), slot)  # [B, S]
        seen = seen & (positions[:, :, None] - place[:, None] < window)
    return seen


_library.impl("linear", reference_linear, "CompositeExplicitAutograd")
_library.impl("linear_scaled", reference_linear_scaled, "CompositeExplicitAutograd")
_library.impl("embed", reference_embed, "CompositeExplicitAutograd")
_library.impl("attend", reference_attend, "CompositeExplicitAutograd")


def _fake_linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _fake_linear_scaled(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _fake_embed(token_ids: Tensor, packed: Tensor) -> Tensor:
    return packed.new_empty(*token_ids.shape, packed_shape(packed)[1], dtype=torch.float32)


def _fake_attend(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


_FAKES: dict[str, Callable[..., Tensor]] = {
    "linear": _fake_linear,
    "linear_scaled": _fake_linear_scaled,
    "embed": _fake_embed,
    "attend": _fake_attend,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"outrider::{_name}", _fake)


# ---------------------------------------------------------------------------------------------------------------------------
# C++
# ---------------------------------------------------------------------------------------------------------------------------


@cache
def load_cpu_kernels() -> bool:
    """Builds the C++ operators for this CPU (some 20 s, once a machine) and loads them. False where they cannot be built."""
    compiler = cpp_library.find_compiler()
    if compiler is None:
        logger.warning("no C++ compiler found: passes run on torch's own kernels, several times slower; install g++")
        return False
    source = Path(__file__).with_name("cpu.cpp")
    library = cpp_library.library_path(source, compiler, torch.__version__, sys.abiflags)
    if not library.exists():
        logger.info("compiling Outrider's CPU kernels (once a machine, some 20 s)")
        try:
            _compile(compiler, source, library)
        except cpp_library.FAILURES as error:
            logger.warning("the CPU kernels did not compile, torch's own are used: %s", cpp_library.first_line(error))
            return False
    torch.ops.load_library(library)
    return True


def _compile(compiler: str, source: Path, library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    if sys.platform == "linux":
        flags += ["-fopenmp", "-DAT_PARALLEL_OPENMP=1"]
    flags += [f"-I{path}" for path in include_paths()]
    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"]
    cpp_library.compile_library(compiler, source, library, flags, libraries)
