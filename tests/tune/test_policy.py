"""The draft-length policy in simulation: synthetic acceptance and costs, without a model or a clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from operator import mul

import pytest

from outrider.engine.policy import FixedLength
from outrider.runner.cost_book import CostBook
from outrider.tune import DraftLengthPolicy
from outrider.tune.acceptance import Acceptance
from outrider.tune.probes import EXPLORATION_SHARE
from outrider.tune.track import Track
from outrider.types import Context, Request, Round, SamplingParams
from tests.tune import grid, simulation
from tests.tune.simulation import MAX_K, Cell, Machine, Recorded, Text, automatic, best_fixed, plain, simulate, weigh

EMBEDDED, _ = grid.FAMILIES["embedded, draft"]
LARGE, _ = grid.FAMILIES["1B, draft"]
LOOKUP, _ = grid.FAMILIES["embedded, lookup"]


@pytest.fixture(scope="module")
def weighed():
    return {key: weigh(cell) for key, cell in grid.sample().items()}


def test_the_worst_cell_is_only_slightly_slower_than_plain_decoding(weighed):
    worst = min(weighed, key=lambda key: weighed[key][0])
    assert weighed[worst][0] >= 0.95, grid.report(weighed)


def test_every_family_comes_close_to_the_best_fixed_length(weighed):
    families = {*grid.FAMILIES, *grid.SERVED}
    assert {family for family, _, _ in weighed} == families
    for family in families:
        assert grid.mean([best for key, (_, best) in weighed.items() if key[0] == family]) >= 0.95, grid.report(weighed)


def test_no_cell_is_far_from_the_best_fixed_length(weighed):
    worst = min(weighed, key=lambda key: weighed[key][1])
    assert weighed[worst][1] >= 0.85, (worst, weighed[worst])


def recorded(cell: Cell) -> Recorded:
    costs = CostBook()
    policy = Recorded(DraftLengthPolicy(MAX_K, costs))
    simulate(policy, cell, costs)
    return policy


def test_a_good_draft_is_found_within_ten_rounds_for_a_small_target():
    policy = recorded(Cell(EMBEDDED, Text((0.9,)), lengths=(64,)))
    assert max(policy.requested[:3]) > 0
    assert min(policy.requested[5:10]) >= 2


def test_what_one_request_taught_is_used_from_the_next_ones_first_round():
    policy = recorded(Cell(EMBEDDED, Text((0.9,)), lengths=(64, 64)))
    assert policy.requested[policy.starts[1]] >= 2
    policy = recorded(Cell(EMBEDDED, Text((0.05,)), lengths=(128, 32)))
    assert sum(k > 0 for k in policy.requested[policy.starts[1] :]) <= 1


def test_a_useless_draft_is_rarely_requested():
    policy = recorded(Cell(EMBEDDED, Text((0.02,)), lengths=(256, 256, 256)))
    assert 1 <= sum(k > 0 for k in policy.requested) < 0.04 * len(policy.requested)


def test_new_requests_are_left_out_only_where_drafts_do_not_pay_and_not_for_long():
    def taken(text: Text, batch: int, calls: int, num_recomputed: int = 500) -> str:
        policy = recorded(Cell(EMBEDDED, text, lengths=(256, 256))).inner
        request = Request("new", [0] * 50, 50, SamplingParams(), 0)
        return "".join("yes " if policy.start(request, batch, 0, num_recomputed) else "no " for _ in range(calls))

    assert taken(Text((0.9,)), 1, 3) == "yes " * 3
    assert taken(Text((0.02,)), 1, 12) == "no yes no no yes no no no no yes no no "
    assert taken(Text((0.02,)), 1, 3, num_recomputed=20) == "yes " * 3  # that costs little
    assert taken(Text((0.02,)), 4, 3) == "yes " * 3  # nothing is known of batches of this size


@pytest.mark.parametrize("forced", [(6, 4), (1, 3), (3, 1, 12, 20)])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("machine", [EMBEDDED, LARGE, LOOKUP])
def test_forced_tokens_do_not_affect_the_draft_length(machine, batch, forced):
    """Forced tokens are emitted with any K, so they must not change the policy's estimate of the method's own drafts."""
    good = Cell(machine, Text((0.9,)), forced=forced, batch=batch)
    # With three of four tokens forced, a small target has a quarter of the rounds to win back what reading the prompts costs.
    assert automatic(good) > (0.84 if machine is EMBEDDED else 0.95) * best_fixed(good)
    bad = Cell(machine, Text((0.02,)), forced=forced, batch=batch)
    assert automatic(bad) > (0.93 if machine is EMBEDDED else 0.97) * plain(bad)
    # For other machines a draft is cheaper than the noise of wide passes, so only the loss is bounded, not the number of
    # useless drafts.
    if machine is EMBEDDED or batch > 1:
        assert sum(k > 0 for k in recorded(bad).requested) <= 15


def test_drafting_resumes_after_a_plain_round_with_a_grammars_drafts():
    policy = recorded(Cell(LARGE, Text((0.3,)), lengths=(400,) * 3, forced=(1, 3)))  # no round is without them
    assert grid.mean([k > 0 for k in policy.requested]) > 0.9


def test_output_that_becomes_predictable_is_detected():
    cell = Cell(LARGE, Text((0.1, 0.95), stretch=64), lengths=(192,) * 4)
    assert automatic(cell) > 0.92 * best_fixed(cell) > 1.1 * plain(cell)


def test_compilation_in_the_first_draft_does_not_count_as_a_cost():
    cell = Cell(EMBEDDED, Text((0.95,)))
    assert simulate_cold(cell, 3.0) > 0.9 * best_fixed(cell)


def test_compilation_while_nothing_is_drafted_is_harmless():
    """Costs are reset at that time, in any round."""
    costs = CostBook()

    class Renewed(Recorded):
        def next_lengths(self, context):
            if len(self.requested) > 40:
                costs.renew()
            return super().next_lengths(context)

    policy = Renewed(DraftLengthPolicy(MAX_K, costs))
    simulate(policy, Cell(EMBEDDED, Text((0.02,)), lengths=(256,)), costs)
    assert max(policy.requested[:40]) > 0 and max(policy.requested[41:]) == 0


def simulate_cold(cell: Cell, seconds: float) -> float:
    """Return the tokens per second after a first draft whose time is shown to the policy as ``seconds`` longer."""
    costs = CostBook()
    return simulate(Recorded(DraftLengthPolicy(MAX_K, costs), slow=seconds), cell, costs)


@pytest.mark.parametrize("phase", ["draft", "score", "verify"])
@pytest.mark.parametrize("slow_at", [1, 2, 6])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("machine", [EMBEDDED, LARGE, grid.SERVED["embedded in cache, served"]])
def test_one_slow_round_does_not_end_drafting(machine, batch, slow_at, phase):
    """A compilation or another process takes five seconds, thousands of a small target's plain rounds."""
    text, costs = Text((0.9,)), CostBook()
    policy = Recorded(DraftLengthPolicy(MAX_K, costs), 5.0, phase, slow_at)
    simulate(policy, Cell(machine, text, batch, (64,) * 60, others=(text,) * (batch - 1)), costs)
    assert grid.mean([k > 0 for k in policy.requested]) > 0.45


