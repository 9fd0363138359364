"""Suffix automaton: matches, counts and continuations equal a full search; time and size are bounded in the worst case."""

from __future__ import annotations

import random
import time

import pytest

from outrider.proposers.method import Setting
from outrider.proposers.suffix import END, METHOD, EarlierTexts, SuffixAutomaton, SuffixConfig, SuffixProposer
from outrider.types import Context, OutriderError, Request, SamplingParams

TRUSTING = {"min_match": 1, "drafts_per_match": 99.0, "min_prob": 0.0}


def request(token_ids, request_id="r"):
    return Request(request_id, list(token_ids), len(token_ids), SamplingParams(), 0)


def propose(proposer, *requests, k=4, limits=None):
    proposal = proposer.propose(Context(requests, tuple(limits or [99] * len(requests)), None), k)
    assert proposal.probs is None and proposal.parents is None
    return [proposal.token_ids[b, : int(n)].tolist() for b, n in enumerate(proposal.lens)]


def drafts(token_ids, k=4, limit=99, **config):
    return propose(SuffixProposer(SuffixConfig(**(TRUSTING | config))), request(token_ids), k=k, limits=[limit])[0]


def automaton(token_ids):
    built = SuffixAutomaton()
    for token in token_ids:
        built.extend(token)
    return built


