"""Rotary frequencies that depend on the sequence length (longrope), chosen for each request.

transformers changes the frequencies when the longest sequence of a batch exceeds the original training window. Here each
request has its own. A request that exceeds the window is prefilled again, because its cached keys have the short frequencies.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.runner import attention
from outrider.types import OutriderError


class LongRope(nn.Module):
    """Replaces a rotary embedding whose frequencies depend on the largest position of a pass."""

    is_long: Tensor

    def __init__(self, rotary: nn.Module, window: int, is_long: Tensor) -> None:
        """``window``: the original window; ``is_long`` bool [R, 1]: whether each cache row's sequence exceeds it.

        ``is_long`` is changed in place.
        """
        super().__init__()
        self.window = window
        self.short, self.long = with_fixed_frequencies(rotary, 0), with_fixed_frequencies(rotary, window)
        self.register_buffer("is_long", is_long, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        rows = attention.rows_of_tokens()
        if rows is None:  # the model's own forward pass, of a short sequence
            return self.short(x, position_ids, *args, **options)
        # Some models also choose other values by the largest position, so each call gets one on its side of the window's end.
        beyond = torch.full_like(position_ids[..., :1], self.window)
        short = self.short(x, position_ids.clamp(max=self.window - 1), *args, **options)
        long = self.long(x, torch.cat([position_ids, beyond], -1), *args, **options)
        chosen = self.is_long[rows][None]
        return tuple(torch.where(chosen, second[:, :-1], first) for first, second in zip(short, long, strict=True))


def with_fixed_frequencies(rotary: nn.Module, position: int) -> nn.Module:
    """Return a copy of a rotary embedding with the frequencies for sequences that reach ``position``, fixed."""
    own: Any = copy.deepcopy(rotary)
    own(own.inv_freq, torch.tensor([[position]], device=own.inv_freq.device))
    own.rope_type = "default"  # from here on nothing is recomputed
    return own


class LongRows:
    """Records which cache rows hold sequences that exceed the model's original training window."""

    def __init__(self, window: int, num_rows: int, device: torch.device) -> None:
        self.window = window
        self._flags = [False] * num_rows
        # Two dimensions, because inductor inlines short one-dimensional tensors as constants.
        self.is_long = torch.zeros(num_rows, 1, dtype=torch.bool, device=device)

    def update(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached_lens: list[int]) -> None:
        """Update the flags of some rows; a row whose flag changes loses its cached tokens, which have the other frequencies."""
        for row, sequence in zip(rows, sequences, strict=True):
            if self._flags[row] != (len(sequence) > self.window):
                self._flags[row] = not self._flags[row]
                self.is_long[row] = self._flags[row]
                cached_lens[row] = 0

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Rearrange the flags like the cache: row i becomes the former row ``rows[i]``."""
        kept = [self._flags[row] for row in rows]
        self._flags = kept + [False] * (len(self._flags) - len(kept))
        self.is_long.copy_(torch.tensor(self._flags, device=self.is_long.device)[:, None])

    def copy(self, source: int, target: int) -> None:
        """Copy the flag of a row whose cached tokens are copied."""
        self._flags[target] = self._flags[source]
        self.is_long[target] = self._flags[source]


def split_longrope(model: PreTrainedModel, max_len: int, num_rows: int) -> LongRows | None:
    """Replace longrope embeddings in place, so that frequencies do not depend on other requests.

    Returns None if no sequence can exceed the original window. Raises ``OutriderError`` if one can and a module has frequencies
    for several types of layers.
    """
    long_rows = None
    for name, module in list(model.named_modules()):
        window = original_window(module)
        if window is None:
            continue
        if isinstance(module.rope_type, dict):
            if max_len > window:
                raise OutriderError(
                    f"longrope for some types of layers has other frequencies beyond {window} tokens, which is not supported:"
                    f" lower max_len={max_len} to {window}"
                )
            continue  # it chooses by the longest sequence, and none is longer
        if max_len > window and long_rows is None:
            long_rows = LongRows(window, num_rows, model.device)
        fixed = with_fixed_frequencies(module, 0) if long_rows is None else LongRope(module, window, long_rows.is_long)
        model.set_submodule(name, fixed)
    return long_rows


def original_window(module: Any) -> int | None:
    """Return the original training window of a longrope embedding, up to which it uses the short frequencies; else None.

    A module with frequencies for each type of layers has the smallest of their windows.
    """
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        scalings = [module.config.rope_parameters[layers] for layers, kind in kinds.items() if kind == "longrope"]
    else:
        scalings = [module.config.rope_parameters] if kinds == "longrope" else []
    return min((int(each["original_max_position_embeddings"]) for each in scalings), default=None)


def usual_window(model: PreTrainedModel, window: int) -> int:
    """Return the default context window: the original one, because longer sequences are prefilled twice."""
    return min([window, *(found for module in model.modules() if (found := original_window(module)) is not None)])
