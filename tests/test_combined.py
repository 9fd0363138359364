"""Combined methods: which one drafts for which request, and the verdicts that each gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runner.rounds import make_request, verdict_of
from test_draft_model import Drafting

from outrider.proposers.base import Proposer, ScriptedProposer, chain_proposal, merged
from outrider.proposers.combined import CombinedConfig, CombinedProposer
from outrider.proposers.method import Setting
from outrider.registry import PROPOSERS
from outrider.sampling import Sampler
from outrider.types import Context, OutriderError, Proposal, SamplingParams

VOCAB = 9


class Recorder(Proposer):
    """Drafts from a table of request -> drafts, and records calls."""

    def __init__(self, name, chains, needs_hidden=(), probs=False, parents=None):
        self.name, self.chains, self.needs_hidden = name, chains, needs_hidden
        self.probs, self.parents = probs, parents
        self.asked, self.told, self.released, self.hidden = [], [], [], []

    def propose(self, context, k):
        self.asked.append((context.request_ids, context.limits, k))
        assert context.sampler.requests == context.requests
        self.hidden.append({layer: [rows.flatten().tolist() for rows in found] for layer, found in context.hidden.items()})
        width = k if self.parents is None else 99
        proposal = chain_proposal([self.chains.get(name, [])[:width] for name in context.request_ids])
        if self.probs:
            proposal = replace(proposal, probs=torch.full((*proposal.token_ids.shape, VOCAB), 1 / VOCAB))
        if self.parents is not None:
            tree = torch.tensor(self.parents)[: proposal.num_nodes].repeat(len(context.requests), 1)
            proposal = replace(proposal, parents=tree)
        return proposal

    def commit(self, context, verdict):
        self.told.append((context.request_ids, verdict.paths, verdict.next_tokens))

    def release(self, request_ids):
        self.released += request_ids


def context_of(*names, limits=None, hidden=None):
    requests = tuple(make_request(name, [1, 2, 3]) for name in names)
    return Context(requests, tuple(limits or [9] * len(names)), Sampler(requests, VOCAB), hidden or {})


def chains_of(proposal):
    return [row[:n] for row, n in zip(proposal.token_ids.tolist(), proposal.lens.tolist(), strict=True)]


def combined(first, second, **config):
    return CombinedProposer(first, second, CombinedConfig(**({"min_first": 3} | config)))


def test_the_first_methods_draft_is_used_only_if_long_enough():
    first = Recorder("first", {"a": [1, 1, 1, 1], "b": [2, 2], "d": [4, 4, 4]})
    second = Recorder("second", {"b": [5, 5], "c": [6], "d": [7, 7]})
    proposal = combined(first, second).propose(context_of("a", "b", "c", "d"), 4)
    assert chains_of(proposal) == [[1, 1, 1, 1], [5, 5], [6], [4, 4, 4]]
    assert proposal.probs is None and proposal.parents is None
    assert second.asked == [(("b", "c"), (9, 9), 4)]


def test_a_short_draft_of_the_first_is_used_if_the_second_has_none():
    first, second = Recorder("first", {"a": [1], "b": [2]}), Recorder("second", {"b": [5]})
    assert chains_of(combined(first, second).propose(context_of("a", "b"), 4)) == [[1], [5]]
    assert chains_of(combined(first, Recorder("none", {})).propose(context_of("a"), 4)) == [[1]]


def test_a_second_method_may_return_padding_only():
    first, padding = Recorder("first", {"a": [1], "b": [2]}), torch.zeros(2, 4, dtype=torch.long)
    second = ScriptedProposer(lambda *_: Proposal(padding, torch.zeros(2, dtype=torch.long)))
    assert chains_of(combined(first, second).propose(context_of("a", "b"), 4)) == [[1], [2]]


def test_a_small_k_does_not_make_a_short_match_long_enough():
    first, second = Recorder("first", {"a": [1, 1], "b": [2, 2, 2, 2]}), Recorder("second", {"a": [5, 5], "b": [6]})
    proposer = combined(first, second)
    assert chains_of(proposer.propose(context_of("a", "b"), 2)) == [[5, 5], [2, 2]]
    assert chains_of(proposer.propose(context_of("a", "b", limits=[1, 1]), 2))[1] == [2]


def test_each_method_is_asked_for_at_most_its_own_maximum():
    first, second = Recorder("first", {}), Recorder("second", {})
    for longer, shorter, asked in ((first, second, (40, 7)), (second, first, (7, 31))):
        longer.max_drafts, longer.auto_drafts, longer.drafts_ahead = 40, 31, False
        shorter.max_drafts, shorter.auto_drafts, shorter.drafts_ahead = 7, 9, True
        proposer = combined(first, second)
        assert (proposer.max_drafts, proposer.auto_drafts, proposer.drafts_ahead) == (40, 31, False)
        proposer.propose(context_of("a"), 40)
        assert (first.asked[-1][2], second.asked[-1][2]) == asked


def test_point_masses_become_one_hots_next_to_probabilities():
    first, second = Recorder("first", {"a": [1, 2, 3]}), Recorder("second", {"b": [4]}, probs=True)
    proposal = combined(first, second).propose(context_of("a", "b"), 4)
    assert proposal.probs[0].argmax(-1).tolist() == [1, 2, 3] and proposal.probs[0].max(-1).values.tolist() == [1, 1, 1]
    assert proposal.probs[0].sum() == 3
    assert torch.equal(proposal.probs[1, 0], torch.full((VOCAB,), 1 / VOCAB))


def test_chains_become_trees_next_to_trees():
    first = Recorder("first", {"a": [1, 2, 3]})
    second = Recorder("second", {"b": [4, 5, 6, 7]}, parents=[-1, -1, 0, 1])
    proposer = combined(first, second)
    proposal = proposer.propose(context_of("a", "b"), 2)
    assert chains_of(proposal) == [[1, 2], [4, 5, 6, 7]]
    assert proposal.parents[0, :2].tolist() == [-1, 0] and proposal.parents[1].tolist() == [-1, -1, 0, 1]


def test_the_second_method_gets_the_verdict_on_its_own_drafts():
    first, second = Recorder("first", {"a": [1, 1, 1], "b": [2], "d": [3]}), Recorder("second", {"b": [5, 6], "c": [7, 7]})
    proposer, context = combined(first, second), context_of("a", "b", "c", "d")
    proposer.propose(context, 3)
    proposer.commit(context, verdict_of([[0, 1, 2], [0, 1], [], [0]], [3, 4, 8, 9]))
    assert second.asked == [(("b", "c", "d"), (9, 9, 9), 3)]
    assert second.told == [(("b", "c"), [[0, 1], []], [4, 8])]


def test_verdicts_for_single_requests_equal_those_for_the_batch():
    """The engine calls it so after one request failed."""
    first, second = Recorder("first", {"a": [1, 1, 1], "b": [2]}), Recorder("second", {"b": [5, 6], "c": [7, 7]})
    proposer, context = combined(first, second), context_of("a", "b", "c")
    proposer.propose(context, 3)
    proposer.commit(context_of("c"), verdict_of([[0]], [8]))
    proposer.commit(context_of("b"), verdict_of([[0, 1]], [4]))
    assert second.told == [(("c",), [[0]], [8]), (("b",), [[0, 1]], [4])]


def test_a_method_that_was_not_called_gets_no_verdict():
    first, second = Recorder("first", {"a": [1, 1, 1]}), Recorder("second", {})
    proposer, context = combined(first, second), context_of("a")
    proposer.propose(context, 3)
    proposer.commit(context, verdict_of([[0]], [3]))
    assert second.told == []


def test_features_are_stored_until_the_second_is_called():
    first = Recorder("first", {"a": [1, 1, 1]})
    second = Recorder("second", {"b": [5]}, needs_hidden=(2, 4))
    proposer = combined(first, second)
    assert proposer.needs_hidden == (2, 4)

    def features(value):
        return {layer: [torch.full((1, 1), value + 100.0 * b + layer) for b in range(2)] for layer in (2, 4)}

    proposer.propose(context_of("a", "b", hidden=features(10)), 3)
    first.chains = {}
    proposer.propose(context_of("a", "b", hidden=features(20)), 3)
    assert second.hidden == [{2: [[112.0]], 4: [[114.0]]}, {2: [[12.0, 22.0], [122.0]], 4: [[14.0, 24.0], [124.0]]}]


def test_stored_features_are_copied_before_there_are_many():
    second = Recorder("second", {}, needs_hidden=(2,))
    proposer = combined(Recorder("first", {"a": [1, 1, 1]}), second)
    batch = torch.arange(400.0)[:, None]
    for start in range(200):
        proposer.propose(context_of("a", hidden={2: [batch[start : start + 1]]}), 3)
    stored = proposer._unread["a"][2]
    assert len(stored) <= 64 and stored[0].data_ptr() != batch.data_ptr()
    proposer._first.chains = {}
    proposer.propose(context_of("a", hidden={2: [batch[200:201]]}), 3)
    assert second.hidden == [{2: [[float(value) for value in range(201)]]}]


def test_a_round_without_features_does_not_change_their_type():
    first, second, types = Recorder("first", {"a": [1, 1, 1]}), Recorder("second", {}, needs_hidden=(1,)), []
    proposer, propose = combined(first, second), second.propose
    second.propose = lambda context, k: types.append(context.hidden[1][0].dtype) or propose(context, k)
    for states in (torch.empty(0), torch.ones(1, 1, dtype=torch.bfloat16)):
        proposer.propose(context_of("a", hidden={1: [states]}), 3)
    first.chains = {}
    proposer.propose(context_of("a", hidden={1: [torch.ones(1, 1, dtype=torch.bfloat16)]}), 3)
    assert types == [torch.bfloat16]


def test_the_second_method_is_prepared():
    second, prepared = Recorder("second", {}), []
    second.prepare = lambda: prepared.append(True)
    combined(Recorder("first", {}), second).prepare()
    assert prepared


@pytest.mark.parametrize("end", ["release", "retire"])
def test_a_request_that_ended_is_released_in_both_methods(end):
    first, second = Recorder("first", {"a": [1, 1, 1]}), Recorder("second", {}, needs_hidden=(1,))
    proposer = combined(first, second)
    proposer.propose(context_of("a", hidden={1: [torch.ones(1, 1)]}), 3)
    getattr(proposer, end)(["a"])
    assert first.released == second.released == ["a"]
    first.chains = {}
    proposer.propose(context_of("a", hidden={1: [torch.zeros(1, 1)]}), 3)
    assert second.hidden == [{1: [[0.0]]}]


def test_a_first_method_that_samples_its_drafts_is_rejected():
    """Keeping or dropping a sampled draft because of its value would change the distribution of the kept ones."""
    with pytest.raises(OutriderError, match="'drawing' samples its drafts"):
        combined(Recorder("drawing", {"a": [1]}, probs=True), Recorder("second", {})).propose(context_of("a"), 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_catches_up_after_rounds_in_which_it_was_not_called(temperature):
    """Every draft of the second method is the draft model's own continuation of the committed tokens."""
    drafting = Drafting(temperature=temperature)
    copied = {}
    first = ScriptedProposer.of_chains(lambda context, k: [copied.get(name, []) for name in context.request_ids])
    drafting.proposer = combined(first, drafting.proposer)
    plans = [
        ({"r0": [7] * 4}, [4, 1, 0]),
        ({"r1": [8] * 3, "r2": [9] * 3}, [2, 3, 1]),
        ({}, [3, 0, 2]),
        ({"r1": [1] * 3}, [0, 0, 3]),
    ]
    for copied, accepted in plans:
        proposal = drafting.propose(4)
        for b, request in enumerate(drafting.requests):
            if request.request_id in copied:
                assert chains_of(proposal)[b] == copied[request.request_id]
        owned = [request.request_id not in copied for request in drafting.requests]
        drafting.proposal = replace(proposal, lens=proposal.lens * torch.tensor(owned))
        drafting.check()
        drafting.proposal = proposal
        drafting.commit(accepted, [50, 51, 52])


