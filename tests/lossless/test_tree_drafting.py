"""Losslessness of drafted trees by enumeration of all samples of the real drafting code with their probabilities.

A table replaces the head: its "features" are indices of sequences. Everything else is real.
"""

from __future__ import annotations

import itertools
from time import perf_counter

import pytest
import torch
from torch import Tensor
from toy import make_request

from outrider.heads.head_runner import Step
from outrider.proposers import head_trees, medusa, trees
from outrider.proposers.tree_chances import Calibration, Floats
from outrider.proposers.tree_sizes import TreeCosts
from outrider.proposers.trees import best_tree, next_sibling_probs, shape_of
from outrider.sampling import Sampler
from outrider.types import Context, Proposal, Request, SamplingParams
from outrider.verifiers.rejection import RejectionVerifier

from .enumeration import (
    DRAFT,
    PROMPT,
    VOCAB,
    Drafts,
    Text,
    distance,
    expected_accepted,
    fixed_drafts,
    generation_law,
    loss,
    round_law,
    score,
    target_law,
)

EXACT = 1e-12
SHAPE = shape_of(best_tree([(0.7, 0.5), (0.6, 0.2)], 4)[0])  # two children of the root, two of the first or one of each
SETTINGS = {
    "warm": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "one left": SamplingParams(temperature=1.0, top_k=1),
    "greedy": SamplingParams(),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.5),
    "banned": SamplingParams(temperature=1.3, banned_token_ids=(1,)),
}


class TableHead:
    """A RolloutRunner whose next-token distribution is a table's; feedback [A, W, 1] holds indices of texts."""

    def __init__(self, text: Text) -> None:
        self.texts = [text]

    @property
    def root(self) -> Step:
        return self._after(0).view(1)

    def _after(self, first: int) -> Step:
        logits = DRAFT.batch(self.texts[first:])[None]
        return Step(torch.arange(first, len(self.texts)).view(1, -1, 1), logits)

    def level(self, ids: list[str], token_ids: Tensor, hidden: Tensor, depth: int, sees: Tensor) -> Step:
        first = len(self.texts)
        for parent, token in zip(hidden.flatten().tolist(), token_ids.flatten().tolist(), strict=True):
            self.texts.append((*self.texts[int(parent)], token))
        assert sees.shape[:2] == token_ids.shape and bool(sees[..., -token_ids.shape[1] :].diagonal(dim1=1, dim2=2).all())
        return self._after(first)


def confident_tree(request: Request, k: int, top_k: int, found: head_trees._Candidates, limit: int = 9) -> Proposal:
    head, context = TableHead(tuple(request.token_ids)), Context((request,), (limit,), Sampler([request], VOCAB))
    return head_trees._confident_tree(head, context, k, head.root, top_k, found)


class Believing(Calibration):
    """A calibration that returns confidences unchanged."""

    def chances(self, confidences: Floats) -> Floats:
        return confidences.copy()


class Scripted(Sampler):
    """Returns given samples and computes their probability."""

    def __init__(self, script: tuple[int, ...], request: object) -> None:
        super().__init__([request], VOCAB)
        self.script, self.weight = script, 1.0

    def draw(self, probs: Tensor, index: int) -> Tensor:
        assert abs(float(probs.sum()) - 1) < 1e-12
        self.weight *= float(probs[0, self.script[index]])
        return torch.tensor([self.script[index]])


def drawn(output: Text, params: SamplingParams) -> Drafts:
    """Enumerate all results of the real drafting code."""
    rows, weights = [], []
    for script in itertools.product(range(VOCAB), repeat=len(SHAPE.parents)):
        request = make_request(PROMPT + output, params, num_prompt=len(PROMPT))
        sampler = Scripted(script, request)
        head = TableHead(PROMPT + output)
        proposal = head_trees._drawn_tree(head, Context((request,), (9,), sampler), head.root, SHAPE)
        if sampler.weight > 0:
            rows.append(proposal)
            weights.append(sampler.weight)
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    joined = [torch.cat([getattr(row, name) for row in rows]) for name in ("token_ids", "lens", "probs", "parents")]
    return Drafts(Proposal(*joined), torch.tensor(weights, dtype=torch.float64))


