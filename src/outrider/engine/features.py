"""Carries target features from the round that scored a token to the proposer that asked for them (``needs_hidden``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.types import Context, Scores, Verdict


class FeatureStore:
    """layer -> features of each request's committed tokens that the proposer has not seen yet."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._unseen: dict[str, dict[int, list[Tensor]]] = {}

    def keep(self, context: Context, scores: Scores, verdict: Verdict) -> None:
        """Remembers the rows of the root and of the accepted drafts: the tokens that are committed now."""
        for b, request_id in enumerate(context.request_ids):
            path = verdict.path[b, : int(verdict.num_accepted[b])]
            rows = torch.cat([torch.zeros(1, dtype=torch.long), path + 1])  # row i + 1 follows draft i
            unseen = self._unseen.setdefault(request_id, {layer: [] for layer in self.layers})
            for layer in self.layers:
                hidden = scores.hidden[layer][b]  # [N + 1, H]
                unseen[layer].append(hidden[rows.to(hidden.device)])

    def attach(self, context: Context) -> Context:
        """The context with everything unseen. It stays unseen until ``seen``, so that a failed round loses nothing."""
        hidden = {}
        for layer in self.layers:
            chunks = [self._unseen.get(request_id, {}).get(layer, []) for request_id in context.request_ids]
            hidden[layer] = [torch.cat(chunk) if chunk else torch.empty(0) for chunk in chunks]
        return replace(context, hidden=hidden)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests, because the proposer has seen all or because they ended."""
        for request_id in request_ids:
            self._unseen.pop(request_id, None)
