"""Grammars: the tokens that may stand in each place, given the tokens before it, committed or drafted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from outrider.types import Request


class GrammarMasks:
    """Masks of the requests whose answers have a given form."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._rows = [(row, request) for row, request in enumerate(requests) if request.matcher is not None]
        self.is_empty = not self._rows

    def apply_(self, scores: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, counts: Sequence[int]) -> None:
        """Forbids tokens in the first ``counts[b]`` rows of scores [B, M, V], in place.

        A place behind a draft that breaks the grammar stays as it is.
        """
        for row, request in self._rows:
            assert request.matcher is not None
            output = request.token_ids[request.num_prompt_tokens :]
            own = [] if drafts is None else drafts[row].tolist()
            tree = None if parents is None else parents[row].tolist()
            for place in range(counts[row]):
                allowed = request.matcher.allowed(output, path_to(start + place - 1, own, tree))
                if allowed is not None:
                    scores[row, place].masked_fill_(~allowed.to(scores.device), -math.inf)


def path_to(node: int, drafts: Sequence[int], parents: Sequence[int] | None) -> list[int]:
    """The drafts from the root to a node, itself included; -1 is the root."""
    if parents is None:
        return list(drafts[: node + 1])
    path = []
    while node >= 0:
        path.append(drafts[node])
        node = parents[node]
    return path[::-1]
