"""Validate proposals before the target scores them: the drafts of an invalid row are dropped, and its request continues.

The contract is that of ``outrider.types.Proposal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.sampling.grammar_masks import allowed_after, is_empty, path_to
from outrider.types import Context, Proposal, Request
from outrider.verifiers.base import fill_padding

PROBS_TOLERANCE = 1e-2  # a float32 softmax over 250k entries sums to 1 well within this


@dataclass(frozen=True, slots=True)
class Checked:
    """A valid proposal, its ids and lens as lists, and the rows that were invalid."""

    proposal: Proposal
    token_ids: list[list[int]]
    lens: list[int]
    faults: dict[int, str] = field(default_factory=dict)  # row -> what is wrong
    kept: Sequence[Sequence[int]] | None = None  # [B][N]: indices of the drafts in the proposer's proposal; None: all of it


def check(proposal: object, limits: Sequence[int], k: int, vocab_size: int) -> Checked:
    """Drop the drafts of rows that break the contract, and cut chains that are longer than requested, which is not a fault.

    Raises ``ValueError`` for a wrong type or shape, which affects all rows.
    """
    proposal = _check_shapes(proposal, len(limits), vocab_size)
    rows: list[list[int]] = proposal.token_ids.tolist()
    lens: list[int] = proposal.lens.tolist()
    num_nodes = proposal.num_nodes
    faults = {row: f"{n} drafts in a proposal of {num_nodes}" for row, n in enumerate(lens) if not 0 <= n <= num_nodes}
    for row, (ids, n) in enumerate(zip(rows, lens, strict=True)):
        if row not in faults and n and not (min(ids[:n]) >= 0 and max(ids[:n]) < vocab_size):
            faults[row] = f"a draft id outside the vocabulary of {vocab_size}"
    if proposal.probs is not None and num_nodes:
        faults = _check_probs(proposal.probs, lens) | faults
    if proposal.parents is not None and num_nodes:
        faults = _check_parents(proposal.parents, lens) | faults
    wanted = [0 if row in faults else n for row, n in enumerate(lens)]
    if proposal.parents is None:
        wanted = [min(n, k, limit) for n, limit in zip(wanted, limits, strict=True)]
    if wanted != lens or num_nodes != max(wanted):
        proposal = proposal.narrow(wanted)
    return Checked(_with_valid_padding(proposal, rows, wanted, vocab_size), rows, wanted, faults)


def without_unusable(checked: Checked, context: Context) -> Checked:
    """Drop drafts that break a request's grammar or follow its end or a dead end, and nodes of trees deeper than its K.

    Dropping a point mass that the grammar forbids is lossless: its target probability is 0, so its rejection changes no
    distribution. Drafts with probabilities are kept up to the end of the text: the sampler applied the grammar to them. A draft
    that leads into a dead end is kept, because dropping what was sampled would change the distribution.
    """
    proposal, own = checked.proposal, [request.num_draft_tokens for request in context.requests]
    is_tree = proposal.parents is not None
    has_grammar = any([request.matcher is not None for request in context.requests])
    if not has_grammar and (not is_tree or own.count(None) == len(own)):
        return checked
    parents = proposal.parents.tolist() if proposal.parents is not None else None
    kept = []
    for b, request in enumerate(context.requests):
        drafts, tree, max_depth = checked.token_ids[b], None if parents is None else parents[b], own[b]
        nodes: list[int] = []
        depths = {-1: 0}  # of the kept nodes
        for node in range(checked.lens[b]):
            parent = node - 1 if tree is None else tree[node]
            if parent not in depths or (is_tree and max_depth is not None and depths[parent] >= max_depth):
                continue
            if request.matcher is not None and _breaks_grammar(
                request, path_to(parent, drafts, tree), drafts[node], proposal, (b, node)
            ):
                continue
            depths[node] = depths[parent] + 1
            nodes.append(node)
        kept.append(nodes)
    return _pruned(checked, kept)


def _breaks_grammar(request: Request, path: Sequence[int], token: int, proposal: Proposal, place: tuple[int, int]) -> bool:
    """Return whether nothing may follow the drafts of ``path``, or the draft after them is a point mass on a forbidden token.

    ``place``: request and node of the draft.
    """
    allowed = allowed_after(request, path)
    if allowed is None or is_empty(allowed):
        return True
    return not allowed[token] and _is_point_mass(proposal, *place, token)


def _pruned(checked: Checked, kept: Sequence[Sequence[int]]) -> Checked:
    """Keep only the drafts ``kept[b]`` of each row, which are in order and include their parents."""
    proposal, lens = checked.proposal, [len(nodes) for nodes in kept]
    if lens == checked.lens:
        return checked
    if not any(lens):
        return Checked(proposal.narrow(lens), [[]] * len(lens), lens, checked.faults)
    pruned = proposal.gather(kept)
    if proposal.parents is not None:
        rows, width = proposal.parents.tolist(), pruned.num_nodes
        moved = [[-1 if rows[b][node] < 0 else nodes.index(rows[b][node]) for node in nodes] for b, nodes in enumerate(kept)]
        parents = torch.tensor([[*row, *[-1] * (width - len(row))] for row in moved], device=proposal.parents.device)
        pruned = replace(pruned, parents=parents)
    return Checked(pruned, pruned.token_ids.tolist(), lens, checked.faults, kept)


def _is_point_mass(proposal: Proposal, b: int, node: int, token: int) -> bool:
    """Return whether the draft is a point mass: without probabilities, or a one-hot among requests with probabilities."""
    return proposal.probs is None or float(proposal.probs[b, node, token]) == 1.0


def _check_shapes(proposal: object, batch: int, vocab_size: int) -> Proposal:
    if not isinstance(proposal, Proposal):
        raise ValueError(f"propose() returned {type(proposal).__name__}, not a Proposal")
    ids, lens, probs, parents = proposal.token_ids, proposal.lens, proposal.probs, proposal.parents
    if ids.dim() != 2 or ids.shape[0] != batch or ids.dtype != torch.long:
        raise ValueError(f"token_ids is {ids.dtype} {tuple(ids.shape)}, not int64 [{batch}, N]")
    if lens.shape != (batch,) or lens.dtype != torch.long:
        raise ValueError(f"lens is {lens.dtype} {tuple(lens.shape)}, not int64 [{batch}]")
    if probs is not None and (probs.shape != (*ids.shape, vocab_size) or not probs.is_floating_point()):
        raise ValueError(f"probs is {probs.dtype} {tuple(probs.shape)}, not float {[*ids.shape, vocab_size]}")
    if parents is not None and (parents.shape != ids.shape or parents.dtype != torch.long):
        raise ValueError(f"parents is {parents.dtype} {tuple(parents.shape)}, not int64 {list(ids.shape)}")
    if proposal.is_grammar is not None or proposal.is_proposed is not None:
        raise ValueError("is_grammar or is_proposed is given: only the engine may set it")
    return proposal


def _check_probs(probs: Tensor, lens: list[int]) -> dict[int, str]:
    """Return the rows with a NaN, a negative entry or a sum other than 1 among their valid drafts."""
    sums, lowest = torch.stack((probs.sum(-1), probs.amin(-1))).tolist()  # [B, N] each
    return {
        row: "draft probabilities that are NaN, negative or do not sum to 1"
        for row, n in enumerate(lens)
        # NaN compares false
        if not all(abs(sums[row][i] - 1) <= PROBS_TOLERANCE and lowest[row][i] >= 0 for i in range(min(n, len(sums[row]))))
    }


def _check_parents(parents: Tensor, lens: list[int]) -> dict[int, str]:
    return {
        row: "a parent that does not precede its child"
        for row, (ids, n) in enumerate(zip(parents.tolist(), lens, strict=True))
        if not all(-1 <= parent < i for i, parent in enumerate(ids[:n]))
    }


def _with_valid_padding(proposal: Proposal, rows: list[list[int]], lens: list[int], vocab_size: int) -> Proposal:
    """Replace invalid ids and parents in the padding by token 0 and the root, so that the target can process them."""
    width = proposal.num_nodes
    if any(not 0 <= token < vocab_size for ids, n in zip(rows, lens, strict=True) for token in ids[n:width]):
        proposal = replace(proposal, token_ids=fill_padding(proposal.token_ids, proposal.lens))
    if proposal.parents is not None and min(lens, default=0) < width:
        proposal = replace(proposal, parents=fill_padding(proposal.parents, proposal.lens, -1))
    return proposal
