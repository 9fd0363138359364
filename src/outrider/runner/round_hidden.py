"""Hidden states of a round's tokens: of those prefilled before the score, and of those that the score processed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outrider.types import Request


class HiddenRows(Sequence[Tensor]):
    """One tensor [T_b, H] per request, sliced or joined when it is read: in most rounds without drafts nobody reads it."""

    def __init__(self, states: Tensor, starts: Sequence[int], lens: Sequence[int], earlier: Sequence[Sequence[Tensor]]) -> None:
        """``earlier[b]``: chunks before the ``lens[b]`` rows of ``states`` [T, H] from ``starts[b]``; [] if there are none."""
        self._states, self._starts, self._lens, self._earlier = states, starts, lens, earlier

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, b: int) -> Tensor:  # type: ignore[override]  # no slices
        own = self._states[self._starts[b] : self._starts[b] + self._lens[b]]
        return torch.cat([*self._earlier[b], own]) if self._earlier and self._earlier[b] else own


class RoundHidden:
    """Hidden states of prefilled tokens, in chunks, until their round is committed: a failed score is repeated with them."""

    def __init__(self, copies: bool) -> None:
        """``copies``: whether the next pass overwrites the outputs of this one, as captured graphs do."""
        self._copies = copies
        self._chunks: dict[tuple[str, int], list[Tensor]] = {}

    def add(self, hidden: Mapping[int, Tensor], request_ids: Sequence[str], starts: Sequence[int], lens: Sequence[int]) -> None:
        """Add hidden states [T, H]: ``lens[b]`` rows from ``starts[b]`` belong to ``request_ids[b]``."""
        for index, states in self._kept(hidden):
            for request_id, start, length in zip(request_ids, starts, lens, strict=True):
                self._chunks.setdefault((request_id, index), []).append(states[start : start + length])

    def of_round(
        self, hidden: Mapping[int, Tensor], requests: Sequence[Request], starts: Sequence[int], lens: Sequence[int]
    ) -> dict[int, HiddenRows]:
        """Return by hidden state each request's chunks, then its ``lens[b]`` rows of ``hidden`` from ``starts[b]``.

        The result is {} if no request takes drafts.
        """
        if not any([request.takes_drafts for request in requests]):
            return {}
        found = {}
        for index, states in self._kept(hidden):
            earlier = [self._chunks.get((each.request_id, index), []) for each in requests] if self._chunks else []
            found[index] = HiddenRows(states, starts, lens, earlier)
        return found

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the chunks of requests."""
        if self._chunks:
            ended = set(request_ids)
            self._chunks = {key: chunks for key, chunks in self._chunks.items() if key[0] not in ended}

    def _kept(self, hidden: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        return ((index, states.clone() if self._copies else states) for index, states in hidden.items())
