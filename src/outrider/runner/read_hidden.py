"""Hidden states of prefilled tokens, stored until the score of the same round returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class ReadHidden:
    """Chunks by request and hidden state, in order. They are kept until a round is committed, because a failed score is
    repeated."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, int], list[Tensor]] = {}

    def add(self, hidden: Mapping[int, Tensor], request_ids: Sequence[str], starts: Sequence[int], lens: Sequence[int]) -> None:
        """Add hidden states [T, H]: ``lens[b]`` rows from ``starts[b]`` belong to ``request_ids[b]``."""
        for index, states in hidden.items():
            for request_id, start, length in zip(request_ids, starts, lens, strict=True):
                # a copy: a captured graph overwrites it
                self._chunks.setdefault((request_id, index), []).append(states[start : start + length].clone())

    def whole(
        self, index: int, states: Tensor, request_ids: Sequence[str], starts: Sequence[int], lens: Sequence[int]
    ) -> list[Tensor]:
        """Return one tensor [T_b, H] per request: stored chunks, then ``lens[b]`` rows of ``states`` from ``starts[b]``."""
        if not self._chunks and lens[0] == len(states):  # one request, in most rounds
            return [states]
        rows = [states[start : start + length] for start, length in zip(starts, lens, strict=True)]
        if not self._chunks:
            return rows
        return [torch.cat([*self._chunks.get((name, index), ()), own]) for name, own in zip(request_ids, rows, strict=True)]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the chunks of requests."""
        if self._chunks:
            ended = set(request_ids)
            self._chunks = {key: chunks for key, chunks in self._chunks.items() if key[0] not in ended}
