"""Predicted speeds: rounds played by hand-made replays and prices."""

from __future__ import annotations

import pytest

from outrider.proposers.base import ScriptedProposer
from outrider.proposers.combined import CombinedConfig, CombinedProposer
from outrider.search.prediction import Studied, predict
from outrider.search.prices import Price, Prices
from outrider.search.traces import Drafted, Replay, Trace
from outrider.types import Proposal

from .toys import alone, prices, replay, sure

PROPOSER = ScriptedProposer(lambda context, k: Proposal.empty(len(context.requests)))


def test_rounds_are_those_that_one_counts_by_hand() -> None:
    # 9 tokens, drafts right but for the tokens 2 and 6. The prompt's round counts as reading it.
    found = replay(9, {0, 1, 3, 4, 5, 7}, k=2)
    # (place, accepted): (0, 2) -> 3, (3, 2) -> 6, (6, 0) -> 7, (7, 1) -> 9
    played = predict(PROPOSER, 2, alone(found, prices(draft=0.1, row=0.05)), 1)
    assert (played.rounds, played.tokens) == (4, 9)
    assert played.seconds == pytest.approx(2 * (1 + 2 * 0.15) + (1 + 0.15))  # the last round has use for one draft
    plain = predict(PROPOSER, 0, alone(found, prices(draft=0.1)), 1)
    assert (plain.rounds, plain.seconds) == (9, pytest.approx(8.0))


def test_a_batch_waits_for_its_longest_text_and_pays_for_its_longest_draft() -> None:
    found = Replay({2: [sure(9, set(range(9)), 2), sure(9, set(), 2)]})
    priced = prices(draft=0.1)
    single = [predict(PROPOSER, 2, alone(Replay({2: [each]}), priced), 1) for each in found.traces[2]]
    assert [each.rounds for each in single] == [3, 9]
    together = predict(PROPOSER, 2, alone(found, priced), 2)
    assert together.rounds == 12 and together.seconds == pytest.approx(single[1].seconds)


def test_prompts_count_and_so_does_what_drafting_adds_to_them() -> None:
    found = Replay({2: [sure(5, set(), 2, num_prompt_tokens=100)]})
    priced = Prices(prices().rounds, 0.0, prompt=0.01, drafted_prompt=0.03)
    assert predict(PROPOSER, 0, alone(found, priced), 1).seconds == pytest.approx(1.0 + 4.0)
    assert predict(PROPOSER, 1, alone(found, priced), 1).seconds == pytest.approx(3.0 + 4.0)


def test_chances_are_played_at_their_rate() -> None:
    rounds = {place: Drafted(1, (0.7,)) for place in range(4000)}
    played = predict(PROPOSER, 1, alone(Replay({1: [Trace(0, 4000, 1.0, rounds)]}), prices()), 1)
    assert played.tau == pytest.approx(1.7, abs=0.02)


def test_the_length_that_adapts_is_the_engine_s_own_policy() -> None:
    useless, good = replay(300, set(), 15), replay(300, set(range(300)), 15)
    dear = prices(draft=0.3, longest=15)
    plain = predict(PROPOSER, 0, alone(useless, dear), 1).seconds
    assert predict(PROPOSER, "auto", alone(useless, dear), 1).seconds < 1.08 * plain
    assert predict(PROPOSER, 4, alone(useless, dear), 1).seconds > 2 * plain
    assert predict(PROPOSER, "auto", alone(good, dear), 1).seconds < 0.6 * plain


def drafter(most: int) -> ScriptedProposer:
    found = ScriptedProposer(lambda context, k: Proposal.empty(len(context.requests)))
    found.max_drafts = found.auto_drafts = most
    return found


def test_of_two_in_turn_each_round_costs_what_the_one_that_drafts_costs() -> None:
    """In the first text the first has two drafts at the places 0 and 5; the second one has one everywhere; 8 is never right."""
    right = set(range(12)) - {8}
    copied = {place: Drafted(2, (1.0, 1.0)) if place in (0, 5) else Drafted(0, ()) for place in range(11)}
    nothing = {place: Drafted(0, ()) for place in range(11)}
    first = Replay({2: [Trace(0, 12, 0.0, copied), Trace(0, 12, 0.0, nothing)]})
    second = Replay({1: [sure(12, right, 1), sure(12, right, 1)]})
    cheap, dear = prices(draft=0.01, longest=2), prices(draft=0.5, row=0.1).at_pace(2.0)  # priced on a machine half as fast
    pair = CombinedProposer(drafter(2), drafter(1), CombinedConfig(min_first=2))
    known = [Studied(first.only([0]), cheap), Studied(second.only([0]), dear)]
    # (place, who, accepted): (0, first, 2), (3, second, 1), (5, first, 2), (8, second, 0), (9, second, 1), (11, nobody, 0)
    played = predict(pair, 2, known, 1)
    assert (played.rounds, played.tokens) == (6, 12)  # the prompt's costs what reading it does
    assert played.seconds == pytest.approx(3 * (0.01 + 0.5 + 1.1) + (0.02 + 1.0) + (0.01 + 1.0))
    assert predict(pair, 0, known, 1).seconds == pytest.approx(11.0)
    # Beside it one for which the second drafts throughout: 0, 2, 4, 6, 8, 9, 11. They share passes, priced as the second's.
    played = predict(pair, 2, [Studied(first, cheap), Studied(second, dear)], 2)
    assert played.rounds == 6 + 7
    mixed = (0.02 + 0.5 + 1.15) + (0.01 + 0.5 + 1.05)  # two drafts and one; none and one
    assert played.seconds == pytest.approx(3 * (0.01 + 0.5 + 1.1) + mixed + (0.01 + 1.0))


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
