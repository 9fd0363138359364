"""Hidden states of committed text, from the passes that read it to the score of the same round, which reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class ReadHidden:
    """Chunks by request and hidden state, in the order of the text. They stay until a round is committed, for a score that was
    of no use is done again."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, int], list[Tensor]] = {}

    def add(self, hidden: Mapping[int, Tensor], request_ids: Sequence[str], starts: Sequence[int], lens: Sequence[int]) -> None:
        """Of each hidden state [T, H], those from ``starts[b]`` on are of ``lens[b]`` tokens of ``request_ids[b]``."""
        for index, states in hidden.items():
            for request_id, start, length in zip(request_ids, starts, lens, strict=True):
                # a copy: a captured graph writes there again
                self._chunks.setdefault((request_id, index), []).append(states[start : start + length].clone())

    def whole(
        self, index: int, states: Tensor, request_ids: Sequence[str], starts: Sequence[int], lens: Sequence[int]
    ) -> list[Tensor]:
        """One tensor [T_b, H] a request: what was added, then ``lens[b]`` rows of ``states`` [T, H] from ``starts[b]`` on."""
        rows = [states[start : start + length] for start, length in zip(starts, lens, strict=True)]
        if not self._chunks:
            return rows
        return [torch.cat([*self._chunks.get((name, index), ()), own]) for name, own in zip(request_ids, rows, strict=True)]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is there of requests."""
        if self._chunks:
            ended = set(request_ids)
            self._chunks = {key: chunks for key, chunks in self._chunks.items() if key[0] not in ended}
