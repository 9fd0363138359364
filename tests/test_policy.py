"""The draft-length policy in simulation: synthetic acceptance and costs, no model and no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from outrider.engine.costs import PassCosts
from outrider.engine.policy import FixedLength, LengthPolicy
from outrider.engine.stats import PhaseTimes, Round, expected_speedup
from outrider.tune import CostModel, DraftLengthPolicy
from outrider.types import Context, Request, SamplingParams

MAX_K = 15
NUM_PROMPTS, NUM_TOKENS = 4, 192


@dataclass(frozen=True)
class Costs:
    """Milliseconds, as a machine and a method would have them."""

    plain: float  # a pass without drafts
    per_row: float  # more for each draft scored, as a part of a plain pass
    step: float  # a draft step, as a part of a plain pass
    host: float = 0.2

    def round(self, k: int, longest: int, batch: int, catch_up: int) -> PhaseTimes:
        score = self.plain * (1 + self.per_row * longest) * (1 + 0.03 * batch)
        draft = self.plain * self.step * (k + 0.1 * catch_up) if k else 0.0
        return PhaseTimes(draft / 1e3, score / 1e3, 0.05 / 1e3, self.host / 1e3)


MACHINES = {
    "flat": Costs(plain=100, per_row=0.02, step=0.04),
    "flat, lookup": Costs(plain=100, per_row=0.02, step=0.0002),
    "steep": Costs(plain=20, per_row=0.3, step=0.1),
    "steep, lookup": Costs(plain=20, per_row=0.3, step=0.001),
    "small target": Costs(plain=2, per_row=0.06, step=0.35),
    "small target, lookup": Costs(plain=2, per_row=0.06, step=0.01),
    "draft as slow as the target": Costs(plain=10, per_row=0.05, step=1.0),
}


@dataclass(frozen=True)
class Text:
    """Acceptance of one workload: a draft's, given that those before it survived, and how often there is a draft at all."""

    rate: float
    decay: float = 1.0  # of the rate, per position
    made: float = 1.0
    second_rate: float | None = None  # the rate in every other stretch of 64 tokens

    def rate_at(self, position: int, num_tokens: int) -> float:
        rate = self.rate if self.second_rate is None or num_tokens // 64 % 2 == 0 else self.second_rate
        return rate * self.decay**position


TEXTS = {
    "hopeless": Text(0.05),
    "poor": Text(0.3),
    "fair": Text(0.6, 0.97),
    "good": Text(0.85, 0.99),
    "copying": Text(0.98),
    "prose under lookup": Text(0.25, made=0.15),
    "edits under lookup": Text(0.9, made=0.7),
    "by turns": Text(0.1, second_rate=0.95),
}


def simulate(policy: LengthPolicy, costs: Costs, text: Text, batch: int, passes: PassCosts | None = None) -> float:
    """Tokens a second over several batches, one after the other; the policy sees times with 5% noise and rare hiccups."""
    noise = random.Random(0)
    seconds, emitted = 0.0, 0
    for prompt in range(NUM_PROMPTS):
        params = SamplingParams(max_tokens=NUM_TOKENS)
        requests = tuple(Request(f"{prompt}.{b}", [0] * 100, 100, params, 0, torch.Generator()) for b in range(batch))
        skipped = 20
        for step in range(10**6):
            left = [NUM_TOKENS - request.num_output_tokens for request in requests]
            if min(left) <= 0:
                break
            context = Context(requests, tuple(n - 1 for n in left), None)  # type: ignore[arg-type]
            k = policy.next_k(context)
            lens = [min(k, n - 1) if noise.random() < text.made else 0 for n in left]
            accepted = []
            for request, n in zip(requests, lens, strict=True):
                count = 0
                while count < n and noise.random() < text.rate_at(count, request.num_output_tokens):
                    count += 1
                accepted.append(count)
            times = costs.round(k, max(lens), batch, skipped if step else 0)
            skipped = 0 if k else skipped + 1
            seconds += times.total  # the policy sees noise, its result is weighed without
            times.score *= noise.gauss(1, 0.05) + (3 if noise.random() < 0.01 else 0)
            for request, count in zip(requests, accepted, strict=True):
                request.token_ids.extend([0] * (count + 1))
            emitted += sum(accepted) + batch
            if passes is not None and step:
                passes.observe(1 + max(lens), batch, 100, times.score)
            policy.observe(context, Round(k, lens, accepted, times), is_prefill=step == 0)
        policy.release([request.request_id for request in requests])
    return emitted / seconds