@pytest.mark.parametrize("cold, least", [((12, 1.8), 0.965), ((4, 3.0), 0.925)])
def test_drafting_is_not_given_up_because_its_first_rounds_are_slow(cold, least):
    """A small target; the first drafts run cold code. Speed over 16 answers, relative to the best fixed length."""
    small = Machine(0.8, 0.06, 0.3, 0.09, 0.014, 0.35, cold=0.2)
    shares = []
    for rate, seed in product((0.7, 0.8), range(8)):
        costs, cell = CostBook(), Cell(small, Text((rate,)), lengths=(64,) * 16, seed=seed)
        policy = Recorded(DraftLengthPolicy(MAX_K, costs), cold=cold)
        shares.append(simulate(policy, cell, costs) / best_fixed(cell))
    assert grid.mean(shares) > least


@pytest.mark.parametrize("slow", [0.0, 5.0])
def test_long_prompts_and_a_bad_first_request_do_not_end_drafting(monkeypatch, slow):
    """Processing a prompt takes the draft longer than the initial budget of a probe."""
    monkeypatch.setattr(simulation, "NUM_PROMPT_TOKENS", 500)
    costs = CostBook()
    policy = Recorded(DraftLengthPolicy(MAX_K, costs), slow)
    simulate(policy, Cell(EMBEDDED, Text((0.02,)), lengths=(64,)), costs)
    num_bad = len(policy.requested)
    simulate(policy, good := Cell(EMBEDDED, Text((0.95,)), lengths=(64,) * 60), costs)
    assert all(list(policy.may_draft.values())[-30:])
    assert len(policy.requested) - num_bad < 0.5 * sum(good.lengths)


