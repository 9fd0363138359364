"""Times of phases, and predicted times of plain decoding, from rounds with known times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.clock import ClockedRunner, PhaseClock
from outrider.engine.guard import GuardedProposer
from outrider.engine.stats import GenerationStats
from outrider.proposers.base import ScriptedProposer
from outrider.runner.cost_book import CostBook, PlainRound
from outrider.types import Context, PhaseTimes, Proposal, Round

from .toy import make_request


def drafted(num_accepted: int, score: float = 3.0) -> Round:
    times = PhaseTimes(draft=2.0, score=score, verify=0.5, host=0.5)
    return Round(4, [4], [4], [4], [num_accepted], [min(num_accepted + 1, 4)], times)


PLAIN = Round(0, [0], [0], [0], [0], [0], PhaseTimes(draft=0.0, score=1.0, verify=0.2, host=0.3))


def test_each_token_of_a_drafted_round_replaces_one_plain_round() -> None:
    stats = GenerationStats()
    stats.add_times(drafted(3), emitted_per_request=4, plain=PlainRound(1.0, 0.5))
    assert stats.plain_seconds == pytest.approx(4 * 1.5)


def test_a_round_without_drafts_counts_with_its_own_time() -> None:
    stats = GenerationStats()
    stats.add_times(PLAIN, emitted_per_request=1, plain=None)
    assert stats.plain_seconds == pytest.approx(1.5)


def test_prefill_counts_as_one_token_of_plain_decoding() -> None:
    stats = GenerationStats()
    stats.add_times(replace(drafted(2, score=20.0), is_prefill=True), emitted_per_request=3, plain=PlainRound(1.0, 0.5))
    assert stats.plain_seconds == pytest.approx(20.0 + 1.0 + 2 * 1.5)


def test_rounds_before_the_first_measurement_use_later_costs() -> None:
    stats = GenerationStats()
    stats.add_times(drafted(1), emitted_per_request=2, plain=None)
    assert stats.plain_seconds is None and stats.plain_tok_s is None and stats.cost_ratio is None
    stats.add_times(drafted(2), emitted_per_request=3, plain=PlainRound(1.0, 0.5))
    assert stats.plain_seconds == pytest.approx(5 * 1.5)
    assert stats.cost_ratio == pytest.approx(2.0 / 4 / 1.0)


def test_drafts_that_a_grammar_forces_are_draft_steps() -> None:
    stats = GenerationStats()
    round_ = Round(4, [4], [1], [4], [1], [1], PhaseTimes(draft=2.0, score=3.0), num_grammar=[3])
    stats.add_times(round_, emitted_per_request=5, plain=PlainRound(1.0, 0.5))
    assert stats.cost_ratio == pytest.approx(2.0 / 4 / 1.0)


def test_host_time_of_drafted_rounds_is_used_without_plain_rounds() -> None:
    stats = GenerationStats()
    stats.add_times(drafted(0), emitted_per_request=1, plain=PlainRound(1.0, None))
    assert stats.plain_seconds == pytest.approx(1.0 + 1.0)


def test_plain_rounds_are_predicted_from_plain_passes_only() -> None:
    costs = CostBook()
    costs.record_pass(5, 1, 100, 3.0)
    assert costs.pass_seconds(1, 1, 100) is not None  # an estimate, sufficient for a policy
    assert costs.plain_round(1, 100) is None  # but not for statistics shown to users
    costs.record_pass(1, 1, 100, 1.0)
    assert costs.plain_round(1, 100) == PlainRound(1.0, None)
    for _ in range(10):
        costs.record_round([0], 100, 1.0, overhead=0.5)
    costs.record_round([0], 100, 1.0, overhead=50.0)  # an outlier
    costs.record_round([0], 100, 1.0, overhead=7.0, is_greedy=False)  # sampling takes longer
    found = costs.plain_round(1, 300)
    assert found is not None and found.score == 1.0 and found.overhead == pytest.approx(0.5, rel=0.1)
    assert costs.plain_round(2, 100) is None


def test_statistics_can_be_read_while_they_change() -> None:
    """A server reads metrics while the engine's thread updates them."""
    stats = GenerationStats()

    class Meanwhile(int):
        def __mul__(self, rounds: int) -> int:
            stats.add_counts(num_drafts=4, num_reached=4, num_accepted=4 + len(stats.acceptance_histogram), num_emitted=1)
            return int(self) * rounds

    stats.acceptance_histogram = {Meanwhile(1): 2, Meanwhile(3): 1}
    assert stats.num_accepted == 5


def test_the_time_of_a_pass_on_a_gpu_counts_as_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launched:
        """A runner that returns while its GPU still computes."""

        def score(self, *_: object) -> Any:
            return SimpleNamespace(logits=SimpleNamespace(device=torch.device("cuda:0")))

    stream = SimpleNamespace(synchronize=lambda: time.sleep(0.02))
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: stream)
    clock = PhaseClock(torch.device("cuda:0"))
    ClockedRunner(Launched(), clock).score(None, None, ())  # type: ignore[arg-type]
    times = clock.take()
    assert times.score >= 0.02 > times.verify


def test_the_drafts_of_a_round_are_counted_once_for_all_its_requests() -> None:
    class Counting(list[int]):
        num_read = 0

        def __iter__(self) -> Iterator[int]:
            self.num_read += 1
            return super().__iter__()

    lens, proposed = Counting([4, 2]), Counting([4, 2])
    round_ = Round(4, lens, [4, 2], proposed, [1, 2], [2, 2], PhaseTimes(draft=2.0, score=3.0))
    found = [GenerationStats() for _ in range(3)]
    for stats in found:
        stats.add_times(round_, emitted_per_request=2, plain=None)
    assert lens.num_read == proposed.num_read == 1 and [stats.num_draft_steps for stats in found] == [4] * 3


def test_the_time_of_drafts_and_prefill_on_a_gpu_counts_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They return while the GPU still computes; the drafts are on the CPU."""
    stream = SimpleNamespace(synchronize=lambda: time.sleep(0.02))
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: stream)
    clock = PhaseClock(torch.device("cuda:0"))
    proposer = GuardedProposer(ScriptedProposer(lambda context, k: Proposal.empty(1)), clock, 9, list, False)
    request = make_request("r", [1, 2])
    proposer.prefill([request])
    proposer.propose(Context((request,), (1,), None), 1)  # type: ignore[arg-type]
    with clock.phase("prefill"):
        pass
    times = clock.take()
    assert min(times.draft_prefill, times.draft, times.prefill) >= 0.02
