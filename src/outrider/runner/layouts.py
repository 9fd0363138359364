"""Where the tokens of a pass stand: its inputs, made of texts, cache rows and slots, and what is read of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from outrider.runner.attention import PassLayout
from outrider.runner.kv_cache import KVCache
from outrider.runner.tree_mask import tree_inputs
from outrider.types import Proposal

SHORT = 16  # tokens up to which text is scored in the same pass as the drafts, not read before; and up to which masks are kept


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokens of a pass, and whose they are: request b's are ``lens[b]`` of them, from ``starts[b]`` on."""

    ids: Tensor  # [1, T] int64
    starts: list[int]
    lens: list[int]
    layout: PassLayout

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states [n_b, H] of each request's tokens as the pass takes them, [1, T, H]; zero in the place of padding."""
        if [len(each) for each in states] != self.lens:
            pairs = zip(states, self.lens, strict=True)
            states = [functional.pad(each, (0, 0, 0, length - len(each))) for each, length in pairs]
        return torch.cat(list(states))[None]


class Layouts:
    """Makes the layouts of passes over one cache.

    The CPU runs of each request the tokens that it has. ``is_padded``: elsewhere each has as many as the longest text, since
    there a pass is captured once for each shape, and a token more costs next to nothing.
    """

    def __init__(self, cache: KVCache, device: torch.device, max_len: int) -> None:
        self._cache, self._device, self._max_len = cache, device, max_len
        self._numbers = torch.arange(0, device=device)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.is_padded = device.type != "cpu" and not cache.shape.states.kinds  # a padding token would change the states

    def chain(self, tokens: Sequence[list[int]], rows: list[int], bases: list[int], least: int = 0) -> Texts:
        """The pass in which texts go on from slots ``bases`` of cache rows ``rows``. ``least``: tokens of each if padded."""
        batch, lens = len(rows), list(map(len, tokens))
        width = max(lens)
        if self.is_padded:
            width = max(width, least)
            tokens = [text + [0] * (width - length) for text, length in zip(tokens, lens, strict=True)]
            lens = [width] * batch
        ends = list(accumulate(lens))
        # One tensor that is cut, not five: making one takes longer than all the rest here.
        numbers = [*bases, *rows, *ends]
        for text in tokens:
            numbers += text
        for base, length in zip(bases, lens, strict=True):
            numbers += range(base, base + length)
        total = ends[-1]
        parts = torch.tensor(numbers, device=self._device).split((batch, batch, batch, total, total))
        base_slots, row_ids, end_places, ids, positions = parts
        self._cache.reserve(max(bases) + width)
        self._cache.states.wrote(rows, [base + length for base, length in zip(bases, lens, strict=True)])
        positions = positions.clamp_(max=self._max_len - 1)[None]
        stores, shape, visible = self._cache.tensors, self._cache.shape, self.causal(batch, width)
        layout = PassLayout(stores, shape.places, row_ids, base_slots, end_places, positions, visible, states=shape.states)
        return Texts(ids[None], [0, *ends[:-1]], lens, layout)

    def tree(self, chain: Texts, proposal: Proposal, text_lens: list[int]) -> Texts:
        """The pass in which the proposal's tree stands behind the first ``text_lens[b]`` tokens of each request."""
        assert proposal.parents is not None
        layout = chain.layout
        visible, positions = tree_inputs(proposal.parents, text_lens, layout.visible.shape[1])
        places = zip(positions, layout.bases.tolist(), chain.lens, strict=True)
        told = torch.cat([each[:length] + base for each, base, length in places])
        told = told.clamp_(max=self._max_len - 1)[None].to(self._device)
        return replace(chain, layout=replace(layout, positions=told, visible=visible.to(self._device)))

    def arange(self, start: int, stop: int) -> Tensor:
        """The numbers from ``start`` to ``stop``, exclusive."""
        if stop > self._numbers.shape[0]:
            self._numbers = torch.arange(2 * stop, device=self._device)
        return self._numbers[start:stop]

    def places(self, starts: Sequence[int], lens: Sequence[int]) -> Tensor:
        """The ``lens[b]`` numbers from ``starts[b]`` on, of all b."""
        if all([start + length == after for start, length, after in zip(starts, lens, starts[1:], strict=False)]):
            return self.arange(starts[0], starts[-1] + lens[-1])  # one run
        numbers = [place for start, length in zip(starts, lens, strict=True) for place in range(start, start + length)]
        return torch.tensor(numbers, device=self._device)

    def causal(self, batch: int, width: int) -> Tensor:
        """bool [B, W, W]: each token sees itself and those before it."""
        key = (batch, width)
        if key not in self._masks:
            mask = torch.ones(width, width, dtype=torch.bool, device=self._device).tril()
            if width > SHORT:  # prompts have any length: not worth keeping
                return mask.expand(batch, -1, -1)
            self._masks[key] = mask.repeat(batch, 1, 1)
        return self._masks[key]


def rows_from(values: Tensor, starts: Sequence[int], lens: Sequence[int], count: int) -> Tensor:
    """values [T, ...] -> [B, count, ...]: the ``lens[b]`` rows from ``starts[b]`` on; those behind them are undefined."""
    if all([length == count for length in lens]) and len(lens) * count == values.shape[0]:
        return values.view(len(lens), count, *values.shape[1:])
    to = [b * count + i for b, length in enumerate(lens) for i in range(length)]
    taken = [start + i for start, length in zip(starts, lens, strict=True) for i in range(length)]
    rows = values.new_empty(len(lens) * count, *values.shape[1:])
    rows[torch.tensor(to, device=values.device)] = values if len(taken) == len(values) else values[taken]
    return rows.view(len(lens), count, *values.shape[1:])
