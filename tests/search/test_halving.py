"""Successive halving with simulated times: quality of the plans, cost of the search, and each rule."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import log
from pathlib import Path

import numpy as np
import pytest

from outrider.bench.contenders import Contender
from outrider.registry import PLAIN
from outrider.search import choice, halving
from outrider.search.halving import Ranking, Rung
from outrider.search.measurements import Group, Measurements

from .test_choice import PROPOSERS

GROUPS = 16
COARSE = ("1", "2", "4", "8", "15", "auto")
# Speedups over plain decoding, measured exhaustively for three traffics on the embedded models.
TRAFFICS: dict[str, dict[str, float]] = json.loads((Path(__file__).parent / "speedups.json").read_text())


@dataclass
class Machine:
    """Contenders with known speeds that vary with the prompt. Runs vary by 6%, and 2% of them are outliers."""

    speedups: dict[str, float]
    seed: int = 0
    suits: float = 0.12  # standard deviation over prompts of the log speed of a method
    noise: float = 0.06
    seconds: float = 0.0  # total seconds of runs
    turns: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._prompts = self._random.normal(0, 0.3, GROUPS)
        methods = {label.split(" k=")[0]: self._random.normal(0, self.suits, GROUPS) for label in self.speedups}
        self._suits = {}
        for label in self.speedups:
            suits = 0.8 * methods[label.split(" k=")[0]] + self._random.normal(0, self.suits / 2, GROUPS)
            self._suits[label] = suits - suits.mean()

    def run(self, label: str, group: Group) -> float:
        hiccup = 0.5 if self._random.random() < 0.02 else 0.0
        log_time = self._prompts[group.index] + self._random.normal(0, self.noise) + hiccup
        if label != PLAIN:
            log_time += self._suits[label][group.index] - log(self.speedups[label])
        self.seconds += float(np.exp(log_time))
        return float(np.exp(log_time))

    def exhaustive_seconds(self) -> float:
        """Return the time of running every contender twice on every prompt."""
        return 2 * sum(self.run(label, Group(1, index)) for label in self.speedups for index in range(GROUPS))


def search(machine: Machine, labels: list[str]) -> tuple[str, Measurements]:
    """Return the fastest of the last rung, or plain decoding if none is faster."""
    left, measured, _ = halve(machine, labels)
    return next(iter(left), PLAIN), measured


def halve(machine: Machine, labels: list[str], num_groups: int = GROUPS) -> tuple[list[str], Measurements, Ranking]:
    """Return the best contenders after the last rung, and its ranking."""
    measured, plan, left = Measurements(), halving.rungs(num_groups, 3), labels
    for rung in plan:
        groups = [Group(1, index) for index in range(rung.num_groups(num_groups))]
        for group in groups:
            if rung.repeat or not measured.num_turns(left[0], group):
                machine.turns.append(left)
                measured.add_turn(group, {label: machine.run(label, group) for label in (PLAIN, *left)})
        found = halving.ranking(measured, left, groups, len(labels))
        left = halving.survivors(found, rung)
        if rung is plan[-1] or halving.is_final(found, rung):
            break
    return left, measured, found


@pytest.mark.parametrize("traffic", TRAFFICS)
def test_the_plan_is_close_to_the_best_of_all_lengths_in_a_fifth_of_the_time(traffic: str) -> None:
    """The best of all lengths is compared, although the candidates have coarse lengths only."""
    speedups = TRAFFICS[traffic]
    labels = [label for label in speedups if label != PLAIN and label.split("k=")[1] in COARSE]
    close, shares = [], []
    for seed in range(40):
        machine = Machine(speedups, seed)
        best, _ = search(machine, labels)
        close.append(speedups[best] / max(speedups.values()))
        shares.append(machine.seconds / Machine(speedups, seed).exhaustive_seconds())
    assert np.mean(np.array(close) >= 0.95) >= 0.95 and np.mean(close) > 0.985
    assert np.mean(shares) < 0.15 and max(shares) < 0.2


def test_useless_drafts_end_the_search_after_one_rung() -> None:
    machine = Machine({f"m{i} k={k}": 0.6 for i in range(8) for k in COARSE})
    best, measured = search(machine, list(machine.speedups))
    assert best == PLAIN and len(machine.turns) == halving.LEAST_GROUPS
    assert len(measured.groups(PLAIN)) == halving.LEAST_GROUPS


@pytest.mark.parametrize("num_groups", [4, 16])
@pytest.mark.parametrize("suits", [0.03, 0.12])
def test_the_fastest_of_many_that_gain_nothing_is_not_chosen(suits: float, num_groups: int) -> None:
    contenders = {f"{name} k={k}": Contender(name, k) for name in PROPOSERS for k in range(1, 13)}
    num_plans = 0
    for seed in range(60):
        machine = Machine(dict.fromkeys(contenders, 1.0), seed, suits)
        left, _, last = halve(machine, list(contenders), num_groups)
        finalists = [contenders[label] for label in left]
        num_plans += not choice.choose(finalists, last, PROPOSERS).chosen.is_plain
    assert num_plans <= 6  # with intervals alone half of the searches or more chose drafts


@pytest.mark.parametrize("num_groups", [2, 3])
def test_with_few_groups_chance_is_no_gain(num_groups: int) -> None:
    """The noise of one contender and plain decoding is then estimated from one or two residuals."""
    groups, num_gains, num_slower = [Group(1, index) for index in range(num_groups)], 0, 0
    for seed in range(400):
        measured, machine = Measurements(), Machine({"a k=1": 1.0}, seed, 0.0)
        for group in groups:
            measured.add_turn(group, {label: machine.run(label, group) for label in (PLAIN, "a k=1")})
        found = halving.ranking(measured, ["a k=1"], groups)
        num_gains += log(found.speedups["a k=1"]) > found.least_gain
        num_slower += found.is_slower("a k=1", 1.0)
    assert num_gains <= 20 and num_slower <= 20  # 2.5% of 400, with 3 standard errors; normal quantiles gave 16% and 10%


def test_drafts_that_gain_a_tenth_are_chosen() -> None:
    contenders = {f"{name} k={k}": Contender(name, k) for name in PROPOSERS for k in range(1, 13)}
    num_plans = 0
    for seed in range(20):
        machine = Machine(dict.fromkeys(contenders, 0.9) | {"draft k=4": 1.1}, seed, 0.03)
        left, _, last = halve(machine, list(contenders))
        found = choice.choose([contenders[label] for label in left], last, PROPOSERS)
        num_plans += found.chosen == contenders["draft k=4"]
    assert num_plans >= 18


def test_equal_contenders_cost_less_than_a_third_of_trying_all() -> None:
    machine = Machine({f"m{i} k={k}": 1.5 for i in range(8) for k in (*COARSE, 3, 5, 6, 12)})
    search(machine, [f"m{i} k={k}" for i in range(8) for k in COARSE])
    assert machine.seconds < Machine(machine.speedups).exhaustive_seconds() / 3


def test_a_machine_that_slows_down_between_turns_does_not_change_the_plan() -> None:
    slow, steady = Measurements(), Measurements()
    for index in range(4):
        times = {PLAIN: 2.0, "a": 1.0 + 0.01 * index, "b": 1.5}
        steady.add_turn(Group(1, index), times)
        for repeat in range(3):
            slow.add_turn(Group(1, index), {label: each * (1 + repeat) for label, each in times.items()})
    ranked, drifting = (halving.ranking(each, ["a", "b"], each.groups(PLAIN)) for each in (steady, slow))
    assert drifting.speedups == pytest.approx(ranked.speedups)
    assert ranked.speedups == pytest.approx({"a": 8 / 4.06, "b": 4 / 3})


def test_one_slow_turn_of_three_does_not_change_the_ratio() -> None:
    measured = Measurements()
    for factor in (1.0, 1.0, 9.0):
        measured.add_turn(Group(1, 0), {PLAIN: 2.0, "a": 1.0 * factor})
    found = halving.ranking(measured, ["a"], [Group(1, 0)])
    assert found.speedups["a"] == pytest.approx(2.0) and found.interval("a") is None


def test_batch_sizes_count_equally_and_the_interval_is_of_the_prompts() -> None:
    measured = Measurements()
    for index in range(8):
        measured.add_turn(Group(1, index), {PLAIN: 4.0, "a": 1.0 + 0.1 * (index % 2)})
    for index in range(2):
        measured.add_turn(Group(4, index), {PLAIN: 1.0, "a": 1.0})
    found = halving.ranking(measured, ["a"], [Group(1, index) for index in range(8)] + [Group(4, 0), Group(4, 1)])
    interval = found.interval("a")
    assert found.speedups["a"] == pytest.approx((4 / 1.05) ** 0.5)
    assert interval is not None and interval[0] < found.speedups["a"] < interval[1]


def test_noise_is_the_residual_of_contender_and_prompt_effects() -> None:
    contenders, prompts = np.linspace(-1, 1, 40)[:, None], np.linspace(0, 3, 30)[None]
    assert halving.noise(np.exp(contenders + prompts)) == pytest.approx(0, abs=1e-9)
    random = np.random.default_rng(0).normal(0, 0.05, (40, 30))
    assert halving.noise(np.exp(contenders + prompts + random)) == pytest.approx(0.05, rel=0.1)
    assert halving.noise(np.ones((40, 1))) == halving.noise(np.ones((1, 30))) == halving.UNKNOWN_NOISE


def test_the_margin_shrinks_with_the_number_of_prompts() -> None:
    def margin(count: int, seed: int) -> float:
        measured, machine = Measurements(), Machine({"a": 1.5, "b": 1.4, "c": 1.2}, seed)
        groups = [Group(1, index) for index in range(count)]
        for group in groups:
            measured.add_turn(group, {label: machine.run(label, group) for label in (PLAIN, *machine.speedups)})
        return halving.ranking(measured, list(machine.speedups), groups).margin

    few, many = (np.mean([margin(count, seed) for seed in range(40)]) for count in (4, 16))
    assert many == pytest.approx(few / 2, rel=0.2)


def ranked(count: int, step: float = 0.1, margin: float = 0.0) -> Ranking:
    """Return contenders "0", "1", ... with speedups from 3 downwards."""
    return Ranking({str(i): 3.0 - step * i for i in range(count)}, margin)


@pytest.mark.parametrize(
    ("found", "rung", "kept"),
    [
        (ranked(8), Rung(0.25, 0), 4),
        (ranked(9), Rung(0.25, 0), 5),
        (ranked(8, margin=0.17), Rung(0.25, 0), 5),  # 2.6 of 3.0 is within noise, 2.5 is not
        (ranked(8, step=0.001, margin=0.1), Rung(0.25, 0), 6),  # all within noise: three quarters survive
        (ranked(8, step=0.001, margin=0.1), Rung(1.0, 0), 4),
        (ranked(4, step=0.001, margin=0.1), Rung(1.0, 1), 3),
        (ranked(2, step=0.001, margin=0.1), Rung(1.0, 1), 2),
        (ranked(2), Rung(1.0, 1), 1),
        (ranked(1), Rung(0.25, 0), 1),
        (ranked(0), Rung(0.25, 0), 0),
    ],
)
def test_survivors_of_a_rung(found: Ranking, rung: Rung, kept: int) -> None:
    assert halving.survivors(found, rung) == [str(i) for i in range(kept)]


def test_contenders_slower_than_plain_decoding_are_dropped_from_either_half() -> None:
    found = Ranking({"a": 1.2, "b": 0.97, "c": 0.8, "d": 0.7}, margin=0.05)
    assert halving.survivors(found, Rung(0.25, 0)) == ["a"]
    assert halving.survivors(Ranking({"a": 0.9}, 0.05), Rung(0.25, 0)) == []


@pytest.mark.parametrize(
    ("found", "share", "is_final"),
    [
        (Ranking({}, 0.1), 0.25, True),
        (Ranking({"a": 0.5}, 0.1), 0.25, True),  # none left that could be faster than plain decoding
        (Ranking({"a": 2.0, "b": 1.0}, 0.1), 0.25, False),  # too few prompts, however clear the difference
        (Ranking({"a": 2.0, "b": 1.0}, 0.1), 0.5, True),
        (Ranking({"a": 2.0, "b": 1.95}, 0.1), 0.5, False),
        (Ranking({"a": 1.05, "b": 0.8}, 0.1), 0.5, False),  # not yet faster than plain decoding
        (Ranking({"a": 2.0, "b": 1.95}, 0.02), 0.5, True),  # the remaining difference is negligible
    ],
)
def test_when_the_search_may_end(found: Ranking, share: float, is_final: bool) -> None:
    assert halving.is_final(found, Rung(share, 0)) is is_final


@pytest.mark.parametrize(
    ("total", "repeats", "groups"),
    [(16, 3, [2, 4, 8, 16, 16, 16]), (4, 2, [2, 4, 4]), (2, 1, [2]), (1, 2, [1, 1]), (100, 1, [13, 25, 50, 100])],
)
def test_each_rung_runs_on_more_of_the_traffic(total: int, repeats: int, groups: list[int]) -> None:
    plan = halving.rungs(total, repeats)
    assert [rung.num_groups(total) for rung in plan] == groups
    assert [rung.repeat for rung in plan if rung.is_whole] == list(range(repeats))
