"""Lanes take turns by their clocks, and free their requests."""

from __future__ import annotations

import pytest
from tiny_folder import make_folder

from outrider import LLM, SamplingParams
from outrider.bench.race import Race, first_difference
from outrider.cli.compare import engines
from outrider.types import OutriderError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_folder(tmp_path_factory.mktemp("race") / "model", max_position_embeddings=256)
    return LLM(folder, method="ngram", num_draft_tokens=3, compile="never", max_batch=2, same_text=True)


PARAMS = SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True)


@pytest.mark.parametrize("turn", [0.0, 0.02, 1e9])
def test_a_lane_runs_until_it_leads_by_one_turn(llm: LLM, turn: float) -> None:
    race = Race(engines(llm), [5, 6, 7], PARAMS, turn)
    clocks = {lane.name: 0.0 for lane in race.lanes}
    last, ended = "", set()
    for step in race.run():
        name = step.lane.name
        other = next(each for each in clocks if each != name)
        if other not in ended:
            assert clocks[name] <= clocks[other] or (name == last and clocks[name] < clocks[other] + turn)
        clocks[name], last = step.lane.clock, name
        if step.lane.finish_reason:
            ended.add(name)
    assert ended == set(clocks)
    plain, speculative = race.lanes
    assert plain.output == speculative.output and len(plain.output) == 40 and race.first_difference is None
    for lane in race.lanes:
        assert 0 < lane.first_seconds < lane.clock
        assert lane.stats.tok_s == pytest.approx((40 - 1) / (lane.clock - lane.first_seconds))


def test_the_first_difference_of_a_prefix_is_its_end(llm: LLM) -> None:
    assert first_difference([1, 2], (1, 2)) is None and first_difference([1, 2], [1, 3, 4]) == 1
    assert first_difference([1], [1, 2]) == first_difference([1, 2], [1]) == 1
    race = Race(engines(llm), [5, 6, 7], PARAMS)  # stopped early, so that one output is a prefix
    race.lanes[0].request.token_ids.append(8)
    assert race.first_difference is None


def test_a_race_frees_its_requests(llm: LLM) -> None:
    race = Race(engines(llm), [5, 6, 7], PARAMS)
    steps = race.run()
    next(steps)
    steps.close()
    assert not any(lane.engine.has_work for lane in race.lanes)


def test_stop_ends_every_lane_before_its_next_round(llm: LLM) -> None:
    race = Race(engines(llm), [5, 6, 7], PARAMS)
    for _ in race.run():
        race.stop("time")
    assert [lane.finish_reason for lane in race.lanes] == ["time", "time"]
    assert sum(len(lane.output) for lane in race.lanes) == 1


def test_a_prompt_that_fills_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(OutriderError, match="no room"):
        list(Race(engines(llm), [5] * 300, PARAMS).run())


def test_no_lane_crosses_a_border_of_the_target(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.runner, "borders", (32,))
    assert [engine.scheduler.borders for engine in engines(llm).values()] == [(32,), (32,)]
