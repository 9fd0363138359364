"""Random numbers that belong to a request: hashes of whatever they are for, so that nothing is consumed and batches do not
matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.native import rows_for

GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def key_of(*parts: int, prefix: int = 0) -> int:
    """64 bits that depend on every part; ``prefix`` is the key of the parts that came before these."""
    for part in parts:
        prefix = mix((prefix ^ part) + GOLDEN)
    return prefix


def signed(word: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return word - (1 << 64) if word >= 1 << 63 else word


def uniforms(key: int, count: int) -> list[float]:
    """``count`` numbers in [0, 1); a longer list begins with the shorter one."""
    return [(mix(key + i * GOLDEN) >> 11) * 2.0**-53 for i in range(1, count + 1)]


def gumbel(key: int, steps: Tensor) -> Tensor:
    """Gumbel noise float32 [V]: ``mix(key + step)`` in wrapping int64 arithmetic, so the same on every device."""
    word = steps + signed(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * signed(factor)
    uniform = (((word >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52  # strictly inside (0, 1)
    return uniform.log_().neg_().log_().neg_().float()


def first_above(probs: Tensor, heights: Sequence[float]) -> Tensor:
    """Inverse CDF: the first token whose cumulative probability exceeds that part of the total: [B, V], B -> int64 [B].

    Heights in [0, 1). A token of probability 0 is never taken.
    """
    native = rows_for(probs.device)
    return reference_first_above(probs, heights) if native is None else native.first_above(probs, heights)


def reference_first_above(probs: Tensor, heights: Sequence[float]) -> Tensor:
    """``first_above`` by one cumulative sum over all tokens."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    height = torch.tensor(heights, dtype=torch.float64, device=probs.device).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, height, right=True).squeeze(-1)
