"""Detection of loops compared with its definition, and measurements before loops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_folder import make_folder

from outrider import LLM
from outrider.bench import cells, loops
from outrider.bench.contenders import Contender, Contenders
from outrider.bench.documents import headline, loop_warnings
from outrider.bench.grid import PLAIN_CONTENDER, GridPlan, Group
from outrider.bench.loops import MAX_PERIOD, in_loops, loop_share, loop_start
from outrider.bench.measure import Arrival, Batch, Run, generate
from outrider.types import PhaseTimes, Round

NGRAM = Contender("ngram", 3)
FRESH = list(range(100, 140))  # tokens without repetition


def by_definition(tokens: Sequence[int], max_period: int, min_repeats: int) -> list[bool]:
    """Test every window of one period, repeated often enough."""
    found = [False] * len(tokens)
    for period in range(1, max_period + 1):
        for begin in range(len(tokens)):
            for end in range(begin + min_repeats * period, len(tokens) + 1):
                if all(tokens[at] == tokens[at - period] for at in range(begin + period, end)):
                    found[begin:end] = [True] * (end - begin)
    return found


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 5), st.integers(2, 4))
def test_loops_match_the_definition(tokens: list[int], max_period: int, min_repeats: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "MAX_PERIOD", max_period)
        patch.setattr(loops, "MIN_REPEATS", min_repeats)
        assert in_loops(tokens) == by_definition(tokens, max_period, min_repeats)


@pytest.mark.parametrize(
    ("tokens", "start", "share"),
    [
        ([], 0, 0.0),
        (FRESH, 40, 0.0),
        ([1, 1], 2, 0.0),
        ([1, 1, 1], 0, 1.0),
        ([*FRESH, 1, 2, 1, 2], 44, 0.0),  # two repetitions are not a loop
        ([*FRESH, 1, 2, 1, 2, 1, 2], 40, 6 / 46),
        ([*FRESH, 1, 2, 1, 2, 1, 2, 1], 40, 7 / 47),  # a partial period at the end belongs to the loop
        ([*FRESH[:MAX_PERIOD] * 3], 0, 1.0),
        ([*FRESH[: MAX_PERIOD + 1] * 3], 99, 0.0),  # a longer period does not count
        ([7, 7, 7, *FRESH], 0, 3 / 43),  # even if the text continues
    ],
)
def test_loop_start_and_share(tokens: list[int], start: int, share: float) -> None:
    assert loop_start(tokens) == start and loop_share([tokens]) == pytest.approx(share)


def batch(*, tokens_per_round: int, num_rounds: int, prompts: int = 1, seconds: float = 1.0) -> Batch:
    """Return a batch: each prompt's first token after 0.5 s, then ``tokens_per_round`` per round of ``seconds``."""
    arrivals = [Arrival(0.5, prompt, 1, 0) for prompt in range(prompts)]
    for at in range(1, num_rounds + 1):
        arrivals += [Arrival(0.5 + at * seconds, prompt, 1 + at * tokens_per_round, at) for prompt in range(prompts)]
    accepted = [tokens_per_round - 1] * prompts
    depths, judged = [3] * prompts, [min(tokens_per_round, 3)] * prompts
    rounds = (Round(3, depths, depths, depths, accepted, judged, PhaseTimes(0.1, 0.5, 0.1, 0.1)),) * num_rounds
    total = prompts * (1 + num_rounds * tokens_per_round)
    waits = (0.5,) * prompts
    return Batch(total, 0.5 + num_rounds * seconds, prompts, 0.5, None, waits, tuple(arrivals), rounds)


def test_a_batch_is_cut_after_the_last_round_before_a_loop() -> None:
    part = batch(tokens_per_round=3, num_rounds=10).before([8])
    assert (part.num_tokens, part.seconds, len(part.rounds)) == (7, 2.5, 2)  # the third round contains the ninth token
    assert (part.first_tokens, part.first_seconds) == (1, 0.5)
    whole = batch(tokens_per_round=3, num_rounds=10)
    uncut = whole.before([31])
    assert (uncut.num_tokens, uncut.seconds, uncut.rounds) == (whole.num_tokens, whole.seconds, whole.rounds)
    for early in (0, 1, 3):
        assert whole.before([early]).num_tokens == 0


def test_a_batch_is_cut_at_the_round_before_its_first_loop() -> None:
    part = batch(tokens_per_round=2, num_rounds=10, prompts=3).before([21, 6, 21])
    assert (part.num_tokens, part.seconds, len(part.rounds)) == (15, 2.5, 2)


