"""Grammar masks: allowed tokens at each position, given the committed and drafted tokens before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from outrider.types import Request


class GrammarMasks:
    """Masks of requests with grammars."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._rows = [(row, request) for row, request in enumerate(requests) if request.matcher is not None]
        self.is_empty = not self._rows

    def apply_(self, scores: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, counts: Sequence[int]) -> None:
        """Mask tokens in the first ``counts[b]`` rows of scores [B, M, V], in place.

        Rows after a draft that violates the grammar are unchanged.
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
    """Return the drafts from the root to a node, inclusive; -1 is the root."""
    if parents is None:
        return list(drafts[: node + 1])
    path = []
    while node >= 0:
        path.append(drafts[node])
        node = parents[node]
    return path[::-1]
