"""Embeddings and output heads stored with a head. Copies of the target's are dropped in favour of the target's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.runner.linear import weight_of

SHARED = 0.02  # maximum relative distance of a stored copy from the target's table, for 8-bit rounding
SLICE = 4096  # rows compared at once: whole tables in float32 would take several times their memory


def has_own_table(tensors: dict[str, Tensor], name: str, module: Any) -> bool:
    """Return whether the head's table of this name differs from the target's; a copy is removed from ``tensors``.

    ``module``: the target's embedding or output head. A copy of a scaled embedding's weight (Gemma's) is the head's own table:
    the head does not scale it.
    """
    if name not in tensors:
        return False
    if getattr(module, "embed_scale", None) is not None or not _is_copy(tensors[name], weight_of(module).detach()):
        return True
    del tensors[name]
    return False


def _is_copy(own: Tensor, other: Tensor) -> bool:
    """Return whether two tables [V, H] are equal up to rounding. The numbers of padding rows at their ends may differ."""
    if own.shape[1:] != other.shape[1:]:
        return False
    rows = min(len(own), len(other))
    distance = size = 0.0
    for mine, theirs in zip(own[:rows].split(SLICE), other[:rows].split(SLICE), strict=True):
        wanted = theirs.float().cpu()
        distance += float((mine.float() - wanted).square().sum())
        size += float(wanted.square().sum())
    return distance <= SHARED**2 * size
