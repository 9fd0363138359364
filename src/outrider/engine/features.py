"""Carries target features from the rounds that read a token to the proposer that asked for them (``needs_hidden``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.types import Context, Request


@dataclass(frozen=True, slots=True)
class _Round:
    """What a round read of a request: text before the root, the root, and drafts of which those of ``path`` were accepted."""

    hidden: Mapping[int, Tensor]  # index -> [T + 1 + num_drafts, H]
    num_drafts: int
    path: list[int]

    def kept(self, index: int) -> Tensor:
        """[T + 1 + len(path), H]: of the tokens that are committed now, or were."""
        states, path = self.hidden[index], self.path
        read = len(states) - self.num_drafts
        if path == list(range(len(path))):
            return states[: read + len(path)]
        return torch.cat((states[:read], states[read:][path]))  # a tree's


class FeatureStore:
    """Features of each request's committed tokens, from the first on, that the proposer has not seen yet.

    They are cut when they are asked for: where nothing is drafted for long, nothing is done but to remember them.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._unseen: dict[str, list[_Round]] = {}
        self._prompts: dict[str, _Round | None] = {}  # of requests that others will start from; None until the prompt is read

    def keep(self, request: Request, hidden: Mapping[int, Tensor], num_drafts: int, path: list[int]) -> None:
        """Remembers what a round read of a request, and which of its drafts were accepted.

        ``hidden``: index -> [T + 1 + num_drafts, H], of the committed tokens that it had to read, the root and the drafts.
        """
        self._unseen.setdefault(request.request_id, []).append(_Round(hidden, num_drafts, path))
        if request.request_id in self._prompts:
            read = len(hidden[self.layers[0]]) - num_drafts
            if read == len(request.token_ids):  # from the first token on
                prompt = {index: states[: request.num_prompt_tokens - 1] for index, states in hidden.items()}
                self._prompts[request.request_id] = _Round(prompt, 0, [])

    def attach(self, context: Context) -> Context:
        """The context with everything unseen. It stays unseen until ``seen``, so that a failed round loses nothing."""
        hidden = {}
        for layer in self.layers:
            rounds = [self._unseen.get(request_id, ()) for request_id in context.request_ids]
            chunks = [[each.kept(layer) for each in unseen] for unseen in rounds]
            hidden[layer] = [torch.cat(chunk) if chunk else torch.empty(0) for chunk in chunks]
        return replace(context, hidden=hidden)

    def seen(self, request_ids: Sequence[str]) -> None:
        """The proposer has seen all there was."""
        for request_id in request_ids:
            self._unseen.pop(request_id, None)

    def share(self, request_id: str) -> None:
        """Other requests will start from this one's prompt: its features are kept beside."""
        self._prompts.setdefault(request_id, None)

    def fork(self, source_id: str, new_id: str) -> bool:
        """Gives a new request the features of all but the last token of the prompt. False where they are not at hand."""
        prompt = self._prompts.get(source_id)
        if prompt is None:
            return not self.layers
        self._unseen[new_id] = [prompt]
        return True

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests that ended, or whose text the target will read again."""
        self.seen(request_ids)
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
