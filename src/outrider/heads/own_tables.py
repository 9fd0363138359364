"""Embeddings and output heads stored with a head. Copies of the target's are dropped in favour of the target's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.runner.linear import weight_slices

SHARED = 0.02  # maximum relative distance of a stored copy from the target's table, for 8-bit rounding
# Rows compared at once, a multiple of kernels.PANEL: whole tables in float32 would take several times their memory.
SLICE = 4096


def has_own_table(tensors: dict[str, Tensor], name: str, module: Any) -> bool:
    """Return whether the head's table of this name differs from the target's; a copy is removed from ``tensors``.

    ``module``: the target's embedding or output head. A copy of a scaled embedding's weight (Gemma's) is the head's own table:
    the head does not scale it.
    """
    if name not in tensors:
        return False
    if getattr(module, "embed_scale", None) is not None or not _is_copy(tensors[name], module):
        return True
    del tensors[name]
    return False


def _is_copy(own: Tensor, module: Any) -> bool:
    """Return whether a table [V, H] equals a module's weight up to rounding. Padding rows at their ends may differ."""
    distance = size = 0.0
    for mine, theirs in zip(own.split(SLICE), weight_slices(module, SLICE), strict=False):
        if mine.shape[1:] != theirs.shape[1:]:
            return False
        rows = min(len(mine), len(theirs))
        wanted = theirs[:rows].float().cpu()
        distance += float((mine[:rows].float() - wanted).square().sum())
        size += float(wanted.square().sum())
    return distance <= SHARED**2 * size