def places(text, part):
    """Return the end positions of a part in a sequence."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def longest_repeated_end(text):
    return next((n for n in range(len(text) - 1, 0, -1) if len(places(text, text[-n:])) > 1), 0)


def random_texts(seed):
    choose = random.Random(seed)
    text = []
    while len(text) < 60:
        if text and choose.random() < 0.3:
            start = choose.randrange(len(text))
            text += text[start : start + choose.randrange(1, 12)]
        else:
            text.append(choose.randrange(2 + seed % 4))
    return text


@pytest.mark.parametrize("seed", range(8))
def test_the_match_is_the_longest_suffix_that_occurred_before(seed):
    text, built = random_texts(seed), SuffixAutomaton()
    for length, token in enumerate(text, start=1):
        built.extend(token)
        assert built.lens[built.end] == longest_repeated_end(text[:length])


@pytest.mark.parametrize("seed", range(6))
def test_exactly_the_substrings_are_found(seed):
    text, choose = random_texts(seed), random.Random(seed)
    built = automaton(text)
    for _ in range(200):
        part = [choose.randrange(2 + seed % 4) for _ in range(choose.randrange(1, 8))]
        state, length = built.follow(0, 0, part)
        longest = max(n for n in range(len(part) + 1) if n == 0 or places(text, part[len(part) - n :]))
        assert length == longest
        assert state == 0 or built.lens[built.links[state]] < length <= built.lens[state]


def counts_by_definition(text):
    """Update exclusion: a token counts in each context in which it is new, and in the longest in which it is not.

    Contexts with the same end positions count as one.
    """
    counts = {}
    for end, token in enumerate(text):
        before = text[:end]
        for start in range(end + 1):  # from the longest context to the empty one
            seen = counts.setdefault(tuple(before[start:]), {})
            if token not in seen:
                seen[token] = 1
                continue
            same = places(before, before[start:])
            for shorter in range(start, end + 1):
                if places(before, before[shorter:]) != same:
                    break
                counts[tuple(before[shorter:])][token] += 1
            break
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_counts_equal_update_exclusion(seed):
    text = random_texts(seed)[:32]
    built = automaton(text)
    for context, counts in counts_by_definition(text).items():
        state, _ = built.follow(0, 0, context)
        assert built._totals[state] == sum(counts.values())
        assert (built._counts[state] or counts) == counts
        assert counts[built._best[state]] == max(counts.values())


def test_a_continuation_is_the_sequence_that_followed():
    assert drafts([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]


def test_a_match_that_reaches_the_end_is_repeated():
    assert drafts([7, 1, 2, 3, 1, 2, 3], k=8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafts([5, 5, 5], k=4) == [5, 5, 5, 5]


def test_the_most_frequent_continuation_wins_over_the_latest():
    assert drafts([1, 2, 7, 0, 1, 2, 7, 3, 1, 2, 8, 4, 1, 2], k=1) == [7]


def test_the_latest_continuation_wins_on_ties():
    assert drafts([1, 2, 7, 0, 1, 2, 8, 3, 1, 2], k=1) == [8]
    assert drafts([1, 2, 8, 0, 1, 2, 7, 3, 1, 2], k=1) == [7]


def test_the_longest_match_wins_over_a_more_frequent_one():
    assert drafts([1, 2, 3, 7, 4, 2, 3, 6, 5, 2, 3, 6, 8, 1, 2, 3], k=1) == [7]


def test_a_draft_ends_when_its_probability_falls_below_the_threshold():
    text = [1, 2, 7, 5, 6, 0, 1, 2, 8, 3, 1, 2]  # after 1 2 came 7 and 8, once each
    assert drafts(text, min_prob=0.4) == [8, 3, 1, 2]
    assert drafts(text, min_prob=0.6) == []
    assert drafts([9, 1, 7, 5, 1, 7, 4, 1, 7, 5, 2, 8, 1], min_prob=0.7) == [7]  # then 5 with 2/3
    assert drafts([9, 1, 7, 5, 1, 7, 4, 1, 7, 5, 2, 8, 1], min_prob=0.6, k=2) == [7, 5]


def test_the_threshold_applies_to_the_probability_of_the_whole_draft():
    text = [0, 1, 2, 0, 1, 3, 0, 4, 0, 1]  # after 0: 1 twice of three; after 1: 3 once of two
    assert drafts(text[:-1], min_prob=0.5, k=2) == [1]
    assert drafts(text[:-1], min_prob=0.3, k=2) == [1, 3]


def test_longer_matches_give_longer_drafts():
    text = list(range(100, 200))
    for length in (1, 2, 5, 8):
        assert len(drafts([*text, 1, *text[:length]], k=50, drafts_per_match=2.0)) == 2 * length
    assert len(drafts([*text, 1, *text[:40]], k=50)) == 50


def test_matches_shorter_than_min_match_are_ignored():
    assert drafts([1, 9, 8, 1], min_match=2) == []
    assert drafts([1, 9, 8, 1], min_match=1, k=2) == [9, 8]
    assert drafts([3, 4, 1, 9, 1, 3, 4], min_match=2, k=9) == [1, 9, 1, 3, 4, 1, 9, 1, 3]


def test_drafts_are_limited_by_k_and_by_the_requests_limit():
    assert len(drafts([1, 2] * 5, k=3)) == 3
    assert len(drafts([1, 2] * 5, k=8, limit=2)) == 2
    assert drafts([1, 2] * 5, limit=0) == []
    assert drafts([1, 2, 3, 4]) == []
    assert drafts([1]) == []


@pytest.mark.parametrize("seed", range(5))
def test_indexing_in_rounds_equals_indexing_at_once(seed):
    choose = random.Random(seed)
    text = random_texts(seed)
    one, other = request([], "one"), request([], "other")
    proposer = SuffixProposer(SuffixConfig(**TRUSTING))
    while len(one.token_ids) < len(text):
        for each in (one, other):
            each.token_ids += text[len(each.token_ids) : len(each.token_ids) + choose.randrange(6)]
        k = choose.randrange(6)
        assert propose(proposer, one, other, k=k) == [drafts(each.token_ids, k) for each in (one, other)]


WORST = {
    "one token": [1] * 3000,
    "period": [1, 2, 3, 4, 5] * 600,
    "most states": [1, *[2] * 2999],
    "most transitions": [1, *[2] * 2997, 3],
    "binary": [(i * i // 7 ^ i) & 1 for i in range(3000)],
    "fresh": list(range(3000)),
}


@pytest.mark.parametrize("name", WORST)
def test_size_and_work_are_linear_for_worst_case_sequences(name):
    class Counted(SuffixAutomaton):
        num_counts = 0

        def _count(self, state, token):
            self.num_counts += 1
            super()._count(state, token)

    text = WORST[name]
    built = Counted()
    for token in text:
        built.extend(token)
    assert len(built.lens) <= 2 * len(text)
    assert sum(map(len, built._next)) <= 3 * len(text)
    assert built.num_counts <= 4 * len(text)


def test_a_round_takes_microseconds_for_any_length():
    """The bound is 20 times the time on a slow machine; a search through the sequence would exceed it by more."""
    text = random.Random(0).choices(range(50), k=20_000)
    long, proposer = request(text), SuffixProposer()
    propose(proposer, long)
    times = []
    for _ in range(30):
        long.token_ids += text[-40:-36]
        start = time.perf_counter()
        propose(proposer, long, k=31)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


def test_long_matches_are_drafted_in_full():
    page = random.Random(1).choices(range(1000), k=200)
    assert drafts([*page, 7, *page[:16]], k=31, drafts_per_match=2.0, min_prob=0.1) == page[16:47]


# --- earlier requests -------------------------------------------------------------------------------------------------------


def with_memory(num_tokens, **config):
    return SuffixProposer(SuffixConfig(**(TRUSTING | config), earlier_tokens=num_tokens))


def test_earlier_requests_are_used_only_if_enabled():
    page = list(range(20, 40))
    for proposer, expected in ((SuffixProposer(SuffixConfig(**TRUSTING)), []), (with_memory(1000), [25, 26])):
        propose(proposer, request(page, "first"))
        proposer.retire(["first", "never seen"])
        assert propose(proposer, request([1, 2, *page[:5]], "second"), k=2) == [expected]


def test_earlier_requests_of_another_owner_are_not_used():
    proposer, page = with_memory(1000), list(range(20, 40))
    propose(proposer, request(page, "ann/first"))
    proposer.retire(["ann/first"])
    for owner, expected in (("bob", []), ("ann", [25, 26])):
        assert propose(proposer, request([1, 2, *page[:5]], f"{owner}/next"), k=2) == [expected]


def test_tokens_committed_after_the_first_round_are_stored():
    proposer, first = with_memory(1000), request([1, 2, 3], "first")
    propose(proposer, first)
    first.token_ids += [4, 5, 6]
    proposer.retire(["first"])
    assert propose(proposer, request([4, 5], "second"), k=1) == [[6]]


def test_the_requests_own_tokens_are_stored_if_a_copy_was_drafted_for():
    """In a round with forced tokens the request is a copy that ends with them."""
    proposer, first = with_memory(1000), request([1, 2, 3], "first")
    proposer.prefill([first])
    propose(proposer, request([1, 2, 3, 4], "first"))
    first.token_ids += [4, 5, 6]
    proposer.retire(["first"])
    assert propose(proposer, request([4, 5], "second"), k=1) == [[6]]


def test_a_request_that_is_dropped_before_its_end_is_not_stored():
    proposer, running = with_memory(1000), request([1, 2, 3, 4, 5], "running")
    propose(proposer, running)
    proposer.release(["running"])  # as after a fault: the request goes on
    assert propose(proposer, request([2, 3], "other"), k=2) == [[]]


def test_a_draft_never_continues_from_one_sequence_into_another():
    proposer = with_memory(1000)
    for index, text in enumerate(([1, 2, 3], [4, 5, 6])):
        propose(proposer, request(text, f"r{index}"))
        proposer.retire([f"r{index}"])
    assert propose(proposer, request([9, 1, 2], "new"), k=9) == [[3]]
    assert propose(proposer, request([2, 3], "newer"), k=9) == [[]]


def test_the_requests_own_tokens_win_on_ties():
    proposer = with_memory(1000)
    propose(proposer, request([1, 2, 7], "old"))
    proposer.retire(["old"])
    assert propose(proposer, request([1, 2, 8, 1, 2], "new"), k=1) == [[8]]
    assert propose(proposer, request([5, 1, 2, 8, 3, 2], "newer"), k=1) == [[8]]


def test_a_running_request_uses_added_outputs_and_not_dropped_ones():
    proposer, running = with_memory(64), request([1, 2], "running")
    assert propose(proposer, running) == [[]]
    propose(proposer, request([1, 2, 3, 4, 5, 6, 7], "ended"))
    proposer.retire(["ended"])
    assert propose(proposer, running, k=2) == [[3, 4]]
    running.token_ids += [3, 4]
    assert propose(proposer, running, k=2) == [[5, 6]]
    proposer_more = range(100, 300)
    propose(proposer, request(proposer_more, "long"))
    proposer.retire(["long"])
    assert propose(proposer, running, k=2) == [[]]


def test_a_match_in_an_earlier_text_is_not_longer_than_the_requests_own():
    proposer, running = with_memory(1000, drafts_per_match=1.0), request([1, 2], "running")
    propose(proposer, request([1, 2, 1, 2, 9, 8, 7], "ended"))
    proposer.retire(["ended"])
    for _ in range(2):
        assert propose(proposer, running, k=9) == [[9, 8]]


@pytest.mark.parametrize("seed", range(4))
def test_stored_outputs_are_bounded_and_the_oldest_is_dropped_first(seed):
    choose, bound = random.Random(seed), 8 + 37 * seed
    memory, texts, fresh = EarlierTexts(bound), [], iter(range(10_000))
    for _ in range(60):
        text = [next(fresh) for _ in range(choose.randrange(1, 1 + bound // 2))]
        memory.add(text)
        texts += [*text, END]
        kept = {token for block in memory.blocks for token in block._next[0]} - {END}
        held = sum(block.lens[block._last] for block in memory.blocks)
        assert held <= bound
        assert kept == set(texts[len(texts) - held :]) - {END}
    assert held > bound // 2


def test_only_the_end_of_an_output_longer_than_the_memory_is_stored():
    proposer = with_memory(16)
    propose(proposer, request(range(100), "long"))
    proposer.retire(["long"])
    assert propose(proposer, request([97, 98], "new"), k=2) == [[99]]
    assert propose(proposer, request([5, 6], "newer"), k=2) == [[]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match"),
        ({"drafts_per_match": 0}, "drafts_per_match"),
        ({"min_prob": 1.5}, "min_prob"),
        ({"earlier_tokens": 5}, "earlier_tokens"),
        ({"min_macth": 2}, "no option min_macth; it has min_match"),
        ({"min_match": "two"}, "invalid min_match 'two': expected"),
    ],
)
def test_invalid_options_are_rejected_in_one_line(options, message):
    with pytest.raises(OutriderError, match=message) as error:
        METHOD.build(Setting(None, options=options))
    assert "\n" not in str(error.value)
