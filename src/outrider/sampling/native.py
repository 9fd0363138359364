"""C++ functions of ``rows.cpp``, built for this CPU and cached on disk, with torch as the fallback."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import cpp_library

logger = logging.getLogger(__name__)

_SIGNATURES = {
    "probs": [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p],
    "left_over": [*[c_void_p] * 5, *[c_int64] * 3, c_void_p],
    "first_above": [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p],
    "penalise": [c_void_p, *[c_int64] * 2, c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_double] * 3],
}
_TYPES = {torch.float32: "f32", torch.float64: "f64"}


class Rows:
    """Functions of ``rows.cpp`` on CPU tensors of float32 or float64."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, arguments in _SIGNATURES.items():
            for dtype, suffix in _TYPES.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes, function.restype = arguments, c_int64 if name == "probs" else None
                self._functions[name, dtype] = function
        self._count = library.count_tokens
        self._count.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p]
        self._count.restype = c_int64

    def probs(self, scores: Tensor, settings: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See ``shaping.Shaping.probs``: contiguous [B, M, V], float64 [B, 4] of temperature, top_k, top_p and min_p."""
        batch, width, size = scores.shape
        probs = torch.empty_like(scores)
        invalid = torch.empty(batch, width, dtype=torch.uint8)
        what = (scores.data_ptr(), probs.data_ptr(), batch * width, size, settings.data_ptr(), width)
        if self._functions["probs", scores.dtype](*what, (c_int64 * batch)(*counts), invalid.data_ptr()):
            return probs, torch.where(invalid > 0, torch.nan, 0.0)
        return probs, invalid

    def left_over(self, target: Tensor, draft: Tensor | None, tokens: Tensor, num_accepted: Tensor, lens: Tensor) -> Tensor:
        """See ``verifiers.base.left_over``."""
        batch, width, size = tokens.shape[0], tokens.shape[1], target.shape[2]
        target, tokens = target.contiguous(), tokens.contiguous()
        draft = None if draft is None else draft.to(target.dtype).contiguous()
        out = target.new_empty(batch, size)
        self._functions["left_over", target.dtype](
            target.data_ptr(),
            None if draft is None else draft.data_ptr(),
            tokens.data_ptr(),
            num_accepted.data_ptr(),
            lens.contiguous().data_ptr(),
            batch,
            width,
            size,
            out.data_ptr(),
        )
        return out

    def first_above(self, probs: Tensor, heights: Sequence[float]) -> Tensor:
        """See ``randomness.first_above``."""
        if probs.stride(1) != 1:
            probs = probs.contiguous()
        rows, size = probs.shape
        token_ids = torch.empty(rows, dtype=torch.long)
        self._functions["first_above", probs.dtype](
            probs.data_ptr(), rows, size, probs.stride(0), (c_double * rows)(*heights), token_ids.data_ptr()
        )
        return token_ids

    def penalise_(  # noqa: PLR0913 - the arguments of a C function
        self,
        logits: Tensor,  # contiguous [M, V]
        ids: Tensor,
        num_ids: int,
        counts: Tensor,
        drafts: Tensor | None,  # contiguous [N]
        parents: Tensor | None,
        start: int,
        factors: tuple[float, float, float],
    ) -> None:
        """Apply the penalties of one request with distinct tokens ids[:num_ids] and output counts [V]."""
        width, size = logits.shape
        self._functions["penalise", logits.dtype](
            logits.data_ptr(),
            width,
            size,
            ids.data_ptr(),
            num_ids,
            counts.data_ptr(),
            None if drafts is None else drafts.data_ptr(),
            None if parents is None else parents.data_ptr(),
            start,
            *factors,
        )

    def count_tokens(self, tokens: Tensor, num_prompt: int, ids: Tensor, num_ids: int, seen: Tensor, counts: Tensor) -> int:
        """Add committed tokens, the first ``num_prompt`` from the prompt, to ids, seen [V] and counts [V]."""
        at = (ids.data_ptr(), num_ids, seen.data_ptr(), counts.data_ptr())
        return int(self._count(tokens.data_ptr(), len(tokens), num_prompt, *at))


@cache
def load() -> Rows | None:
    """Build ``rows.cpp`` (about two seconds, once per machine) and load it. None if that fails."""
    try:
        compiler = cpp_library.find_compiler()
        if compiler is None:
            return None
        source = Path(__file__).with_name("rows.cpp")
        return Rows(ctypes.CDLL(str(cpp_library.library(compiler, source, ["-std=c++17", "-fno-trapping-math"]))))
    except cpp_library.FAILURES as error:
        logger.warning("the sampler's C++ cannot be built or loaded, torch does its work: %s", cpp_library.first_line(error))
        return None


def rows_for(device: torch.device) -> Rows | None:
    """Return the C++ functions for tensors on that device, or None."""
    return load() if device.type == "cpu" else None