def test_a_prompt_too_long_for_the_gain_of_drafts_is_not_prefilled():
    """After two prompts it is known how slow the draft reads. A prompt takes 100 ms, an answer without drafts 58 ms."""
    slow_reader = replace(EMBEDDED, read=2.0)
    for seed in range(4):
        policy = recorded(Cell(slow_reader, Text((0.8,)), lengths=(32,) * 8, seed=seed))
        ends = [*policy.starts[1:], len(policy.requested)]
        assert sum(any(policy.requested[start:end]) for start, end in zip(policy.starts, ends, strict=True)) <= 2


def test_prefill_by_the_draft_counts_in_whole_however_many_rounds_it_takes():
    costs = CostBook()
    policy = DraftLengthPolicy(MAX_K, costs)
    request = Request("r", [0] * 800, 800, SamplingParams(), 0)
    context = Context((request,), (999,), None)
    budget = []
    for number in range(30):
        k = policy.next_lengths(context)[0]
        drafted = k if number >= 20 else 0  # the draft reads 80 tokens of the prompt in each of ten rounds
        times = LARGE.times([drafted], [drafted], 0)
        if 10 <= number < 20:
            times.draft_prefill = 0.01
        request.token_ids.extend([0] * (drafted + 1))
        costs.record_round([drafted], 50, times.score, times.verify + times.host)
        policy.observe(context, Round(drafted, *[[drafted]] * 5, times))
        budget.append(policy._budget.left)
        if drafted:
            break
    assert policy._batch.costs.catch_up(820) > 0.06  # of 0.1 seconds; the last chunk alone took none
    assert budget[19] - budget[9] < 1.02 * 10 * EXPLORATION_SHARE  # and it earns nothing


def test_the_order_of_requests_in_a_batch_does_not_matter():
    """Times are recorded by the longest request, here of 6,000 tokens. Those of short requests, from before, are lower."""
    found = []
    for num_tokens in ((300, 6000), (6000, 300)):
        costs = CostBook()
        for lens in ([0, 0], [4, 4]):
            costs.record_round(lens, 300, 0.01, 0.001)
        policy = DraftLengthPolicy(MAX_K, costs)
        context = Context(tuple(Request(str(n), [0] * n, n, SamplingParams(), 0) for n in num_tokens), (999, 999), None)
        for _ in range(40):
            lens = policy.next_lengths(context)
            times = LARGE.times(lens, lens, 0)
            for request in context.requests:
                request.token_ids.append(0)
            costs.record_round(lens, context.cache_len, times.score, times.overhead)
            policy.observe(context, Round(max(lens), lens, lens, lens, [0, 0], [min(k, 1) for k in lens], times))
            found.append((lens, policy._budget.left, policy._probes._plan(policy._batch)))
    assert found[:40] == found[40:] and any(any(lens) for lens, *_ in found)