def test_two_names_joined_by_a_plus_make_one_method():
    joint = PROPOSERS.get("suffix+ngram")
    proposer = joint.build(Setting(None, options={"suffix.min_match": "3", "min_first": "5"}))
    assert proposer.name == joint.name == "suffix+ngram"
    assert not joint.takes_draft and PROPOSERS.get("suffix+draft").takes_draft
    assert proposer.auto_drafts == PROPOSERS.get("suffix").proposer.auto_drafts


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("suffix+nonsense", {}, "unknown method 'nonsense'; known: plain"),
        ("suffix+ngram+draft", {}, "invalid combination 'suffix.ngram.draft': expected two different methods"),
        ("draft+draft", {}, "invalid combination 'draft.draft'"),
        ("suffix+ngram", {"min_match": 3}, "no option min_match; it has min_first"),
        ("suffix+ngram", {"suffix.n": 3}, "no option n; it has min_match"),
        ("suffix+ngram", {"draft.n": 3}, "invalid option 'draft.n' of suffix.ngram: expected suffix.option or ngram.option"),
        ("suffix+ngram", {"min_first": 0}, "invalid min_first 0: expected a whole number, at least 1"),
        ("suffix+draft", {}, "needs a draft model"),
        ("draft+suffix", {}, "invalid order of methods 'draft.suffix': .* without a model; write suffix.draft$"),
        ("draft+early-exit", {}, "invalid order of methods 'draft.early-exit': the first must draft without a model$"),
    ],
)
def test_combinations_that_cannot_be_built_are_rejected_in_one_line(name, options, message):
    with pytest.raises(OutriderError, match=message) as error:
        PROPOSERS.get(name).build(Setting(None, options=options))
    assert "\n" not in str(error.value)


def test_merging_keeps_every_row_and_leaves_the_others_empty():
    parts = [([2], chain_proposal([[4, 5]])), ([0], chain_proposal([[6]])), ([3], Proposal.empty(1))]
    assert chains_of(merged(parts, 5, VOCAB)) == [[6], [], [4, 5], [], []]
    assert merged([], 3, VOCAB).lens.tolist() == [0, 0, 0]
    whole = chain_proposal([[1], [2]])
    assert merged([([0, 1], whole)], 2, VOCAB) is whole


def test_mixed_batches_of_greedy_and_sampled_requests_are_drafted_for():
    drafting = Drafting(temperature=0.8)
    drafting.requests[1].params = SamplingParams()
    first = ScriptedProposer.of_chains(lambda context, k: [[], [], [3] * 8])
    drafting.proposer = combined(first, drafting.proposer)
    proposal = drafting.propose(4)
    assert proposal.lens.tolist() == [4, 4, 4] and proposal.token_ids[2].tolist() == [3] * 4
    assert (proposal.probs[1].max(-1).values == 1).all() and (proposal.probs[2, :, 3] == 1).all()
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(3, 4))
