"""Interface of proposers, which draft in each round, and ``ScriptedProposer``, its mock for tests.

A proposer reads the committed tokens and, if it declares ``needs_hidden``, hidden states of the target. It is independent of
verifiers and the engine. Options and checks of a method belong to its ``MethodSpec`` (method.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.types import BatchSampler, Context, Proposal, Request, Verdict


class Proposer(ABC):
    """Drafts tokens. ``propose`` is called each round; the other methods are optional."""

    name: str = "custom"
    needs_hidden: tuple[int, ...] = ()  # hidden states of the target that it reads, numbered as in types.Scores
    max_drafts: int = 64  # maximum path length
    # Maximum path length if a policy chooses K, or as the second of two methods: the target's pass then has up to 16 rows.
    auto_drafts: int = 15
    drafts_ahead: bool = True  # whether it can draft after forced tokens that the target has not processed yet
    is_model_free: bool = False  # whether it reads committed tokens only, runs no model and drafts point masses
    memory: Any = None  # what it learned from finished requests; None: nothing yet

    @abstractmethod
    def propose(self, context: Context, k: int) -> Proposal:
        """Draft at most ``min(k, context.limits[b])`` tokens on each path of request b.

        The engine calls it with ``k`` and all limits of at least 1. It cuts longer chains; deeper trees are scored as they
        are, except that a request's own K removes nodes. An exception ends drafting for all requests of the context, a
        ``RequestFault`` (such as the sampler's ``InvalidLogits``) only for those that it names. Read ``context.hidden`` before
        raising: these states are not passed again.
        """

    def start(self, request: Request) -> int:
        """Start a new request from the longest prefix that the proposer has cached.

        Return the number of its leading tokens whose hidden states are not needed: the target need not compute them either.
        """
        return 0 if self.needs_hidden else len(request.token_ids) - 1

    def prefill(self, requests: Sequence[Request]) -> list[bool]:
        """Prefill the next chunk of new requests; return for each whether it can be drafted for now.

        For proposers that run a model over the whole sequence, so that one long prompt does not delay other requests.
        """
        return [True] * len(requests)

    def fork(self, source_id: str, request: Request) -> None:  # noqa: B027 - optional
        """Copy the cached prompt of request ``source_id`` for a new request with the same prompt."""

    def commit(self, context: Context, verdict: Verdict) -> None:  # noqa: B027 - optional
        """Process the verdict, before accepted tokens are appended to the requests. Only needed by proposers with state.

        Called for the requests that it drafted for in this round, with all of them, or one by one after a failure of the
        target. Those for which it made no draft may be missing. It follows only a ``propose`` that returned.
        """

    def release(self, request_ids: Sequence[str]) -> None:  # noqa: B027 - optional
        """Drop all state of requests, which may have failed, or continue and be prefilled again. Unknown ids are ignored."""

    def retire(self, request_ids: Sequence[str]) -> None:
        """Drop the state of requests that finished or were aborted; their cache may be kept for others with the same prefix.

        Called instead of ``release``.
        """
        self.release(request_ids)

    def prepare(self) -> None:  # noqa: B027 - optional
        """Compile and measure what would otherwise slow down the first rounds."""

    def num_nodes(self, k: int) -> int:
        """Return the number of drafts in a full proposal of depth k, which determines the cost of the target's pass."""
        return k


class ScriptedProposer(Proposer):
    """A proposer that calls a function, for tests.

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


def pick(sampler: BatchSampler, logits: Tensor, drafts: Tensor, step: int, probs: list[Tensor]) -> None:
    """Write draft ``step`` of a chain to drafts [B, K], from the logits [B, 1, V] after the drafts before it.

    Its distribution [B, 1, V] is added to ``probs``, unless it is a point mass. Raises ``InvalidLogits``.
    """
    if sampler.is_deterministic:
        drafts[:, step : step + 1] = sampler.tokens(logits, drafts, start=step)
    else:
        probs.append(sampler.probs(logits, drafts, start=step))
        drafts[:, step] = sampler.draw(probs[-1][:, 0], step)


def pick_with_confidence(sampler: BatchSampler, logits: Tensor, drafts: Tensor, step: int, probs: list[Tensor]) -> list[float]:
    """Write draft ``step`` as ``pick`` does, and return its probability in the draft model for each request."""
    if sampler.is_deterministic:
        tokens, likelihoods = sampler.likeliest(logits, 1, drafts, start=step)
        confidences: list[float] = likelihoods.flatten().tolist()
        if all([math.isfinite(confidence) for confidence in confidences]):
            drafts[:, step] = tokens[:, 0, 0]
            return confidences
    pick(sampler, logits, drafts, step, probs)  # raises where confidences are not finite
    return probs[-1][:, 0].gather(1, drafts[:, step : step + 1]).flatten().tolist()


def rows_with_hidden(context: Context, index: int) -> list[int]:
    """Return the rows of requests with hidden states: there are none before the target has prefilled the prompt."""
    return [b for b, states in enumerate(context.hidden[index]) if len(states)]


def merged(parts: Sequence[tuple[Sequence[int], Proposal]], batch: int, vocab_size: int) -> Proposal:
    """Merge proposals for disjoint rows of a batch into one; the remaining rows have no drafts.

    ``parts``: rows and the proposal for them. If one has probabilities, point masses of the others become one-hots; if one is
    a tree, chains of the others become trees. Verifiers treat both forms alike.
    """
    parts = [(rows, part) for rows, part in parts if rows and part.num_nodes]
    if not parts:
        return Proposal.empty(batch)
    if len(parts) == 1 and list(parts[0][0]) == list(range(batch)):
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
