"""Rotary frequencies that change with the length of a text (longrope): each request has those of its own text.

transformers reads a text with other frequencies when it outgrows the window that the model was first trained on, and by the
longest text of a batch. Here the choice is each request's. When one outgrows that window it is read again from its beginning,
since the keys cached of it have the other frequencies.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.runner import attention


class LongRope(nn.Module):
    """In the place of a rotary embedding whose frequencies go by the largest position that it is given."""

    is_long: Tensor

    def __init__(self, rotary: nn.Module, is_long: Tensor) -> None:
        """``is_long`` bool [R, 1]: of each row of the cache, whether its text is beyond that window; changed in place."""
        super().__init__()
        self.border = original_window(rotary)
        self.short, self.long = settled(rotary, 0), settled(rotary, self.border)
        self.register_buffer("is_long", is_long, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        rows = attention.rows_of_tokens()
        if rows is None:  # the model's own forward, of a short text
            return self.short(x, position_ids, *args, **options)  # type: ignore[no-any-return]
        # Some models choose more than frequencies by the largest position, and are given one of the right kind.
        beyond = torch.full_like(position_ids[..., :1], self.border)
        short = self.short(x, position_ids.clamp(max=self.border - 1), *args, **options)
        long = self.long(x, torch.cat([position_ids, beyond], -1), *args, **options)
        chosen = self.is_long[rows][None]
        return tuple(torch.where(chosen, second[:, :-1], first) for first, second in zip(short, long, strict=True))


def settled(rotary: nn.Module, position: int) -> nn.Module:
    """A copy of a rotary embedding that keeps the frequencies of texts that reach ``position``."""
    own: Any = copy.deepcopy(rotary)
    own(own.inv_freq, torch.tensor([[position]], device=own.inv_freq.device))
    own.rope_type = "default"  # from here on nothing is recomputed
    return own  # type: ignore[no-any-return]


class LongTexts:
    """Which rows of a cache hold texts beyond the window that a model was first trained on."""

    def __init__(self, border: int, num_rows: int, device: torch.device) -> None:
        self.border = border
        self._flags = [False] * num_rows
        # Of two dimensions: what has one, and is short, inductor writes into the code.
        self.is_long = torch.zeros(num_rows, 1, dtype=torch.bool, device=device)

    def settle(self, rows: Sequence[int], texts: Sequence[Sequence[int]], cached_lens: list[int]) -> None:
        """Notes how long the texts of some rows are. What is cached with the other frequencies counts as not cached."""
        for row, text in zip(rows, texts, strict=True):
            if self._flags[row] != (len(text) > self.border):
                self._flags[row] = not self._flags[row]
                self.is_long[row] = self._flags[row]
                cached_lens[row] = 0

    def copy(self, source: int, target: int) -> None:
        """The target row now holds a text of the source row."""
        self._flags[target] = self._flags[source]
        self.is_long[target] = self._flags[source]


def settle_longrope(model: PreTrainedModel, max_len: int, num_rows: int) -> LongTexts | None:
    """Fixes, in place, frequencies that would change with the longest text of a pass. None where no text changes its own."""
    found = [(name, module) for name, module in model.named_modules() if getattr(module, "rope_type", None) == "longrope"]
    texts = None
    for name, module in found:
        border = original_window(module)
        if max_len > border and texts is None:
            texts = LongTexts(border, num_rows, model.device)
        parent, _, attribute = name.rpartition(".")
        new = LongRope(module, texts.is_long) if texts is not None else settled(module, 0)
        setattr(model.get_submodule(parent), attribute, new)
    return texts


def original_window(rotary: Any) -> int:
    """The length up to which a longrope embedding keeps to its first frequencies."""
    return int(rotary.config.rope_parameters["original_max_position_embeddings"])


def usual_window(model: PreTrainedModel, window: int) -> int:
    """The context window of those who ask for none: a text that goes beyond the original one is read twice."""
    found = [original_window(module) for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    return min([window, *found])