def test_sampling_time_does_not_count_against_sampled_drafts():
    """Greedy first, then sampled, on a machine on which sampling slows down every round, also plain ones."""
    costs = CostBook()
    policy = Recorded(DraftLengthPolicy(MAX_K, costs))
    text, drawing = Text((0.8,)), replace(LARGE, outside=60.0)
    simulate(policy, Cell(LARGE, text), costs)
    sampled = Cell(drawing, text, temperature=0.8)
    assert simulate(policy, sampled, costs) > 0.95 * best_fixed(sampled)


def test_if_drafts_never_paid_the_next_attempt_is_later():
    """A new request shortens the pause, because its output may differ; after sixty useless ones, less so."""
    policies = [recorded(Cell(LARGE, Text((0.02,)), lengths=(64,) * 60, seed=seed)) for seed in range(5)]
    assert grid.mean([grid.mean([k > 0 for k in policy.requested]) for policy in policies]) < 0.07
    even = Cell(LARGE, Text((0.05,)), lengths=(64,) * 60)  # a draft pays 1% of a round: any number of attempts is as fast
    assert automatic(even) > 0.99 * plain(even)


def test_drafts_that_the_proposer_never_makes_are_not_expected():
    """It stops at the first draft however many are requested; three would pay, one does not."""
    machine, _ = grid.FAMILIES["embedded, short drafts"]
    cells = [Cell(machine, Text((0.9,), longest=1), lengths=(64,) * 12, seed=seed) for seed in range(6)]
    assert best_fixed(cells[0]) == plain(cells[0])
    assert grid.mean([grid.mean([k > 0 for k in recorded(cell).requested]) for cell in cells]) < 0.15


def test_drafts_left_out_because_they_would_be_rejected_cost_nothing_in_the_estimate():
    """A proposer that knows: half of its chains have one rejected draft, the others four accepted ones."""
    track = Track(Acceptance.empty(MAX_K), Acceptance.empty(MAX_K))
    for number in range(400):
        drafts, accepted = (1, 0) if number % 2 else (4, 4)
        for counts in (track.shared, track.own):
            counts.add(4, drafts, accepted)
    assert track.gains(4, 4) == pytest.approx([0.5] * 4, abs=0.03)
    assert list(accumulate(track.made_rates(4), mul)) == pytest.approx([1, 0.5, 0.5, 0.5], abs=0.03)


@pytest.mark.parametrize("machine, rate", [(LARGE, 0.8), (EMBEDDED, 0.9), (EMBEDDED, 0.05)])
def test_a_further_draft_costs_the_tokens_that_its_time_brings_otherwise(machine, rate):
    steps, rows = [], []
    for seed in range(8):  # passes of a few widths are measured, with noise
        cell, costs = Cell(machine, Text((rate,)), lengths=(256,) * 4, seed=seed), CostBook()
        policy = DraftLengthPolicy(MAX_K, costs)
        speed = simulate(policy, cell, costs)
        steps.append(policy.prices.step / (machine.step / 1e3 * speed))
        rows.append(policy.prices.row / (machine.row * machine.plain / 1e3 * speed))
    assert grid.mean(steps) == pytest.approx(1, rel=0.4)
    assert grid.mean(rows) == pytest.approx(1, rel=0.4)


def test_requests_with_their_own_k_get_all_their_drafts():
    cell, costs = Cell(LARGE, Text((0.8,))), CostBook()
    policy = DraftLengthPolicy(MAX_K, costs)
    simulate(policy, cell, costs)
    request = Request("own", [0] * 50, 50, SamplingParams(), 0, num_draft_tokens=4)
    policy.next_lengths(Context((request,), (99,), None))
    assert policy.prices is None


KEEPING = Machine(2.9, 0.1, 1.2, 0.5, 0.05, 0.6, keep=0.2)  # hidden states of a request take 0.2 ms of a round of 3.5