def run(tokens_per_round: int, num_rounds: int, text: list[int], seconds: float = 1.0) -> Run:
    whole = batch(tokens_per_round=tokens_per_round, num_rounds=num_rounds, seconds=seconds)
    assert whole.num_tokens == len(text)
    return Run([text], [whole])


def test_results_before_loops_exclude_loops() -> None:
    text = [*FRESH[:31], *[7, 8] * 15]  # 61 tokens, the last 30 in a loop

    def speculative() -> Run:
        """Return a run with two tokens per round before the loop and six in it."""
        slow, fast = batch(tokens_per_round=2, num_rounds=15), batch(tokens_per_round=6, num_rounds=5)
        later = [Arrival(15 + each.seconds, 0, 30 + each.num_tokens, 15 + each.num_rounds) for each in fast.arrivals[1:]]
        arrivals = (*slow.arrivals, *later)
        return Run([text], [Batch(61, 20.5, 1, 0.5, None, (0.5,), arrivals, (*slow.rounds, *fast.rounds))])

    repeats = [{PLAIN_CONTENDER: run(1, 60, text), NGRAM: speculative()} for _ in range(3)]
    plain, drafted = cells.cells([Group(0.0, 1, "x", repeats)])
    assert plain["loop_share"] == drafted["loop_share"] == pytest.approx(30 / 61, abs=1e-4)
    assert drafted["tokens_before_loops"] == 31
    assert drafted["decode_speedup"] == pytest.approx(3.0) and drafted["before_loops"]["decode_speedup"] == pytest.approx(2.0)
    assert headline(drafted)["decode_speedup"] == pytest.approx(2.0) and headline(drafted)["tokens"] == 61
    assert drafted["mean_acceptance_length"] == pytest.approx(3.0)
    assert drafted["before_loops"]["mean_acceptance_length"] == pytest.approx(2.0)
    (warning,) = loop_warnings([plain, drafted])
    assert "49% of plain decoding's tokens are in loops" in warning and "31 of 61" in warning


def test_without_loops_there_is_one_set_of_results_and_no_warning() -> None:
    repeats = [{PLAIN_CONTENDER: run(1, 30, FRESH[:31]), NGRAM: run(2, 15, FRESH[:31])}]
    found = cells.cells([Group(0.0, 1, "x", repeats)])
    assert [cell["before_loops"] for cell in found] == [None, None] and headline(found[1]) is found[1]
    assert loop_warnings(found) == []


def test_an_output_that_loops_from_the_start_is_excluded_for_all_contenders() -> None:
    looping, fresh = [7] * 31, FRESH[:31]

    def two(tokens_per_round: int, num_rounds: int, first: list[int]) -> Run:
        batches = [batch(tokens_per_round=tokens_per_round, num_rounds=num_rounds) for _ in range(2)]
        return Run([first, fresh], batches)

    repeats = [{PLAIN_CONTENDER: two(1, 30, looping), NGRAM: two(2, 15, fresh)} for _ in range(2)]
    _, drafted = cells.cells([Group(0.8, 1, "x", repeats)])
    assert drafted["before_loops"]["decode_speedup"] == pytest.approx(2.0)
    low, high = drafted["before_loops"]["decode_speedup_interval"]
    assert low == high == pytest.approx(2.0)  # the empty output is never resampled
    alone = [{PLAIN_CONTENDER: run(1, 30, looping), NGRAM: run(2, 15, looping)}]
    found = cells.cells([Group(0.0, 1, "x", alone)])
    assert found[1]["before_loops"] is None and "loops from the start" in loop_warnings(found)[0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_real_run_records_token_arrivals(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    folder = make_folder(tmp_path_factory.mktemp("loops") / "model")
    llm = LLM(folder, method="plain", compile="never", max_batch=2, prefill_chunk=20)
    prompts = [[7, 8, 9], [10 + i % 30 for i in range(90)]]
    measured = generate(Contenders(llm), NGRAM, prompts, GridPlan((), {}, max_tokens=40).params(0, 0), size)
    for whole in measured.batches:
        seconds = [each.seconds for each in whole.arrivals]
        assert seconds == sorted(seconds) and len(whole.rounds) == whole.arrivals[-1].num_rounds
        uncut = whole.before([40] * len(whole.waits))
        assert (uncut.num_tokens, uncut.rounds) == (whole.num_tokens, whole.rounds)
        part = whole.before([20] * len(whole.waits))
        assert 0 < part.num_tokens <= 20 * len(whole.waits) and 0 < len(part.rounds) < len(whole.rounds)
        decoded = sum(count + 1 for each in part.rounds for count in each.num_accepted)
        assert size == 2 or part.num_tokens - part.first_tokens == decoded
