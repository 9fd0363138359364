"""Embeddings and output heads in a head's checkpoint that are copies of the target's: the head uses the target's instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.runner.linear import weight_slices

SHARED = 0.02  # maximum relative distance of a stored copy from the target's table, for 8-bit rounding
# Rows compared at once, a multiple of kernels.PANEL: whole tables in float32 would take several times their memory.
SLICE = 4096


def drop_copied_table(tensors: dict[str, Tensor], name: str, module: Any) -> None:
    """Remove the table of this name from a head's tensors if it is a copy of the weight of ``module``, which is the target's.

    A copy of a scaled embedding's weight (Gemma's) stays: the head does not scale it.
    """
    is_scaled = getattr(module, "embed_scale", None) is not None
    if name in tensors and not is_scaled and is_copy(tensors[name], module):
        del tensors[name]


def is_copy(own: Tensor, module: Any) -> bool:
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