@pytest.mark.parametrize("batch", [1, 4])
def test_requests_in_which_no_probe_comes_take_no_part(batch):
    useless = Text((0.02,))
    cell = Cell(KEEPING, useless, batch, (64,) * 60, others=(useless,) * (batch - 1))
    policy = recorded(cell)
    parts = list(policy.may_draft.values())
    assert parts[0] and sum(parts[-40 * batch :]) < 0.6 * 40 * batch
    assert automatic(cell) > 0.95 * plain(cell)


def test_long_requests_and_all_where_drafts_pay_take_part():
    costs = CostBook()
    policy = Recorded(DraftLengthPolicy(MAX_K, costs))
    simulate(policy, Cell(KEEPING, Text((0.02,)), lengths=(64,) * 60), costs)
    assert not all(list(policy.may_draft.values())[-10:])
    simulate(policy, long := Cell(KEEPING, Text((0.02,)), lengths=(2000,)), costs)
    assert list(policy.may_draft.values())[-1]
    num_rounds = len(policy.requested)
    simulate(policy, replace(long, text=Text((0.95,)), lengths=(64,) * 60), costs)
    assert all(list(policy.may_draft.values())[-50:]) and len(policy.requested) - num_rounds < 0.3 * 60 * 64


def test_pauses_do_not_depend_on_how_the_end_of_requests_is_known(monkeypatch):
    """Without ``max_tokens`` they end with the context. A pause is limited only if requests are still running after it."""
    cell = Cell(replace(KEEPING, read=0.065), Text((0.02,)), lengths=(160,) * 30)
    before = recorded(cell).requested
    monkeypatch.setattr(
        simulation, "SamplingParams", lambda max_tokens, temperature: SamplingParams(None, temperature=temperature)
    )
    assert recorded(cell).requested == before
    long = recorded(Cell(KEEPING, Text((0.02,)), lengths=(2000,))).requested
    assert sum(k > 0 for k in long) > 10  # doubled pauses without a limit leave time for seven


class Watching(DraftLengthPolicy):
    """Counts, per round, the tokens that a request taking part in drafting is behind at most, and the requests drafted for."""

    def next_lengths(self, context):
        lengths = super().next_lengths(context)
        takes_part = [b for b, request in enumerate(context.requests) if request.may_draft]
        self.behind = [*getattr(self, "behind", ()), max([self._batch.num_unseen(b) for b in takes_part], default=0)]
        self.drafting = [*getattr(self, "drafting", ()), sum(k > 0 for k in lengths)]
        return lengths


