"""Hidden states of committed text, from the passes that read it to the score of the same round, which reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class ReadHidden:
    """Chunks by request and hidden state, in the order of the text: a prompt may be read by drafting or by the score itself."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, int], list[Tensor]] = {}

    def add(self, hidden: Mapping[int, Tensor], request_ids: Sequence[str], starts: Sequence[int], lens: Sequence[int]) -> None:
        """Of each hidden state [T, H], those from ``starts[b]`` on are of ``lens[b]`` tokens of ``request_ids[b]``."""
        for index, states in hidden.items():
            for request_id, start, length in zip(request_ids, starts, lens, strict=True):
                if length:  # a copy: a captured graph writes there again
                    self._chunks.setdefault((request_id, index), []).append(states[start : start + length].clone())

    def take(self, index: int, request_ids: Sequence[str], like: Tensor) -> list[Tensor]:
        """One tensor [T_b, H] a request, which is forgotten; ``like`` [..., H] says what an empty one looks like."""
        found = [self._chunks.pop((request_id, index), None) for request_id in request_ids]
        return [torch.cat(chunks) if chunks else like.new_empty(0, like.shape[-1]) for chunks in found]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what requests that ended have left."""
        if self._chunks:
            ended = set(request_ids)
            self._chunks = {key: chunks for key, chunks in self._chunks.items() if key[0] not in ended}
