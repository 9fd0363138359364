"""Races: two real runs of the engine in turns, and the data about their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from lossless.drafts import medusa_heads

from outrider.engine.llm import LLM
from outrider.server.demo import race
from outrider.server.demo.track import RaceRequest, Track
from outrider.types import OutriderError

WANTED = RaceRequest(prompt="def add(first, second):\n", method="draft", k=4, max_tokens=60, seed=5)


def but(**changes: Any) -> RaceRequest:
    """Return ``WANTED`` with other values."""
    return WANTED.model_copy(update=changes)


def run(track: Track, wanted: RaceRequest) -> list[dict[str, Any]]:
    return [event for events in track.race(wanted, track.encode(wanted)) for event in events]


def rounds_of(events: Sequence[dict[str, Any]], lane: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "round" and event["lane"] == lane]


def text_of(events: Sequence[dict[str, Any]], lane: str) -> str:
    return "".join(token["text"] for round_ in rounds_of(events, lane) for token in round_["tokens"])


@pytest.mark.parametrize("k", [0, 1, 4, "auto"])
@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_greedy_lanes_emit_the_same_tokens(track: Track, method: str, k: int | str) -> None:
    events = run(track, but(method=method, k=k))
    assert events[0]["type"] == "started" and events[-1]["type"] == "finished"
    assert events[-1]["first_difference"] is None and events[-1]["faults"] == 0
    assert events[-1]["num_tokens"] == {"plain": 60, "speculative": 60}
    assert text_of(events, "plain") == text_of(events, "speculative") != ""


def test_accuracy_changes_acceptance_but_not_the_text(track: Track) -> None:
    runs = [run(track, but(accuracy=accuracy)) for accuracy in (1.0, 0.6, 0.0)]
    rates = [events[-1]["figures"]["alpha"] for events in runs]
    assert rates[0] == 1.0 and 0.25 < rates[1] < 0.85 and rates[2] < 0.03
    assert len({text_of(events, "speculative") for events in runs}) == 1
    taus = [events[-1]["figures"]["tau"] for events in runs]
    assert taus[0] == pytest.approx(5, abs=0.5) and taus[2] < 1.1


def test_a_clock_counts_its_own_rounds_and_the_smaller_runs_next(track: Track) -> None:
    events = [event for event in run(track, WANTED) if event["type"] == "round"]
    clocks = {"plain": 0.0, "speculative": 0.0}
    ended: set[str] = set()
    for event in events:
        others = [clock for lane, clock in clocks.items() if lane not in ended]
        assert clocks[event["lane"]] == min(others)
        clocks[event["lane"]] += sum(event["ms"].values()) / 1e3
        assert event["clock"] == pytest.approx(clocks[event["lane"]])
        if event["finish_reason"]:
            ended.add(event["lane"])
    assert ended == {"plain", "speculative"}


def test_distributions_and_residual_match_the_verifier(folders: dict[str, str]) -> None:
    llm = LLM(folders["target"], method="plain", max_batch=2, compile="never")
    track = Track(llm, ["draft"], folders["draft"])
    worn = track._engines["draft"].proposer.inner  # type: ignore[attr-defined]
    for weight in worn.draft.model.parameters():  # make the draft differ from the target
        weight.mul_(0.6)
    events = run(track, but(temperature=1.0))
    tokens = [token for round_ in rounds_of(events, "speculative") for token in round_["tokens"]]
    seen = set()
    for token in tokens:
        place = token["place"]
        seen.add(token["origin"])
        assert token["name"] == place["tokens"][place["row"]] and place["odds"] is None
        assert 0 < sum(place["target"]) <= 1.001
        if token["origin"] in ("bonus", "plain"):
            assert place["draft"] is None and place["residual"] is None
            continue
        (guess,) = place["guesses"]
        at = guess["row"]
        assert guess["chance"] == pytest.approx(min(1, place["target"][at] / place["draft"][at]), abs=0.02)
        assert guess["accepted"] == (token["origin"] == "accepted")
        excess = [max(0.0, target - draft) for target, draft in zip(place["target"], place["draft"], strict=True)]
        scale = max(place["residual"]) / max(excess)
        assert place["residual"] == pytest.approx([scale * each for each in excess], abs=0.01)
        assert scale >= 1
        if token["origin"] == "corrected":
            assert place["residual"][place["row"]] > 0
    assert {"accepted", "corrected"} <= seen


def test_coupled_rounds_have_no_chances_and_no_residual(folders: dict[str, str]) -> None:
    llm = LLM(folders["target"], method="plain", max_batch=2, compile="never", same_text=True)
    events = run(Track(llm, ["draft"], folders["draft"]), but(temperature=1.0, accuracy=0.5))
    places = [token["place"] for round_ in rounds_of(events, "speculative") for token in round_["tokens"]]
    assert any(place["guesses"] for place in places) and all(place["residual"] is None for place in places)
    assert {guess["chance"] for place in places for guess in place["guesses"]} == {None}


def test_greedy_targets_show_their_probabilities_before_the_argmax(track: Track) -> None:
    tokens = [token for round_ in rounds_of(run(track, WANTED), "plain") for token in round_["tokens"]]
    for token in tokens:
        place = token["place"]
        assert place["row"] == 0 and place["tokens"][0] == token["name"] and place["target"][0] == 1.0
        assert place["odds"] == sorted(place["odds"], reverse=True) and 0 < place["odds"][0] < 1


def test_trees_race_too(folders: dict[str, str]) -> None:
    llm = LLM(folders["target"], method="plain", max_batch=2, compile="never")
    heads: Any = medusa_heads(llm.runner.model)
    track = Track(llm, ["medusa:max_nodes=8"], heads)
    for accuracy in (1.0, 0.5):
        events = run(track, but(method="medusa:max_nodes=8", accuracy=accuracy))
        assert events[-1]["first_difference"] is None and events[-1]["faults"] == 0
        tried = [token["place"]["guesses"] for round_ in rounds_of(events, "speculative") for token in round_["tokens"]]
        assert max(map(len, tried)) > 1
        assert all(not guess["accepted"] for guesses in tried for guess in guesses[:-1])


def test_a_race_ended_early_frees_its_places(track: Track) -> None:
    for _ in range(3):
        racing = track.race(WANTED, track.encode(WANTED))
        next(racing)
        racing.close()
    assert run(track, WANTED)[-1]["type"] == "finished"


def test_time_is_limited(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "MAX_SECONDS", 0.0)
    last = run(track, WANTED)[-1]
    assert last["type"] == "finished" and "time" in last["reasons"].values()


def test_rejected_and_unreached_drafts_are_reported(track: Track) -> None:
    for round_ in rounds_of(run(track, but(accuracy=0.0)), "speculative"):
        if round_["drafted"]:
            (guess,) = round_["tokens"][-1]["place"]["guesses"]
            assert not guess["accepted"] and len(round_["dropped"]) == round_["drafted"] - 1


def test_invalid_requests_are_refused(track: Track, folders: dict[str, str]) -> None:
    with pytest.raises(OutriderError, match="unknown method 'magic': available are draft, ngram"):
        track.encode(but(method="magic"))
    with pytest.raises(OutriderError, match="with max_tokens=60"):
        track.encode(but(prompt="x y z " * 400))
    llm = LLM(folders["target"], method="plain", max_batch=2, compile="never")
    with pytest.raises(OutriderError, match="none of the methods medusa fits"):
        Track(llm, ["medusa"], folders["draft"])