def test_a_large_batch_does_not_wait_for_a_probe_that_no_budget_pays():
    """What eight requests are behind grows faster than the budget: half of them are left out, until a probe can be paid."""
    costs, length = CostBook(), 2400
    policy = Watching(MAX_K, costs)
    simulate(policy, cell := Cell(KEEPING, Text((0.02,)), 8, (length,)), costs)
    assert max(policy.behind) < length / 3  # the hidden states of these tokens are in memory
    assert sum(policy.drafting[length // 2 :]) > 1
    policy, cheap = Watching(MAX_K, costs := CostBook()), replace(KEEPING, base=0.1, step=0.05)  # pays for one of eight, too
    simulate(policy, replace(cell, machine=cheap, text=Text((0.02, 0.95), stretch=length // 2)), costs)
    assert sum(policy.drafting[length // 2 :]) > 100  # those that were not left out draft as soon as it pays


def test_the_baseline_is_a_warm_plain_round_not_one_after_a_draft():
    """A small target whose passes take 50% longer after the draft model's, with a draft that barely pays."""
    small = Machine(0.42, 0.07, 0.12, 0.14, 0.0, 0.1, cold=0.5, cold_outside=2.0)
    costs = CostBook()
    policy = Recorded(inner := DraftLengthPolicy(MAX_K, costs))
    simulate(policy, Cell(small, Text((0.7,)), lengths=(64,) * 32), costs)
    assert 0.5 < sum(k > 0 for k in policy.requested) / len(policy.requested) < 1  # few rounds without drafts
    assert inner._costs[True].round_costs(1, 200).plain == pytest.approx(0.52e-3, rel=0.06)


@pytest.mark.parametrize("text", grid.MIXED)
def test_requests_of_one_batch_get_drafts_by_their_gain(text):
    first, others = grid.MIXED[text]
    cell = Cell(LARGE, first, 8, others=others)
    assert automatic(cell) > 1.02 * best_fixed(cell)


def test_similar_requests_share_one_length():
    lengths = recorded(Cell(LARGE, Text((0.8,)), 4)).lengths
    assert sum(len(set(each)) == 1 for each in lengths) > 0.7 * len(lengths)


def test_requests_that_become_predictable_are_detected_in_a_batch_of_drafting_ones():
    """Drafting stops for three of four in their first 60 tokens; then they copy their prompts."""
    turning = Text((0.02, 0.97, 0.97, 0.97), stretch=60)
    policy = recorded(Cell(LARGE, Text((0.8,)), 4, lengths=(240,), others=(turning,) * 3))
    early, late = policy.lengths[20:60], policy.lengths[60:90]
    assert sum(not any(each[1:]) for each in early) > 0.6 * len(early)
    assert max(min(each[1:]) for each in late) >= 4


@pytest.mark.parametrize("rates", [(1.0,), (0.0,), (0.0, 1.0)])
def test_next_to_a_request_with_its_own_k_another_gets_the_best_length(rates):
    """The first drafts in every round without success: there is no plain round, and more is drafted than the policy decided."""
    costs = CostBook()
    policy = DraftLengthPolicy(MAX_K, costs)
    requests = tuple(Request(f"r{b}", [0] * 50, 50, SamplingParams(), 0) for b in range(2))
    requests[0].num_draft_tokens = 8
    context, requested = Context(requests, (999, 999), None), []
    for number in range(200):
        lengths = [8, policy.next_lengths(context)[1]]
        accepted = [0, int(rates[number // 100 % len(rates)] * lengths[1])]
        times = LARGE.times(lengths, lengths, 2)
        for request, count in zip(requests, accepted, strict=True):
            request.token_ids.extend([0] * (count + 1))
        costs.record_round(lengths, 50, times.score, times.verify + times.host)
        judged = [min(taken + 1, length) for taken, length in zip(accepted, lengths, strict=True)]
        policy.observe(context.limited(lengths), Round(8, lengths, lengths, lengths, accepted, judged, times))
        requested.append(lengths[1])
    if rates[0]:
        assert min(requested[20:]) >= 4
    else:
        assert 1 <= sum(k > 0 for k in requested[:100]) <= 20
        assert (min(requested[-20:]) >= 4) == (rates[-1] > 0)


def test_a_maximum_below_the_usual_lengths_is_respected():
    costs = CostBook()
    policy = Recorded(DraftLengthPolicy(2, costs))
    simulate(policy, Cell(LOOKUP, Text((0.95,))), costs)
    assert max(policy.requested) == 2


def test_the_number_of_stored_temperatures_is_bounded():
    costs = CostBook()
    policy = DraftLengthPolicy(4, costs)
    for temperature in range(60):
        simulate(policy, Cell(EMBEDDED, Text((0.5,)), lengths=(2,), temperature=temperature / 3), costs)
    assert len(policy._shared) <= 8


def test_the_same_rounds_give_the_same_choices():
    cell = Cell(EMBEDDED, Text((0.3, 0.9), stretch=20), batch=4)
    assert recorded(cell).requested == recorded(cell).requested


def test_the_simulation_measures_plain_decoding():
    machine = Machine(plain=10, row=0.1, base=0, step=0, read=0, outside=1, prompt=0)
    cell = Cell(machine, Text((0.5,)), lengths=(20,))
    assert simulate(FixedLength(0), cell) == pytest.approx(1000 / 11)
    assert simulate(FixedLength(3), replace(cell, text=Text((0.0,)))) < simulate(FixedLength(0), cell)
    assert simulate(FixedLength(3), replace(cell, text=Text((1.0,)))) == pytest.approx(20 / (5 * 14 / 1e3))
