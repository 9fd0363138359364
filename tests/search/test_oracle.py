"""The oracle gap of given rounds."""

from __future__ import annotations

import pytest

from outrider.search.oracle import RoundTrace, gap, least_seconds

PLAIN = RoundTrace.of(0, [0] * 8, 8.0)  # one token per second
DRAFT = RoundTrace.of(0, [3, 0, 0, 0, 0], 10.0)  # four tokens in the first round, then one per round of two seconds
COPY = RoundTrace.of(0, [0, 0, 0, 0, 3], 7.5)  # the reverse


def test_the_oracle_uses_the_best_candidate_at_every_position() -> None:
    assert least_seconds([PLAIN, DRAFT, COPY]) == 2.0 + 1.5
    assert gap([[PLAIN, DRAFT, COPY]]) == pytest.approx(7.5 / 3.5)


def test_one_candidate_has_no_gap() -> None:
    assert gap([[DRAFT]]) == gap([[DRAFT, DRAFT]]) == 1.0


def test_a_round_that_starts_within_a_measured_one_ends_with_it() -> None:
    assert [DRAFT.end_from(position) for position in (0, 2, 4, 7)] == [4, 4, 5, 8]


def test_the_best_single_candidate_is_that_of_all_texts_together() -> None:
    slow, fast = RoundTrace.of(0, [0] * 4, 4.0), RoundTrace.of(0, [3], 1.0)
    assert gap([[slow, fast], [fast, slow]]) == pytest.approx(5.0 / 2.0)


def test_a_last_round_beyond_the_text_ends_with_it() -> None:
    assert least_seconds([RoundTrace.of(0, [0] * 4, 4.0), RoundTrace.of(0, [4], 1.0)]) == 1.0


def test_rounds_are_aligned_by_the_tokens_before_them() -> None:
    plain = RoundTrace.of(1, [0] * 7, 7.0)
    draft = RoundTrace.of(3, [1, 1, 0], 6.0)  # its first pass emitted three tokens
    assert [draft.end_from(position) for position in (3, 4, 5, 7)] == [5, 5, 7, 8]
    assert least_seconds([plain, draft]) == 2.0 + 2.0 + 1.0
    assert gap([[plain, draft]]) == 5.0 / 5.0  # plain decoding of tokens 4 to 8 takes 5 s