def automatic(costs, text, batch):
    passes = PassCosts()
    return simulate(DraftLengthPolicy(MAX_K, passes), costs, text, batch, passes)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def measure(costs, text, batch):
    """(auto / plain, auto / best fixed K)."""
    auto = automatic(costs, text, batch)
    fixed = {k: simulate(FixedLength(k), costs, text, batch) for k in (0, 1, 3, 6, 12)}
    return auto / fixed[0], auto / max(fixed.values())


@pytest.fixture(scope="module")
def cells():
    return {
        (machine, text, batch): measure(MACHINES[machine], TEXTS[text], batch)
        for machine, text, batch in product(MACHINES, TEXTS, (1, 4))
    }


def test_the_worst_cell_is_no_slower_than_plain_decoding(cells):
    worst = min(cells, key=lambda cell: cells[cell][0])
    assert cells[worst][0] >= 0.97, (worst, cells[worst])


def test_cells_are_on_average_close_to_the_best_fixed_length(cells):
    assert mean(against_best for _, against_best in cells.values()) >= 0.97
    worst = min(cells, key=lambda cell: cells[cell][1])
    assert cells[worst][1] >= 0.8, (worst, cells[worst])


def test_text_that_turns_predictable_is_found():
    costs, text = MACHINES["flat"], TEXTS["by turns"]
    best = max(simulate(FixedLength(k), costs, text, 1) for k in (1, 2, 3, 5, 8, 12))
    assert automatic(costs, text, 1) > 0.97 * best > 1.15 * simulate(FixedLength(0), costs, text, 1)


def test_a_draft_as_slow_as_the_target_is_dropped():
    costs, text = MACHINES["draft as slow as the target"], TEXTS["good"]
    assert automatic(costs, text, 1) >= 0.97 * simulate(FixedLength(0), costs, text, 1)


def test_a_hiccup_in_the_first_pass_is_forgotten():
    passes = PassCosts()
    passes.observe(1, 1, 0, 30.0)  # it held a compilation
    passes.observe(1, 1, 0, 0.1)
    assert passes.seconds(1, 1, 0) == 0.1
    passes.observe(1, 1, 0, 30.0)
    assert passes.seconds(1, 1, 0) < 0.13


def test_when_one_pass_becomes_faster_the_others_do_not_keep_their_old_price():
    passes = PassCosts()
    for width in (1, 5, 5, 5):
        passes.observe(width, 1, 0, 1.0)
    passes.observe(5, 1, 0, 0.5)
    assert passes.seconds(1, 1, 0) == passes.seconds(5, 1, 0) == 0.5


def test_unmeasured_passes_are_interpolated():
    passes = PassCosts()
    assert passes.seconds(1, 1, 0) is None
    passes.observe(1, 1, 0, 1.0)
    passes.observe(5, 1, 0, 2.0)
    assert passes.seconds(3, 1, 0) == 1.5
    assert passes.seconds(9, 1, 0) > 2.0
    assert passes.seconds(1, 1, 10_000) == 1.0
    assert passes.seconds(1, 2, 0) is None


def test_draft_costs_lie_on_a_line_through_the_measured_lengths():
    model = CostModel(PassCosts())
    assert model.draft(4, 1, plain_pass=1.0) == pytest.approx(0.4)
    model.observe(4, 4, 1, PhaseTimes(draft=2.0), is_catch_up=True)
    assert model.draft(4, 1, plain_pass=1.0) == pytest.approx(0.4)
    model.observe(4, 4, 1, PhaseTimes(draft=2.0), is_catch_up=False)
    assert [model.draft(k, 1, plain_pass=1.0) for k in (2, 4, 8)] == pytest.approx([1.0, 2.0, 4.0])


def test_the_expected_speedup_is_leviathans():
    assert expected_speedup(0.0, 5, 0.1) == pytest.approx(1 / 1.5)
    assert expected_speedup(1.0, 5, 0.0) == 6
    assert expected_speedup(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / (0.2 * 1.25))
