"""What is chosen, and what is said of the others: from numbers alone."""

from __future__ import annotations

from functools import partial

import pytest

from outrider.bench.contenders import Contender
from outrider.proposers.base import PlainProposer, Proposer
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.suffix import SuffixProposer
from outrider.search import choice, confirming
from outrider.search.choice import Prediction
from outrider.search.confirming import Measured

PROPOSERS: dict[str, Proposer] = {
    "ngram": NgramProposer(),
    "suffix": SuffixProposer(),
    "draft": DraftModelProposer.__new__(DraftModelProposer),
    "suffix+draft": DraftModelProposer.__new__(DraftModelProposer),
}
DRAFT, NGRAM = Contender("draft", 4), Contender("ngram", 4)


def measured(speeds: dict[str, float], noise: float = 0.01, prompts: int = 11) -> Measured:
    """Two repeats of 100 tokens a prompt; the noise is not the same for any two, and none on the whole."""
    found: Measured = {}
    for number, (label, speed) in enumerate(speeds.items()):
        rows = [
            [100 / speed * (1 + noise * ((7 * number + 5 * prompt + 3 * repeat) % 11 - 5) / 5) for prompt in range(prompts)]
            for repeat in range(2)
        ]
        found[label] = {"tokens": [[100.0] * prompts] * 2, "seconds": rows}
    return found


def test_the_fastest_beyond_noise_is_chosen() -> None:
    found = measured({"plain": 100, "draft k=4": 150, "ngram k=4": 130})
    chosen = choice.choose([DRAFT, NGRAM], partial(confirming.ratio, [found]), PROPOSERS)
    assert chosen.chosen == DRAFT and chosen.speedup is not None
    assert chosen.speedup.value == pytest.approx(1.5, rel=0.02)
    assert "slower than draft k=4" in chosen.others["ngram k=4"] and "plain" in chosen.others


def test_within_noise_the_simpler_is_chosen() -> None:
    found = measured({"plain": 100, "draft k=4": 151, "ngram k=4": 150}, noise=0.2)
    chosen = choice.choose([DRAFT, NGRAM], partial(confirming.ratio, [found]), PROPOSERS)
    assert chosen.chosen == NGRAM and "within noise" in chosen.reason
    assert "no faster" in chosen.others["draft k=4"]


def test_a_hiccup_in_one_repeat_of_three_chooses_nothing() -> None:
    found = measured({"plain": 100, "draft k=4": 150, "ngram k=4": 140})
    for label, times in found.items():
        times["tokens"].append(times["tokens"][0])
        times["seconds"].append([second * (3 if label.startswith("draft") else 1) for second in times["seconds"][0]])
    chosen = choice.choose([DRAFT, NGRAM], partial(confirming.ratio, [found]), PROPOSERS)
    assert chosen.chosen == DRAFT and chosen.speedup is not None and chosen.speedup.value == pytest.approx(1.5, rel=0.02)


def test_of_the_lengths_of_a_method_the_fastest_is_chosen_whatever_is_simpler() -> None:
    found = measured({"plain": 100, "ngram k=auto": 150, "ngram k=12": 152}, noise=0.2)
    twelve = Contender("ngram", 12)
    chosen = choice.choose([Contender("ngram", "auto"), twelve], partial(confirming.ratio, [found]), PROPOSERS)
    assert chosen.chosen == twelve and "slower than ngram k=12" in chosen.others["ngram k=auto"]


def test_noise_is_no_reason_to_give_much_away() -> None:
    found = measured({"plain": 100, "draft k=4": 160, "ngram k=4": 150}, noise=0.6)
    assert choice.choose([DRAFT, NGRAM], partial(confirming.ratio, [found]), PROPOSERS).chosen == DRAFT


@pytest.mark.parametrize("speeds", [(90, 80), (100.4, 99), (100.1, 100.1)])
def test_nothing_faster_than_plain_decoding_means_plain_decoding(speeds: tuple[float, float]) -> None:
    found = measured({"plain": 100, "draft k=4": speeds[0], "ngram k=4": speeds[1]}, noise=0.03)
    chosen = choice.choose([DRAFT, NGRAM], partial(confirming.ratio, [found]), PROPOSERS)
    assert chosen.chosen.is_plain and chosen.chosen.k == 0 and "do not speculate" in chosen.reason
    assert set(chosen.others) == {"draft k=4", "ngram k=4"}


def test_nothing_to_confirm_means_plain_decoding() -> None:
    assert choice.choose([], partial(confirming.ratio, []), PROPOSERS).chosen.is_plain


def test_several_batch_sizes_are_weighed_together() -> None:
    one = measured({"plain": 100, "draft k=4": 180, "ngram k=4": 140})
    eight = measured({"plain": 400, "draft k=4": 320, "ngram k=4": 520})
    assert choice.choose([DRAFT, NGRAM], partial(confirming.ratio, [one]), PROPOSERS).chosen == DRAFT
    assert choice.choose([DRAFT, NGRAM], partial(confirming.ratio, [one, eight]), PROPOSERS).chosen == NGRAM


def test_what_is_simpler() -> None:
    ordered = [Contender(PlainProposer.name, 0), NGRAM, DRAFT, Contender("suffix+draft", 1)]
    assert sorted(reversed(ordered), key=lambda each: choice.simplicity(each, PROPOSERS)) == ordered


@pytest.mark.parametrize(("ngram", "suffix"), [(150, 151), (151, 150)])
def test_of_two_as_simple_the_faster_is_chosen_within_noise_too(ngram: float, suffix: float) -> None:
    found = measured({"plain": 100, "ngram k=4": ngram, "suffix k=4": suffix}, noise=0.2)
    chosen = choice.choose([NGRAM, Contender("suffix", 4)], partial(confirming.ratio, [found]), PROPOSERS).chosen
    assert chosen.method == ("suffix" if suffix > ngram else "ngram")


def prediction(method: str, k: int | str, speedup: float) -> Prediction:
    return Prediction(method, k, speedup, 2.0, {"1": speedup})


def test_the_shortlist_has_the_best_of_several_methods_and_leaves_the_hopeless() -> None:
    predictions = [prediction("draft", k, 1.5 + k / 100) for k in (1, 2, 3, 4)]
    predictions += [prediction("draft", "auto", 1.4), prediction("ngram", 3, 1.2), prediction("suffix", 3, 0.6)]
    chosen, reasons = choice.shortlist(predictions)
    assert chosen == [Contender("draft", 4), Contender("draft", 3), Contender("draft", "auto"), Contender("ngram", 3)]
    assert set(reasons) == {"draft k=2", "draft k=1", "suffix k=3"} and "too slow" in reasons["suffix k=3"]


def test_a_useless_draft_is_not_even_confirmed() -> None:
    assert choice.shortlist([prediction("draft", k, 0.5) for k in (1, 4)])[0] == []


def test_each_heat_runs_fewer_on_more() -> None:
    texts = list(range(16))
    plan = confirming.heats([Contender("ngram", k) for k in range(1, 9)], texts, 2)  # type: ignore[arg-type]
    assert plan == [(8, 8, 1), (4, 16, 1), (3, 16, 2)]
    assert confirming.heats([NGRAM], texts[:1], 2) == [(1, 1, 2)]  # type: ignore[arg-type]
    found = measured({"plain": 100, "draft k=4": 150, "ngram k=4": 130})
    left, reasons = choice.survivors([NGRAM, DRAFT], [found], 1)
    assert left == [DRAFT] and set(reasons) == {"ngram k=4"}
