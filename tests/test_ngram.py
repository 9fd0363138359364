"""Prompt lookup: longest match first, the latest on ties, never itself; the incremental index equals a search."""

from __future__ import annotations

import random

import pytest

from outrider.proposers.ngram import NgramConfig, NgramProposer
from outrider.types import Context, OutriderError, Request, SamplingParams


def request(token_ids, request_id="r"):
    return Request(request_id, list(token_ids), len(token_ids), SamplingParams(), 0)


def drafts(token_ids, k=4, limit=99, **config):
    proposal = NgramProposer(NgramConfig(**config)).propose(Context((request(token_ids),), (limit,), None), k)
    return proposal.token_ids[0, : int(proposal.lens[0])].tolist()


def by_search(token_ids, k, config):
    """Definition: search each n-gram, longest first, from the latest position backwards."""
    for n in range(config.max_n, config.min_n - 1, -1):
        if n > len(token_ids):
            continue
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                text = list(token_ids)
                while len(text) < len(token_ids) + k:
                    text.append(text[start + n + len(text) - len(token_ids)])
                return text[len(token_ids) :]
    return []


def test_the_continuation_of_the_last_occurrence_is_drafted():
    assert drafts([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]


def test_the_longest_match_wins_over_a_more_recent_one():
    assert drafts([1, 2, 3, 7, 8, 9, 2, 3, 6, 5, 1, 2, 3], k=1) == [7]


def test_the_most_recent_match_wins_on_ties():
    assert drafts([1, 2, 7, 0, 1, 2, 8, 0, 1, 2], k=1) == [8]


def test_the_end_does_not_match_itself():
    assert drafts([1, 2, 3, 4]) == []
    assert drafts([5, 5], max_n=1, min_n=1) == [5, 5, 5, 5]


def test_a_match_that_reaches_the_end_is_repeated():
    assert drafts([7, 1, 2, 3, 1, 2, 3], k=8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_drafts_are_limited_by_k_and_by_the_requests_limit():
    assert len(drafts([1, 2] * 5, k=3)) == 3
    assert len(drafts([1, 2] * 5, k=8, limit=2)) == 2
    assert drafts([1, 2] * 5, limit=0) == []


def test_matches_shorter_than_min_n_are_ignored():
    assert drafts([1, 9, 8, 1], min_n=2) == []
    assert drafts([1, 9, 8, 1], min_n=1, k=2) == [9, 8]


@pytest.mark.parametrize("seed", range(5))
def test_the_incremental_index_equals_a_search(seed):
    choose = random.Random(seed)
    config = NgramConfig(max_n=4, min_n=1 + seed % 2)
    one, other = request([]), request([], "other")
    proposer = NgramProposer(config)
    for _ in range(150):
        for each in (one, other):
            each.token_ids += [choose.randrange(3) for _ in range(choose.randrange(4))]
        k = choose.randrange(6)
        proposal = proposer.propose(Context((one, other), (99, 99), None), k)
        for b, each in enumerate((one, other)):
            found = proposal.token_ids[b, : int(proposal.lens[b])].tolist()
            assert found == by_search(each.token_ids, k, config)


def test_a_round_indexes_only_the_tokens_that_are_new():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            if isinstance(index, slice):
                Counted.reads += len(range(*index.indices(len(self))))
            return super().__getitem__(index)

    long = request([])
    long.token_ids = Counted(range(5000))
    proposer = NgramProposer()
    context = Context((long,), (99,), None)
    proposer.propose(context, 4)
    Counted.reads = 0
    long.token_ids += [1, 2]
    proposer.propose(context, 4)
    assert Counted.reads < 50


def test_a_released_request_is_forgotten():
    proposer = NgramProposer()
    first, second = request([1, 2, 3, 1, 2]), request([4, 4, 9, 1, 2])
    assert proposer.propose(Context((first,), (9,), None), 1).lens.tolist() == [1]
    proposer.release(["r", "never seen"])
    assert proposer.propose(Context((second,), (9,), None), 1).lens.tolist() == [0]


@pytest.mark.parametrize(
    ("max_n", "min_n", "message"),
    [
        (2, 3, "invalid min_n 3: expected at most max_n, which is 2"),
        (0, 0, "invalid max_n 0: expected a whole number, at least 1"),
        (4, 0, "invalid min_n 0: expected a whole number, at least 1"),
    ],
)
def test_invalid_sizes_are_rejected(max_n, min_n, message):
    with pytest.raises(OutriderError, match=message):
        NgramConfig(max_n, min_n)
