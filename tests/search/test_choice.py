"""The chosen plan and the reasons against the others, from given numbers."""

from __future__ import annotations

import pytest

from outrider.bench.contenders import Contender
from outrider.proposers.base import Proposer
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.plain import PlainProposer
from outrider.proposers.suffix import SuffixProposer
from outrider.search import choice
from outrider.search.halving import Ranking, ranking
from outrider.search.measurements import Group, Measurements

PROPOSERS: dict[str, Proposer] = {
    "ngram": NgramProposer(),
    "suffix": SuffixProposer(),
    "draft": DraftModelProposer.__new__(DraftModelProposer),
    "suffix+draft": DraftModelProposer.__new__(DraftModelProposer),
}
DRAFT, NGRAM = Contender("draft", 4), Contender("ngram", 4)


def measured(speeds: dict[str, float], noise: float = 0.01, prompts: int = 11, batch: int = 1) -> Measurements:
    """Return two turns per prompt; the noise differs between contenders and sums to zero over the prompts."""
    found = Measurements()
    add(found, speeds, noise, prompts, batch)
    return found


def add(found: Measurements, speeds: dict[str, float], noise: float = 0.01, prompts: int = 11, batch: int = 1) -> None:
    for repeat in range(2):
        for prompt in range(prompts):
            seconds = {
                label: 100 / speed * (1 + noise * ((7 * number + 5 * prompt + 3 * repeat) % 11 - 5) / 5)
                for number, (label, speed) in enumerate(speeds.items())
            }
            found.add_turn(Group(batch, prompt), seconds)


def last(finalists: list[Contender], found: Measurements) -> Ranking:
    labels = [each.label for each in finalists]
    return ranking(found, labels, found.groups("plain"), num_tried=len(labels))


def choose(finalists: list[Contender], found: Measurements) -> choice.Decision:
    return choice.choose(finalists, last(finalists, found), PROPOSERS)


def test_the_fastest_beyond_noise_is_chosen() -> None:
    found = measured({"plain": 100, "draft k=4": 150, "ngram k=4": 130})
    chosen = choose([DRAFT, NGRAM], found)
    assert chosen.chosen == DRAFT and last([DRAFT, NGRAM], found).speedups["draft k=4"] == pytest.approx(1.5, rel=0.02)
    assert "slower than draft k=4" in chosen.others["ngram k=4"] and "plain" in chosen.others


def test_within_noise_the_simpler_is_chosen() -> None:
    found = measured({"plain": 100, "draft k=4": 151, "ngram k=4": 150}, noise=0.2)
    chosen = choose([DRAFT, NGRAM], found)
    assert chosen.chosen == NGRAM and "within noise" in chosen.reason
    assert "not significantly faster" in chosen.others["draft k=4"]


def test_one_slow_turn_of_three_does_not_change_the_choice() -> None:
    speeds = {"plain": 100.0, "draft k=4": 150.0, "ngram k=4": 140.0}
    found = measured(speeds)
    for prompt in range(11):
        found.add_turn(
            Group(1, prompt), {label: 300 / speed if "draft" in label else 100 / speed for label, speed in speeds.items()}
        )
    chosen = choose([DRAFT, NGRAM], found)
    assert chosen.chosen == DRAFT and last([DRAFT, NGRAM], found).speedups["draft k=4"] == pytest.approx(1.5, rel=0.02)


def test_the_fastest_length_of_a_method_is_chosen() -> None:
    found = measured({"plain": 100, "ngram k=auto": 150, "ngram k=12": 152}, noise=0.2)
    twelve = Contender("ngram", 12)
    chosen = choose([Contender("ngram", "auto"), twelve], found)
    assert chosen.chosen == twelve and "slower than ngram k=12" in chosen.others["ngram k=auto"]


def test_noise_does_not_justify_a_large_loss() -> None:
    found = measured({"plain": 100, "draft k=4": 160, "ngram k=4": 150}, noise=0.3)
    ranked = last([DRAFT, NGRAM], found)
    fast, slow = ranked.speedups[DRAFT.label], ranked.speedups[NGRAM.label]
    assert not ranked.is_slower(NGRAM.label, fast) and fast / slow > 1 + choice.MAX_LOSS
    assert choose([DRAFT, NGRAM], found).chosen == DRAFT


@pytest.mark.parametrize("speeds", [(90, 80), (100.4, 99), (100.1, 100.1)])
def test_nothing_faster_than_plain_decoding_means_plain_decoding(speeds: tuple[float, float]) -> None:
    found = measured({"plain": 100, "draft k=4": speeds[0], "ngram k=4": speeds[1]}, noise=0.03)
    chosen = choose([DRAFT, NGRAM], found)
    assert chosen.chosen.is_plain and chosen.chosen.k == 0 and "do not speculate" in chosen.reason
    assert set(chosen.others) == {"draft k=4", "ngram k=4"}
    expected = "slower" if speeds[0] == 90 else "not significantly faster"
    assert chosen.others["draft k=4"].endswith(f"plain decoding's speed: {expected}")


def test_nothing_is_chosen_where_the_noise_is_unknown() -> None:
    found = Measurements()
    found.add_turn(Group(1, 0), {"plain": 1.0, "draft k=4": 0.5})
    assert last([DRAFT], found).interval(DRAFT.label) is None
    assert choose([DRAFT], found).chosen.is_plain


def test_nothing_to_confirm_means_plain_decoding() -> None:
    assert choose([], Measurements()).chosen.is_plain


def test_batch_sizes_are_averaged() -> None:
    one = {"plain": 100.0, "draft k=4": 180.0, "ngram k=4": 140.0}
    both = measured(one)
    assert choose([DRAFT, NGRAM], both).chosen == DRAFT
    add(both, {"plain": 400.0, "draft k=4": 320.0, "ngram k=4": 520.0}, batch=8)
    assert choose([DRAFT, NGRAM], both).chosen == NGRAM


def test_order_of_simplicity() -> None:
    ordered = [Contender(PlainProposer.name, 0), NGRAM, DRAFT, Contender("suffix+draft", 1)]
    assert sorted(reversed(ordered), key=lambda each: choice.simplicity(each, PROPOSERS)) == ordered


@pytest.mark.parametrize(("ngram", "suffix"), [(150, 151), (151, 150)])
def test_of_equally_simple_methods_the_faster_is_chosen(ngram: float, suffix: float) -> None:
    found = measured({"plain": 100, "ngram k=4": ngram, "suffix k=4": suffix}, noise=0.2)
    chosen = choose([NGRAM, Contender("suffix", 4)], found).chosen
    assert chosen.method == ("suffix" if suffix > ngram else "ngram")
