"""Embeddings and output heads stored with a head. Copies of the target's are dropped in favour of the target's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.runner.linear import weight_of

SHARED = 0.02  # maximum relative distance of a stored copy from the target's table, for 8-bit rounding


def has_own_table(tensors: dict[str, Tensor], name: str, module: Any) -> bool:
    """Return whether the head's table of this name differs from the target's; a copy is removed from ``tensors``.

    ``module``: the target's embedding or output head.
    """
    if name not in tensors:
        return False
    own, other = tensors[name].float(), weight_of(module).float().cpu()
    if own.shape == other.shape and float((own - other).norm()) <= SHARED * float(other.norm()):
        del tensors[name]
        return False
    return True
