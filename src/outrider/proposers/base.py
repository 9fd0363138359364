"""The interface of every proposer: what runs each round. ``ScriptedProposer`` is its mock, for tests.

A proposer knows the committed tokens and, if it declares ``needs_hidden``, hidden states of the target; no verifier and no
engine. What describes a method (options, checks) is a ``MethodSpec`` (method.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.types import Context, Proposal, Request, Verdict


class Proposer(ABC):
    """Where drafts come from. ``propose`` runs each round; the other methods are optional."""

    name: str = "custom"
    needs_hidden: tuple[int, ...] = ()  # hidden states of the target that it reads, counted as types.Scores says
    drafts_trees: bool = False  # whether its proposals can be trees, which the verifier must support
    max_drafts: int = 64  # maximum path length
    auto_drafts: int = 15  # maximum path length where K is chosen each round: passes of 16 rows
    drafts_ahead: bool = True  # whether it can draft after tokens that are certain but that the target has not read yet
    reads_text_only: bool = False  # whether it looks at committed tokens alone, and runs no model
    memory: Any = None  # what it learned from requests that ended; None: nothing yet

    @abstractmethod
    def propose(self, context: Context, k: int) -> Proposal:
        """Draft at most k tokens on a path for each of the B requests; more than ``context.limits[b]`` are of no use.

        An exception pauses drafting for all of them. The sampler's ``InvalidLogits``, let through once ``context.hidden`` was
        read, pauses it for the requests that it names.
        """

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        """Prefill the next chunk of new requests; return for each whether it can be drafted for now.

        For proposers that run a model over the whole text: other requests should not wait for it.
        """
        return [True] * len(requests)

    def fork(self, source_id: str, request: Request) -> None:  # noqa: B027 - optional
        """A new request has the prompt of another: what is cached of that prompt may be copied."""

    def commit(self, context: Context, verdict: Verdict) -> None:  # noqa: B027 - optional
        """Learn what was accepted, before it is appended to the requests' tokens. Proposers without a cache need nothing.

        Called for requests that were drafted for this round: all at once, or one by one where the target had to score them so.
        """

    def release(self, request_ids: Sequence[str]) -> None:  # noqa: B027 - optional
        """Forget requests. Unknown ids are ignored."""

    def retire(self, request_ids: Sequence[str]) -> None:
        """Forget requests that finished; their cache may be kept for requests with the same prefix."""
        self.release(request_ids)

    def warmup(self, k: int, batch: int) -> None:  # noqa: B027 - optional
        """Do now what would make the first rounds slow: compile, measure."""

    def num_nodes(self, k: int) -> int:
        """Drafts in a full proposal whose longest path is k: the price of the target's pass depends on it."""
        return k


class ScriptedProposer(Proposer):
    """Calls a function: a public mock of the interface, for tests.

    >>> proposer = ScriptedProposer(lambda context, k: Proposal.empty(len(context.requests)))
    """

    name = "scripted"

    def __init__(self, script: Callable[[Context, int], Proposal]) -> None:
        self._script = script

    def propose(self, context: Context, k: int) -> Proposal:
        return self._script(context, k)

    @classmethod
    def of_chains(cls, chains: Callable[[Context, int], Sequence[Sequence[int]]]) -> ScriptedProposer:
        """Build from a function that returns each request's drafts as a list of ids (point masses, ragged)."""
        return cls(lambda context, k: chain_proposal(chains(context, k)))


def chain_proposal(chains: Sequence[Sequence[int]]) -> Proposal:
    """Convert ragged lists of draft ids to a right-padded chain proposal of point masses."""
    lens = [len(chain) for chain in chains]
    width = max(lens, default=0)
    padded = [list(chain) + [0] * (width - len(chain)) for chain in chains]
    return Proposal(torch.tensor(padded, dtype=torch.long).view(len(chains), width), torch.tensor(lens, dtype=torch.long))


def merged(parts: Sequence[tuple[Sequence[int], Proposal]], batch: int, vocab_size: int) -> Proposal:
    """Merge proposals for disjoint rows of a batch into one; the remaining rows have no drafts.

    If one has probabilities, point masses of the others become one-hots; if one is a tree, chains of the others become
    trees. Both are equivalent for a verifier.
    """
    parts = [(rows, part) for rows, part in parts if part.num_nodes]
    if not parts:
        return Proposal.empty(batch)
    if len(parts) == 1 and len(parts[0][0]) == batch:
        return parts[0][1]
    device = next((part.probs.device for _, part in parts if part.probs is not None), parts[0][1].token_ids.device)
    width = max(part.num_nodes for _, part in parts)
    token_ids, lens = torch.zeros(batch, width, dtype=torch.long, device=device), torch.zeros(batch, dtype=torch.long)
    probs = parents = None
    drawn = [part.probs for _, part in parts if part.probs is not None]
    if drawn:
        probs = torch.zeros(batch, width, vocab_size, dtype=drawn[0].dtype, device=device)
    if any(part.parents is not None for _, part in parts):
        parents = torch.arange(-1, width - 1, device=device).repeat(batch, 1)
    for rows, part in parts:
        index, nodes = torch.tensor(rows, device=device), slice(part.num_nodes)
        token_ids[index, nodes] = part.token_ids.to(device)
        lens[torch.tensor(rows)] = part.lens
        if probs is not None and part.probs is not None:
            probs[index, nodes] = part.probs.to(device)
        elif probs is not None:
            probs[index[:, None], torch.arange(part.num_nodes, device=device), part.token_ids.to(device)] = 1.0
        if parents is not None and part.parents is not None:
            parents[index, nodes] = part.parents.to(device)
    partial = next((part.partial_pass for _, part in parts if part.partial_pass is not None), None)
    return Proposal(token_ids, lens, probs, parents, partial)


def spread(values: Tensor, rows: Sequence[int], batch: int) -> Tensor:
    """Scatter [A, ...] of the requests ``rows`` to [B, ...]; other rows are zero and unused."""
    if len(rows) == batch:
        return values
    index = torch.tensor(rows, device=values.device)
    return values.new_zeros(batch, *values.shape[1:]).index_copy_(0, index, values)
