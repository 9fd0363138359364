"""Distributions at each token's position: the draft's, the target's, and their residual.

Computed from the ``RoundResult`` of a batch of one with the verifier's formulas, for any method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine import RoundResult
from outrider.verifiers.base import accept_prob, residual

TOP = 5  # tokens shown per distribution
MAX_ROWS = 9


@dataclass(frozen=True)
class Guess:
    """A draft that was verified at a position."""

    token_id: int
    chance: float  # acceptance probability when it was verified
    is_accepted: bool


@dataclass(frozen=True)
class Place:
    """One emitted token, and the distributions over the most likely tokens at its position, one entry per token."""

    guesses: list[Guess]
    token_ids: list[int]
    target: list[float]
    draft: list[float] | None  # of the first draft; None without drafts
    residual: list[float] | None  # sampled after a rejection; None: the residual is empty
    odds: list[float] | None  # a greedy target's probabilities before the argmax; None when sampling
    is_point_mass: bool  # the draft has no distribution


@torch.no_grad()
def places(seen: RoundResult, token_ids: Sequence[int]) -> list[Place]:
    """Return one entry per emitted token of a round: the accepted path, then the next token."""
    proposal, sampler, logits = seen.proposal, seen.context.sampler, seen.scores.logits
    target = sampler.probs(logits, proposal.token_ids, proposal.parents, lens=proposal.lens)[0]  # [N + 1, V]
    is_greedy = seen.context.requests[0].params.is_greedy
    (path,) = seen.paths
    found = []
    for depth, emitted in enumerate(token_ids):
        parent = path[depth - 1] if depth else -1
        accepted = path[depth] if depth < len(path) else None
        odds = torch.softmax(logits[0, parent + 1], -1) if is_greedy else None
        tried = _tried(seen, parent, accepted)
        found.append(_place(seen, target[parent + 1], odds, tried, accepted, emitted))
    return found


def _tried(seen: RoundResult, parent: int, accepted: int | None) -> list[int]:
    """Return the children of ``parent``, up to the accepted one."""
    proposal = seen.proposal
    count = int(proposal.lens[0])
    if proposal.parents is None:
        return [parent + 1] if parent + 1 < count else []
    nodes = [node for node, each in enumerate(proposal.parents[0, :count].tolist()) if each == parent]
    return nodes if accepted is None else nodes[: nodes.index(accepted) + 1]


def _place(
    seen: RoundResult, target: Tensor, odds: Tensor | None, tried: list[int], accepted: int | None, emitted: int
) -> Place:
    proposal = seen.proposal
    ids = proposal.token_ids[0]
    left, first, guesses = target, None, []
    for node in tried:
        token = int(ids[node])
        if proposal.probs is None:
            draft = torch.zeros_like(target)
            draft[token] = 1.0
        else:
            draft = proposal.probs[0, node].to(target.device)
        first = draft if first is None else first
        guesses.append(Guess(token, float(accept_prob(left[token], draft[token])), node == accepted))
        excess = (left - draft).clamp_min(0.0)
        left = residual(left, draft) if float(excess.sum()) > 0 else torch.zeros_like(left)
    # With coupled noise the target's choice does not depend on the draft, so there is no residual.
    rest = left if tried and float(left.sum()) > 0 and not seen.context.sampler.coupled else None
    shown = _shown([target if odds is None else odds, first, rest], [emitted, *[guess.token_id for guess in guesses]])
    return Place(
        guesses,
        shown,
        _values(target, shown),
        None if first is None else _values(first, shown),
        None if rest is None else _values(rest, shown),
        None if odds is None else _values(odds, shown),
        bool(tried) and proposal.probs is None,
    )


def _shown(distributions: Sequence[Tensor | None], always: Sequence[int]) -> list[int]:
    """Return the emitted token, the drafts, then the most likely tokens of each distribution."""
    chosen = dict.fromkeys(always)
    tops = [torch.topk(each, min(TOP, len(each))).indices.tolist() for each in distributions if each is not None]
    for rank in range(TOP):
        for top in tops:
            if rank < len(top) and len(chosen) < MAX_ROWS:
                chosen.setdefault(top[rank])
    order = distributions[0]
    assert order is not None  # the target's distribution is always given
    return sorted(chosen, key=lambda token: -float(order[token]))


def _values(distribution: Tensor, token_ids: Sequence[int]) -> list[float]:
    return [round(value, 5) for value in distribution[list(token_ids)].tolist()]
