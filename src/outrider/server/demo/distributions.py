"""Distributions at each token's position: the draft's, the target's, and their residual.

Computed from the ``RoundResult`` of a batch of one with the formulas of ``verifiers/rejection.py``, for any method. The request
must have no penalties, ``min_tokens`` or grammar: the round's tokens are committed already, and these depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine.round import RoundResult
from outrider.verifiers.base import accept_prob, residual
from outrider.verifiers.rejection import draft_distribution

Entry = dict[str, Any]  # of one token, for the page
TOP = 5  # tokens shown per distribution
MAX_ROWS = 9


@torch.no_grad()
def places(seen: RoundResult, token_ids: Sequence[int], name: Callable[[int], str], has_chances: bool) -> list[Entry]:
    """Return one entry per emitted token of a round: the accepted path, then the next token.

    ``name`` returns the name of a token id. An entry names the most likely tokens at the position, with their probabilities;
    the emitted token and the drafts refer to them by index (``row``), because two tokens may share a name.

    ``has_chances``: whether sampled rounds are verified draft by draft, so that a draft has an acceptance probability and a
    residual. Otherwise both are None.
    """
    proposal, sampler, logits = seen.proposal, seen.context.sampler, seen.scores.logits
    target = sampler.probs(logits, proposal.token_ids, proposal.parents, lens=proposal.lens)[0]  # [N + 1, V]
    is_greedy = seen.context.requests[0].params.is_greedy
    (path,) = seen.verdict.paths
    found = []
    for depth, emitted in enumerate(token_ids):
        parent = path[depth - 1] if depth else -1
        accepted = path[depth] if depth < len(path) else None
        odds = torch.softmax(logits[0, parent + 1], -1) if is_greedy else None
        tried = _tried(seen, parent, accepted)
        place = _place(seen, target[parent + 1], odds, tried, accepted, emitted, has_chances)
        place["tokens"] = [name(token) for token in place["tokens"]]
        found.append(place)
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
    seen: RoundResult,
    target: Tensor,
    odds: Tensor | None,
    tried: list[int],
    accepted: int | None,
    emitted: int,
    has_chances: bool,
) -> Entry:
    """Return the entry of one token, with token ids instead of names. ``odds``: a greedy target's, before the argmax."""
    proposal = seen.proposal
    ids = proposal.token_ids[0]
    left, first = target, None
    guesses: list[dict[str, Any]] = []
    for node in tried:
        token = int(ids[node])
        draft = draft_distribution(proposal, 0, node, target).to(target.device)
        first = draft if first is None else first
        chance = round(float(accept_prob(left[token], draft[token])), 4) if has_chances else None
        guesses.append({"token": token, "chance": chance, "accepted": node == accepted})
        excess = (left - draft).clamp_min(0.0)
        left = residual(left, draft) if float(excess.sum()) > 0 else torch.zeros_like(left)
    rest = left if tried and has_chances and float(left.sum()) > 0 else None
    shown = _shown([target if odds is None else odds, first, rest], [emitted, *(guess["token"] for guess in guesses)])
    for guess in guesses:
        guess["row"] = shown.index(guess.pop("token"))
    return {
        "tokens": shown,
        "row": shown.index(emitted),
        "guesses": guesses,
        "target": _values(target, shown),
        "draft": _values(first, shown),  # of the first draft; None without drafts
        "residual": _values(rest, shown),  # sampled after a rejection; None: it is empty, or there are no chances
        "odds": _values(odds, shown),
        "is_point_mass": bool(tried) and proposal.probs is None,  # the draft has no distribution
    }


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


def _values(distribution: Tensor | None, token_ids: list[int]) -> list[float] | None:
    return None if distribution is None else [round(value, 5) for value in distribution[token_ids].tolist()]