def test_the_shape_enumerated_has_siblings_at_both_depths():
    assert SHAPE.parents == (-1, -1, 0, 0) or SHAPE.parents == (-1, -1, 0, 1)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("output", [(), (2, 0, 2)])
def test_a_sampled_tree_is_lossless(setting: str, output: Text) -> None:
    assert loss(RejectionVerifier(), SETTINGS[setting], output, drawn) < EXACT


def drawn_by_depth(output: Text, params: SamplingParams) -> Drafts:
    """As in Medusa, the distribution of a node depends on its depth, not on the drafts before it."""
    # [D, V], any distributions will do
    by_depth = DRAFT.batch([PROMPT + output + (0,) * depth for depth in range(max(SHAPE.depths))])
    rows, weights = [], []
    for script in itertools.product(range(VOCAB), repeat=len(SHAPE.parents)):
        sampler = Scripted(script, make_request(PROMPT + output, params, num_prompt=len(PROMPT)))
        rows.append(trees.draw_tree(SHAPE, sampler, 1, medusa.logits_by_depth(by_depth[:, None], SHAPE)))
        weights.append(sampler.weight)
    possible = [i for i, weight in enumerate(weights) if weight > 0]
    joined = [torch.cat([getattr(rows[i], name) for i in possible]) for name in ("token_ids", "lens", "probs", "parents")]
    return Drafts(Proposal(*joined), torch.tensor([weights[i] for i in possible], dtype=torch.float64))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tree_sampled_by_depth_is_lossless(setting: str) -> None:
    assert loss(RejectionVerifier(), SETTINGS[setting], (2, 0, 2), drawn_by_depth) < EXACT


def test_whole_generations_from_sampled_trees_are_lossless() -> None:
    params = SETTINGS["penalties"]
    assert distance(generation_law(RejectionVerifier(), params, 3, drawn), target_law((), params, 3)) < EXACT


def test_sampled_siblings_are_accepted_more_often_than_the_likeliest_tokens() -> None:
    """The reason for sampled siblings: a point-mass tree of the same shape accepts less in expectation on this table."""
    params = SETTINGS["warm"]

    def likeliest(output: Text, params: SamplingParams) -> Drafts:
        tokens: list[int] = []
        texts = {-1: PROMPT + output}
        for node, parent in enumerate(SHAPE.parents):
            rank = sum(SHAPE.parents[other] == parent for other in range(node))
            tokens.append(int(DRAFT.logits(texts[parent]).argsort(descending=True)[rank]))
            texts[node] = (*texts[parent], tokens[-1])
        return fixed_drafts([tokens], SHAPE.parents)

    def accepted(draft: object) -> float:
        drafts = draft((), params)
        return expected_accepted(round_law(RejectionVerifier(), drafts, score(drafts.proposal, (), params)))

    assert accepted(drawn) > accepted(likeliest)


