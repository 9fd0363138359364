"""Predicted speeds: rounds played by hand-made replays and prices."""

from __future__ import annotations

import pytest

from outrider.proposers.base import ScriptedProposer
from outrider.search.prediction import predict
from outrider.search.prices import Price, Prices
from outrider.search.traces import Drafted, Replay, Trace
from outrider.types import Proposal

from .toys import prices, replay, sure

PROPOSER = ScriptedProposer(lambda context, k: Proposal.empty(len(context.requests)))


def test_rounds_are_those_that_one_counts_by_hand() -> None:
    # 9 tokens, drafts right but for the tokens 2 and 6. The prompt's round counts as reading it.
    found = replay(9, {0, 1, 3, 4, 5, 7}, k=2)
    # (place, accepted): (0, 2) -> 3, (3, 2) -> 6, (6, 0) -> 7, (7, 1) -> 9
    played = predict(PROPOSER, 2, found, prices(draft=0.1, row=0.05), 1)
    assert (played.rounds, played.tokens) == (4, 9)
    assert played.seconds == pytest.approx(2 * (1 + 2 * 0.15) + (1 + 0.15))  # the last round has use for one draft
    plain = predict(PROPOSER, 0, found, prices(draft=0.1), 1)
    assert (plain.rounds, plain.seconds) == (9, pytest.approx(8.0))


def test_a_batch_waits_for_its_longest_text_and_pays_for_its_longest_draft() -> None:
    found = Replay({2: [sure(9, set(range(9)), 2), sure(9, set(), 2)]})
    priced = prices(draft=0.1)
    alone = [predict(PROPOSER, 2, Replay({2: [each]}), priced, 1) for each in found.traces[2]]
    assert [each.rounds for each in alone] == [3, 9]
    together = predict(PROPOSER, 2, found, priced, 2)
    assert together.rounds == 12 and together.seconds == pytest.approx(alone[1].seconds)


def test_prompts_count_and_so_does_what_drafting_adds_to_them() -> None:
    found = Replay({2: [sure(5, set(), 2, num_prompt_tokens=100)]})
    priced = Prices(prices().rounds, 0.0, prompt=0.01, drafted_prompt=0.03)
    assert predict(PROPOSER, 0, found, priced, 1).seconds == pytest.approx(1.0 + 4.0)
    assert predict(PROPOSER, 1, found, priced, 1).seconds == pytest.approx(3.0 + 4.0)


def test_chances_are_played_at_their_rate() -> None:
    rounds = {place: Drafted(1, (0.7,)) for place in range(4000)}
    played = predict(PROPOSER, 1, Replay({1: [Trace(0, 4000, 1.0, rounds)]}), prices(), 1)
    assert played.tau == pytest.approx(1.7, abs=0.02)


def test_the_length_that_adapts_is_the_engine_s_own_policy() -> None:
    useless, good = replay(300, set(), 15), replay(300, set(range(300)), 15)
    dear = prices(draft=0.3, longest=15)
    assert predict(PROPOSER, "auto", useless, dear, 1).seconds < 1.08 * predict(PROPOSER, 0, useless, dear, 1).seconds
    assert predict(PROPOSER, 4, useless, dear, 1).seconds > 2 * predict(PROPOSER, 0, useless, dear, 1).seconds
    assert predict(PROPOSER, "auto", good, dear, 1).seconds < 0.6 * predict(PROPOSER, 0, good, dear, 1).seconds


ROUNDS = {0: Price(0.0, 1.0, 0.1, 0), 2: Price(0.2, 1.1, 0.2, 2), 4: Price(0.4, 1.5, 0.2, 4)}


def phases(price: Price) -> tuple[float, float, float]:
    return price.draft, price.score, price.outside


def test_prices_lie_on_lines_between_measured_lengths() -> None:
    priced = Prices(ROUNDS, 0.05, 0.0, 0.0)
    assert phases(priced.round(3, [3])) == pytest.approx((0.3, 1.3, 0.2))
    assert phases(priced.round(6, [6])) == pytest.approx((0.6, 1.9, 0.2))
    assert phases(priced.round(1, [1])) == pytest.approx((0.2, 1.05, 0.2))  # no shorter drafting was measured than for two
    assert priced.round(4, [0]) == Price(0.05, 1.0, 0.1, 0)  # searched in vain
    assert priced.round(0, [0]) == ROUNDS[0]
    assert Prices.from_json(priced.as_json() | {"rounds": {"0": priced.as_json()["rounds"][0]}}).rounds == {0: ROUNDS[0]}


def test_drafting_is_paid_by_the_longest_draft_and_a_pass_by_all_of_them() -> None:
    assert phases(Prices(ROUNDS, 0.05, 0.0, 0.0).round(4, [4, 0, 2])) == pytest.approx((0.4, 1.1, 0.2))
    padded = Prices(ROUNDS, 0.05, 0.0, 0.0, is_padded=True)
    assert phases(padded.round(4, [4, 0, 2])) == pytest.approx((0.4, 1.5, 0.2))


def test_passes_that_begin_behind_the_first_layer_are_on_no_line_with_the_plain_one() -> None:
    begun = Prices(ROUNDS, 0.05, 0.0, 0.0, first_layer=3)
    assert phases(begun.round(1, [1])) == pytest.approx((0.2, 1.1, 0.2))
