"""Counter-based random numbers: hashes of seed, position and purpose, independent of the batch and of earlier numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider import native

GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(word: int) -> int:
    """Mix 64 bits with the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def key_of(*parts: int, prefix: int = 0) -> int:
    """Hash the parts to 64 bits. ``prefix``: the key of earlier parts."""
    for part in parts:
        prefix = mix((prefix ^ part) + GOLDEN)
    return prefix


def signed(word: int) -> int:
    """Return the same 64 bits as a signed int64."""
    return word - (1 << 64) if word >= 1 << 63 else word


def uniforms(key: int, count: int) -> list[float]:
    """Return ``count`` uniform numbers in [0, 1). A larger count extends the list."""
    return [(mix(key + i * GOLDEN) >> 11) * 2.0**-53 for i in range(1, count + 1)]


def gumbel(keys: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Return Gumbel noise float32 [N, size] of N signed keys: entry i is from the bits ``mix(key + (i + 1) * GOLDEN)``."""
    steps = torch.arange(1, size + 1, device=device) * signed(GOLDEN)
    word = torch.tensor(keys, device=device)[:, None] + steps  # int64 arithmetic wraps
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        word = (word ^ ((word >> shift) & ((1 << (64 - shift)) - 1))) * signed(factor)
    uniform = (((word >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52  # strictly inside (0, 1)
    return uniform.log_().neg_().log_().neg_().float()


def sample_inverse_cdf(probs: Tensor, heights: Sequence[float]) -> Tensor:
    """Sample by inverse CDF: the first token whose cumulative probability exceeds the height: [B, V], B -> int64 [B].

    Heights are in [0, 1). A token with probability 0 is never returned.
    """
    if native.serves(probs.device):
        return torch.ops.outrider.sample_inverse_cdf(probs, heights)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    height = torch.tensor(heights, dtype=torch.float64, device=probs.device).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, height, right=True).squeeze(-1)
