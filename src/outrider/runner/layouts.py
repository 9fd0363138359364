"""Pass layouts: inputs from sequences, cache rows and slots, and the positions read from the outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.runner.attention import PassLayout
from outrider.runner.graphs import MAX_WIDTH
from outrider.runner.kv_cache import KVCache
from outrider.types import Proposal, ancestor_matrix

MIN_PREFILL = 16  # fewer uncached tokens are always left to the scoring pass
STEP = 16  # on a GPU, wider passes that are captured have multiples of it: prompts have any length
CACHED_MASK_WIDTH = 16  # causal masks up to this width are kept; if padded, up to ``MAX_WIDTH``


@dataclass(frozen=True, slots=True)
class PassInput:
    """The tokens of a pass: request b has ``lens[b]`` tokens from ``starts[b]``."""

    ids: Tensor  # [1, T] int64
    starts: list[int]
    lens: list[int]
    layout: PassLayout

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Concatenate each request's hidden states [n_b, H] to the pass input [1, T, H]; padding is zero."""
        if [len(each) for each in states] != self.lens:
            pairs = zip(states, self.lens, strict=True)
            states = [functional.pad(each, (0, 0, 0, length - len(each))) for each, length in pairs]
        return torch.cat(list(states))[None]


class Layouts:
    """Creates the layouts of passes over one cache.

    On a GPU (``is_padded``) every request is padded to the longest, and between ``STEP`` and ``MAX_WIDTH`` tokens to a multiple
    of ``STEP``, because graphs are captured once per shape and a further token is nearly free. On a CPU requests are
    concatenated with their own lengths.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._device = cache, cache.device
        self._numbers = torch.arange(0, device=self._device)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self.is_padded = self._device.type != "cpu" and not cache.shape.is_recurrent  # a padding token would change the states

    def chain(self, tokens: Sequence[list[int]], rows: list[int], bases: list[int], least: int = 0) -> PassInput:
        """Return the pass that continues sequences at slots ``bases`` of ``rows``. ``least``: tokens each if padded."""
        batch, lens = len(rows), list(map(len, tokens))
        width = max(lens)
        if self.is_padded:
            width = max(width, least)
            if STEP < width <= MAX_WIDTH:
                width = -(-width // STEP) * STEP
            tokens = [own + [0] * (width - length) for own, length in zip(tokens, lens, strict=True)]
            lens = [width] * batch
        ends = list(accumulate(lens))
        # Slices of one tensor: creating a tensor takes longer than all the rest here.
        numbers = [*bases, *rows, *ends]
        for own in tokens:
            numbers += own
        numbers += ranges(bases, lens)
        total = ends[-1]
        parts = torch.tensor(numbers, device=self._device).split((batch, batch, batch, total, total))
        base_slots, row_ids, end_places, ids, positions = parts
        stops = [base + length for base, length in zip(bases, lens, strict=True)]
        self._cache.reserve(max(stops))
        self._cache.states.record_write(rows, bases, stops)
        positions = positions.clamp_(max=self._cache.max_len - 1)[None]
        inputs = (positions, row_ids, base_slots, end_places, self.causal(batch, width))
        layout = self._cache.pass_layout((*inputs, *self._cache.tensors))
        return PassInput(ids[None], [0, *ends[:-1]], lens, layout)

    def tree(self, chain: PassInput, proposal: Proposal, pending_lens: list[int], bases: list[int]) -> PassInput:
        """Return the pass with the proposal's tree after the first ``pending_lens[b]`` tokens of each request."""
        assert proposal.parents is not None
        layout = chain.layout
        visible, positions = tree_mask_and_positions(proposal.parents, pending_lens, layout.visible.shape[1])
        places = zip(positions, bases, chain.lens, strict=True)
        positions = torch.cat([each[:length] + base for each, base, length in places])
        positions = positions.clamp_(max=self._cache.max_len - 1)[None].to(self._device)
        return replace(chain, layout=replace(layout, positions=positions, visible=visible.to(self._device)))

    def score_input(
        self, tokens: Sequence[list[int]], pending_lens: list[int], proposal: Proposal, rows: list[int], bases: list[int]
    ) -> tuple[PassInput, Tensor, list[int]]:
        """Return the pass that scores drafts: ``tokens[b]`` are ``pending_lens[b]`` uncached committed tokens, then the drafts.

        Also return the indices of the tokens with logits, each request's root and drafts, and their number by request.
        """
        width = 1 + proposal.num_nodes
        inputs = self.chain(tokens, rows, bases, least=max(pending_lens) - 1 + width)
        if proposal.is_tree:
            inputs = self.tree(inputs, proposal, pending_lens, bases)
        roots = [start + length - 1 for start, length in zip(inputs.starts, pending_lens, strict=True)]
        # Padding has logits only to limit the number of shapes.
        counts = [width if self.is_padded else 1 + num_drafts for num_drafts in proposal.lens.tolist()]
        return inputs, self.row_indices(roots, counts), counts

    def arange(self, start: int, stop: int) -> Tensor:
        """Return the integers from ``start`` to ``stop``, exclusive."""
        if stop > self._numbers.shape[0]:
            self._numbers = torch.arange(2 * stop, device=self._device)
        return self._numbers[start:stop]

    def row_indices(self, starts: Sequence[int], lens: Sequence[int]) -> Tensor:
        """Return the ``lens[b]`` integers from ``starts[b]``, for all b."""
        if all([start + length == after for start, length, after in zip(starts, lens, starts[1:], strict=False)]):
            return self.arange(starts[0], starts[-1] + lens[-1])  # one run
        return torch.tensor(ranges(starts, lens), device=self._device)

    def causal(self, batch: int, width: int) -> Tensor:
        """Return the causal mask bool [B, W, W]."""
        key = (batch, width)
        if key not in self._masks:
            mask = torch.ones(width, width, dtype=torch.bool, device=self._device).tril()
            if width > (MAX_WIDTH if self.is_padded else CACHED_MASK_WIDTH):  # prompts have any length: not worth caching
                return mask.expand(batch, -1, -1)
            self._masks[key] = mask.repeat(batch, 1, 1)
        return self._masks[key]