def test_harness_detects_siblings_sampled_without_replacement_but_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: siblings sampled without replacement, with the probabilities of sampling with replacement."""
    real = next_sibling_probs

    class Hiding(Scripted):
        def draw(self, probs: Tensor, index: int) -> Tensor:
            first = index if index < 2 else 2
            honest = real(self.base, torch.tensor([self.script[first:index]]) if index > first else None, self.base.log())
            return super().draw(honest, index)

    def hidden(base: Tensor, taken: Tensor | None, logits: Tensor) -> Tensor:
        Hiding.base = base
        return base

    monkeypatch.setattr(trees, "next_sibling_probs", hidden)
    monkeypatch.setitem(globals(), "Scripted", Hiding)
    assert loss(RejectionVerifier(), SETTINGS["warm"], (), drawn) > 1e-5


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_confident_tree_contains_the_likeliest_paths(k: int) -> None:
    """Compare with all paths of the table: the chosen nodes are those with the highest products of probabilities."""
    text: Text = PROMPT
    proposal = confident_tree(make_request(text), k, VOCAB**2, head_trees._Candidates(5, Believing()))
    worth: dict[Text, float] = {}
    for depth in range(1, k + 1):
        for path in itertools.product(range(VOCAB), repeat=depth):
            before = worth[path[:-1]] if depth > 1 else 1.0
            worth[path] = before * float(DRAFT.logits(text + path[:-1]).softmax(-1)[path[-1]])
    best = sorted(worth, key=lambda path: -worth[path])[: min(5, len(worth))]
    paths: list[Text] = []
    for token, parent in zip(proposal.token_ids[0].tolist(), proposal.parents[0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == set(best) and int(proposal.lens[0]) == len(best)
    siblings = [(parent, worth[path]) for parent, path in zip(proposal.parents[0].tolist(), paths, strict=True)]
    assert all(a[1] >= b[1] for a, b in itertools.combinations(siblings, 2) if a[0] == b[0])


def test_impossible_tokens_are_in_no_tree() -> None:
    """For any maximum size and any calibration of small confidences."""
    request = make_request(PROMPT, SamplingParams(banned_token_ids=(1,)))
    proposal = confident_tree(request, 2, VOCAB, head_trees._Candidates(50, Calibration()))
    assert int(proposal.lens[0]) == (VOCAB - 1) + (VOCAB - 1) ** 2
    assert 1 not in proposal.token_ids[0, : int(proposal.lens[0])]


def test_higher_acceptance_than_confidence_gives_deeper_trees() -> None:
    """A level pays for a draft that is accepted in nine of ten rounds, but not at the acceptance in this table."""
    request, calibration = make_request(PROMPT), Calibration()
    prices = TreeCosts(1, 0.0, [1.0 + 0.3 * nodes for nodes in range(7)])

    def drafted() -> tuple[int, list[float]]:
        found = head_trees._Candidates(6, calibration, prices, perf_counter())
        confident_tree(request, 6, 2, found)
        return found.num_levels, found.trees[request.request_id].confidences

    depth, confidences = drafted()
    for _ in range(100):
        calibration.learn(confidences[:2], 0)
    assert depth < drafted()[0]


def test_a_limit_bounds_the_depth_of_the_tree() -> None:
    proposal = confident_tree(make_request(PROMPT), 3, 2, head_trees._Candidates(6, Believing()), limit=1)
    assert set(proposal.parents[0, : int(proposal.lens[0])].tolist()) == {-1}


@pytest.mark.parametrize("num_nodes", range(1, 12))
def test_the_best_tree_is_the_best_of_all_trees(num_nodes: int) -> None:
    """Any set of nodes with their parents and earlier siblings has no more expected accepted drafts than the greedy choice."""
    rates = [(0.6, 0.2, 0.1), (0.5, 0.25, 0.05)]
    shape = shape_of(best_tree(rates, num_nodes)[0])
    worth: list[float] = []
    for parent, rank, depth in zip(shape.parents, shape.ranks, shape.depths, strict=True):
        worth.append((worth[parent] if parent >= 0 else 1.0) * rates[depth - 1][rank])
    values = [a for a in rates[0]] + [a * b for a in rates[0] for b in rates[1]]
    assert sum(worth) == pytest.approx(sum(sorted(values, reverse=True)[:num_nodes]))
    assert all(parent < node for node, parent in enumerate(shape.parents))
    for depth in (1, 2):
        nodes = [node for node, each in enumerate(shape.depths) if each == depth]
        assert nodes == list(range(nodes[0], nodes[-1] + 1)) if nodes else True
        leaves = [not shape.children(node) for node in nodes]
        assert leaves == sorted(leaves)
