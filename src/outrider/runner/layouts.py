"""Where the tokens of a pass stand: its inputs, made of texts, cache rows and slots, and what is read of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.runner.attention import PassLayout
from outrider.runner.kv_cache import KVCache
from outrider.runner.tree_mask import tree_inputs
from outrider.types import Proposal

SHORT = 16  # tokens up to which text is scored in the same pass as the drafts, not read before; and up to which masks are kept


class Layouts:
    """Makes the layouts of passes over one cache."""

    def __init__(self, cache: KVCache, device: torch.device, max_len: int) -> None:
        self._cache, self._device, self._max_len = cache, device, max_len
        self._numbers = torch.arange(0, device=device)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def chain(self, tokens: Sequence[list[int]], rows: list[int], bases: list[int]) -> tuple[Tensor, PassLayout]:
        """Ids [B, W], padded, and the layout of texts that go on from slots ``bases`` of cache rows ``rows``."""
        batch, width = len(rows), max(map(len, tokens))
        # One tensor that is cut, not three: making one takes longer than all the rest here.
        numbers = [*bases, *rows]
        for text in tokens:
            numbers += text
            numbers += [0] * (width - len(text))
        start, row_ids, ids = torch.tensor(numbers, device=self._device).split((batch, batch, batch * width))
        self._cache.reserve(max(bases) + width)
        positions = (start[:, None] + self.arange(0, width)).clamp_(max=self._max_len - 1)
        layout = PassLayout(self._cache.keys, self._cache.values, row_ids, start, positions, self.causal(batch, width))
        return ids.view(batch, width), layout

    def tree(self, chain: PassLayout, proposal: Proposal, text_lens: list[int]) -> PassLayout:
        """The layout where the proposal's tree stands behind the first ``text_lens[b]`` tokens of each row."""
        assert proposal.parents is not None
        width = chain.positions.shape[1]
        visible, positions = tree_inputs(proposal.parents, text_lens, width)
        positions = (positions + chain.bases.cpu()[:, None]).clamp_(max=self._max_len - 1).to(self._device)
        return replace(chain, positions=positions, visible=visible.to(self._device))

    def arange(self, start: int, stop: int) -> Tensor:
        """The numbers from ``start`` to ``stop``, exclusive."""
        if stop > self._numbers.shape[0]:
            self._numbers = torch.arange(2 * stop, device=self._device)
        return self._numbers[start:stop]

    def causal(self, batch: int, width: int) -> Tensor:
        """bool [B, W, W]: each token sees itself and those before it."""
        key = (batch, width)
        if key not in self._masks:
            mask = torch.ones(width, width, dtype=torch.bool, device=self._device).tril()
            if width > SHORT:  # prompts have any length: not worth keeping
                return mask.expand(batch, -1, -1)
            self._masks[key] = mask.repeat(batch, 1, 1)
        return self._masks[key]


def rows_from(values: Tensor, first: list[int], count: int) -> Tensor:
    """values [B, W, ...] -> [B, count, ...], from index first[b] on. Rows past the end repeat the last: they are undefined."""
    if len(set(first)) == 1:
        start = first[0]
        if start + count == values.shape[1]:
            return values[:, start:]
    index = torch.tensor(first, device=values.device)[:, None] + torch.arange(count, device=values.device)
    index = index.clamp_(max=values.shape[1] - 1)
    return values[torch.arange(len(first), device=values.device)[:, None], index]
