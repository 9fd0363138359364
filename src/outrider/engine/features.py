"""Store hidden states of the target between the round that computed them and the next call of the proposer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.types import Context, Request, joined

MAX_ROUNDS = 64  # rounds of a request whose states are kept as views of the whole batch's; then they are copied

Hidden = Mapping[int, Sequence[Tensor]]  # layer -> by request: [T + 1 + num_drafts, H], see ``Scores``


class _States(NamedTuple):
    """Hidden states of request ``row`` in one round: of T uncached committed tokens, the root, and drafts."""

    hidden: Hidden  # sliced only when the proposer is called
    row: int
    num_before: int  # committed tokens before the round, the root included
    num_kept: int  # leading tokens whose states were kept in earlier rounds
    num_drafts: int
    path: list[int]  # accepted drafts

    def kept(self, layer: int) -> Tensor:
        """Return those of the tokens that are committed after the round, but not those kept before."""
        states, path = self.hidden[layer][self.row], self.path
        num_committed = len(states) - self.num_drafts
        num_skipped = max(self.num_kept - (self.num_before - num_committed), 0)
        if path == list(range(len(path))):  # a chain, or the leading nodes of a tree
            return states[num_skipped : num_committed + len(path)]
        return torch.cat((states[num_skipped:num_committed], states[num_committed:][path]))


class FeatureStore:
    """Hidden states of each request's committed tokens that the proposer has not seen yet. Slices are taken lazily."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._unseen: dict[str, list[_States]] = {}
        self._num_kept: dict[str, int] = {}  # tokens of each request whose states were kept, seen ones included
        self._prompts: dict[str, _States | None] = {}  # of requests that others are forked from; None until prefilled

    def keep(self, request: Request, num_before: int, hidden: Hidden, row: int, num_drafts: int, path: list[int]) -> None:
        """Store a round's hidden states of a request that had ``num_before`` tokens. ``path``: its accepted drafts.

        A pass that reads tokens again, because their cache was lost, reports their states again: the first ones are kept.
        """
        request_id = request.request_id
        is_first = request_id not in self._num_kept and num_before == request.num_prompt_tokens  # not again after a failure
        if request_id in self._prompts and is_first:
            # Without those of the prompt's last token and of the drafts, as if all of these were drafts and none was accepted.
            self._prompts[request_id] = _States(hidden, row, num_before, 0, num_drafts + 1, [])
        states = _States(hidden, row, num_before, self._num_kept.get(request_id, 0), num_drafts, path)
        unseen = self._unseen.setdefault(request_id, [])
        unseen.append(states)
        if len(unseen) > MAX_ROUNDS:
            copies = {layer: [joined([each.kept(layer) for each in unseen])] for layer in self.layers}
            unseen[:] = [_States(copies, 0, num_before + len(path), 0, 0, [])]
        self._num_kept[request_id] = num_before + len(path)

    def attach(self, context: Context) -> Context:
        """Return the context with all unseen hidden states. They are kept until ``discard``, in case the proposer fails."""
        rounds, hidden = [self._unseen.get(request_id, ()) for request_id in context.request_ids], {}
        for layer in self.layers:
            chunks = [[each.kept(layer) for each in unseen] for unseen in rounds]
            hidden[layer] = [joined(chunk) for chunk in chunks]
        return replace(context, hidden=hidden)

    def discard(self, request_ids: Sequence[str]) -> None:
        """Drop hidden states that the proposer has processed."""
        for request_id in request_ids:
            self._unseen.pop(request_id, None)

    def keep_prompt(self, request_id: str) -> None:
        """Keep the hidden states of this request's prompt for requests that will be forked from it."""
        self._prompts.setdefault(request_id, None)

    def drop_prompts(self, needed: Iterable[str | None]) -> None:
        """Drop the hidden states of prompts, except those of the requests ``needed``, from which others will be forked."""
        if self._prompts:
            kept = set(needed)
            self._prompts = {request_id: states for request_id, states in self._prompts.items() if request_id in kept}

    def fork(self, source_id: str, request: Request) -> bool:
        """Give a new request the hidden states of the shared prompt without its last token. Return False without any yet."""
        prompt = self._prompts.get(source_id)
        if prompt is None:
            return not self.layers
        self._unseen[request.request_id] = [prompt]
        self._num_kept[request.request_id] = request.num_prompt_tokens - 1
        return True

    def release(self, request_ids: Sequence[str]) -> None:
        """Drop requests that ended or will be prefilled again."""
        self.discard(request_ids)
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
            self._num_kept.pop(request_id, None)
