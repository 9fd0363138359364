"""Keep hidden states of the target from the round that computed them until the proposer that needs them drafts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.types import Context, Request


@dataclass(frozen=True, slots=True)
class _Round:
    """The tokens of one request that a round read: committed ones, the root, and drafts of which ``path`` was accepted."""

    hidden: Mapping[int, Tensor]  # index -> [T + 1 + num_drafts, H]
    num_drafts: int
    path: list[int]

    def kept(self, index: int) -> Tensor:
        """[T + 1 + len(path), H]: of the committed tokens."""
        states, path = self.hidden[index], self.path
        read = len(states) - self.num_drafts
        if path == list(range(len(path))):
            return states[: read + len(path)]
        return torch.cat((states[:read], states[read:][path]))  # a tree's


class FeatureStore:
    """Hidden states of each request's committed tokens, from the first on, that the proposer has not seen yet.

    Slices are taken lazily, when the proposer drafts.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._unseen: dict[str, list[_Round]] = {}
        self._prompts: dict[str, _Round | None] = {}  # of requests that others are forked from; None until it is prefilled

    def keep(self, request: Request, num_before: int, hidden: Mapping[int, Tensor], num_drafts: int, path: list[int]) -> None:
        """Keep what a round read of a request that had ``num_before`` tokens, and which of its drafts were accepted.

        ``hidden``: index -> [T + 1 + num_drafts, H], of the committed tokens that it had to read, the root and the drafts.
        """
        self._unseen.setdefault(request.request_id, []).append(_Round(hidden, num_drafts, path))
        if request.request_id in self._prompts:
            read = len(hidden[self.layers[0]]) - num_drafts
            if read == num_before:  # from the first token
                prompt = {index: states[: request.num_prompt_tokens - 1] for index, states in hidden.items()}
                self._prompts[request.request_id] = _Round(prompt, 0, [])

    def attach(self, context: Context) -> Context:
        """The context with everything unseen; it is kept until ``seen``, so that a failed round loses nothing."""
        hidden = {}
        for layer in self.layers:
            rounds = [self._unseen.get(request_id, ()) for request_id in context.request_ids]
            chunks = [[each.kept(layer) for each in unseen] for unseen in rounds]
            hidden[layer] = [torch.cat(chunk) if chunk else torch.empty(0) for chunk in chunks]
        return replace(context, hidden=hidden)

    def seen(self, request_ids: Sequence[str]) -> None:
        """Drop what the proposer has seen."""
        for request_id in request_ids:
            self._unseen.pop(request_id, None)

    def share(self, request_id: str) -> None:
        """Keep the hidden states of this request's prompt for requests that will be forked from it."""
        self._prompts.setdefault(request_id, None)

    def fork(self, source_id: str, new_id: str) -> bool:
        """Give a new request the hidden states of all but the last token of the prompt. False where they are missing."""
        prompt = self._prompts.get(source_id)
        if prompt is None:
            return not self.layers
        self._unseen[new_id] = [prompt]
        return True

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget requests that ended, or that will be prefilled again."""
        self.seen(request_ids)
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