def tree_mask_and_positions(parents: Tensor, pending_lens: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Return the mask over the pass's tokens, bool [B, W, W], and positions relative to the first, int64 [B, W].

    That is the topology-aware causal mask of SpecInfer (Miao et al. 2024). Row b has ``pending_lens[b]`` committed tokens (a
    chain that ends in the root), then the nodes. Siblings share a position; padding after the nodes continues counting.
    """
    batch, nodes = parents.shape
    # numpy's: torch.tril wakes OpenMP's threads for any size, which takes longer than its work
    visible = torch.from_numpy(np.tri(width, dtype=bool)).repeat(batch, 1, 1)
    positions = torch.arange(width).repeat(batch, 1)
    sees = ancestor_matrix(parents)
    depths = sees.sum(-1)  # [B, N]: 1 for a child of the root
    for b, num_pending in enumerate(pending_lens):
        here, room = slice(num_pending, num_pending + nodes), width - num_pending
        visible[b, here, here] = sees[b, :room, :room]
        positions[b, here] = num_pending - 1 + depths[b, :room]
    return visible, positions


def ranges(starts: Iterable[int], lens: Sequence[int]) -> list[int]:
    """Return the ``lens[b]`` integers from ``starts[b]``, for all b."""
    return [place for start, length in zip(starts, lens, strict=True) for place in range(start, start + length)]


def rows_from(values: Tensor, starts: Sequence[int], lens: Sequence[int], count: int) -> Tensor:
    """Gather values [T, ...] to [B, count, ...]: ``lens[b]`` rows from ``starts[b]``; the remaining ones are undefined."""
    if all([length == count for length in lens]) and len(lens) * count == values.shape[0]:
        return values.view(len(lens), count, *values.shape[1:])
    to, taken = ranges(range(0, len(lens) * count, count), lens), ranges(starts, lens)
    rows = values.new_empty(len(lens) * count, *values.shape[1:])
    rows[torch.tensor(to, device=values.device)] = values if len(taken) == len(values) else values[taken]
    return rows.view(len(lens), count, *values.shape[1:])


def shared_chunk(uncached: Sequence[int], chunk: int) -> list[int]:
    """Divide a prefill chunk: half for the oldest request, the rest for those with the fewest remaining tokens.

    So short prompts do not wait for a long one, and a long prompt is not starved by short ones. Chunked prefill between rounds
    is that of Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310).
    """
    counts = [0] * len(uncached)
    some = [b for b, count in enumerate(uncached) if count]
    if some:
        counts[some[0]] = min(uncached[some[0]], -(-chunk // 2))
    for b in sorted(some, key=lambda b: uncached[b] - counts[b]):
        counts[b] += min(uncached[b] - counts[b], chunk - sum(counts))
    return counts
