"""Carries target features from the rounds that read a token to the proposer that asked for them (``needs_hidden``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.types import Context, Request

Features = dict[int, list[Tensor]]  # hidden state -> chunks [T, H] in the order of the text


class FeatureStore:
    """Features of each request's committed tokens, from the first on, that the proposer has not seen yet."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._unseen: dict[str, Features] = {}
        self._prompts: dict[str, Features] = {}  # of requests that others will start from; empty until the prompt is read

    def keep(self, request: Request, hidden: Mapping[int, Tensor], num_drafts: int, path: list[int]) -> None:
        """Remembers what a round read of a request: text before the root, the root, and the accepted drafts, its ``path``.

        ``hidden``: index -> [T + 1 + num_drafts, H].
        """
        unseen = self._unseen.setdefault(request.request_id, {layer: [] for layer in self.layers})
        prompt = self._prompts.get(request.request_id)
        for layer in self.layers:
            states = hidden[layer]
            read = len(states) - num_drafts  # tokens up to the root, itself included
            kept = states[: read + len(path)].clone()
            if path != list(range(len(path))):  # in a tree
                kept[read:] = states[read:][path]
            unseen[layer].append(kept)
            if prompt is not None and read == len(request.token_ids):  # from the first token on
                prompt[layer] = [kept[: request.num_prompt_tokens - 1]]

    def attach(self, context: Context) -> Context:
        """The context with everything unseen. It stays unseen until ``seen``, so that a failed round loses nothing."""
        hidden = {}
        for layer in self.layers:
            chunks = [self._unseen.get(request_id, {}).get(layer, []) for request_id in context.request_ids]
            hidden[layer] = [torch.cat(chunk) if chunk else torch.empty(0) for chunk in chunks]
        return replace(context, hidden=hidden)

    def seen(self, request_ids: Sequence[str]) -> None:
        """The proposer has seen all there was."""
        for request_id in request_ids:
            self._unseen.pop(request_id, None)

    def share(self, request_id: str) -> None:
        """Other requests will start from this one's prompt: its features are kept beside."""
        self._prompts.setdefault(request_id, {})

    def fork(self, source_id: str, new_id: str) -> bool:
        """Gives a new request the features of all but the last token of the prompt. False where they are not at hand."""
        prompt = self._prompts.get(source_id)
        if not prompt:
            return not self.layers
        self._unseen[new_id] = {layer: list(chunks) for layer, chunks in prompt.items()}
        return True

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests that ended, or whose text the target will read again."""
        self.seen(request_ids)
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
