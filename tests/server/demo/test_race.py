"""Races: two real runs of the engine in turns, and the data about their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from lossless.drafts import medusa_heads
from torch import Tensor

from outrider.engine.llm import LLM
from outrider.engine.stats import GenerationStats
from outrider.server.demo import race
from outrider.server.demo.app import Demo
from outrider.server.demo.track import RaceRequest, Track
from outrider.types import OutriderError, Proposal, Verdict
from outrider.verifiers.rejection import RejectionVerifier

from .conftest import serving

WANTED = RaceRequest(prompt="def add(first, second):\n", method="draft", num_draft_tokens=4, max_tokens=60, seed=5)


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
    events = run(track, but(method=method, num_draft_tokens=k))
    assert events[0]["type"] == "started" and events[-1]["type"] == "finished"
    assert events[-1]["first_difference"] is None and events[-1]["faults"] == 0
    for lane in ("plain", "speculative"):
        assert sum(len(round_["tokens"]) for round_ in rounds_of(events, lane)) == 60
    assert text_of(events, "plain") == text_of(events, "speculative") != ""


def test_accuracy_changes_acceptance_but_not_the_text(track: Track) -> None:
    runs = [run(track, but(accuracy=accuracy)) for accuracy in (1.0, 0.6, 0.0)]
    rates = [events[-1]["figures"]["alpha"] for events in runs]
    assert rates[0] == 1.0 and 0.25 < rates[1] < 0.85 and rates[2] < 0.03
    assert len({text_of(events, "speculative") for events in runs}) == 1
    taus = [events[-1]["figures"]["tau"] for events in runs]
    assert taus[0] == pytest.approx(5, abs=0.5) and taus[2] < 1.1


def test_the_lane_with_the_smaller_clock_runs_next(track: Track) -> None:
    events = [event for event in run(track, WANTED) if event["type"] == "round"]
    clocks = {"plain": 0.0, "speculative": 0.0}
    ended: set[str] = set()
    for event in events:
        others = [clock for lane, clock in clocks.items() if lane not in ended]
        assert clocks[event["lane"]] == min(others)
        assert event["clock"] > clocks[event["lane"]]
        clocks[event["lane"]] = event["clock"]
        if event["finish_reason"]:
            ended.add(event["lane"])
    assert ended == {"plain", "speculative"}


class Recorder:
    """Random numbers of a verifier; keeps the probabilities that it drew with."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.chances, self.last = inner, torch.empty(0), torch.empty(0)

    def bernoulli(self, chances: Tensor) -> Tensor:
        self.chances = chances[0]
        return self._inner.bernoulli(chances)

    def categorical(self, probs: Tensor) -> Tensor:
        self.last = probs[0]
        return self._inner.categorical(probs)


def loaded(folders: dict[str, str], **options: Any) -> Track:
    """Return a track with a draft that differs from the target."""
    track = Track(LLM(folders["target"], method="plain", max_batch=2, compile="never", **options), ["draft"], folders["draft"])
    for weight in track._engines["draft"].proposer.inner.draft.model.parameters():  # type: ignore[attr-defined]
        weight.mul_(0.6)
    return track


def test_the_page_shows_the_probabilities_that_the_verifier_drew_with(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, drawn = RejectionVerifier.verify, list[Recorder]()

    def recorded(self: RejectionVerifier, proposal: Proposal, target: Tensor, random: Any) -> Verdict:
        drawn.append(Recorder(random))
        return verify(self, proposal, target, drawn[-1])

    track = loaded(folders, verifier="rejection")
    monkeypatch.setattr(RejectionVerifier, "verify", recorded)
    rounds = [event for event in run(track, but(temperature=1.0)) if event["type"] == "round"]
    seen = Counter[str]()
    for round_, drew in zip(rounds, drawn, strict=True):
        for depth, token in enumerate(round_["tokens"]):
            place = token["place"]
            seen[token["origin"]] += 1
            assert token["name"] == place["tokens"][place["row"]] and place["odds"] is None
            assert 0 < sum(place["target"]) <= 1.001
            if token["origin"] in ("bonus", "plain"):
                assert place["draft"] is None and place["residual"] is None
                continue
            (guess,) = place["guesses"]
            assert guess["chance"] == pytest.approx(float(drew.chances[depth]), abs=1e-4)
            assert guess["accepted"] == (token["origin"] == "accepted")
            if token["origin"] == "corrected":
                most, row = max(place["residual"]), place["residual"].index(max(place["residual"]))
                assert most == pytest.approx(float(drew.last.max()), abs=1e-4)
                assert track._names.text(int(drew.last.argmax())) == place["tokens"][row]
                assert place["residual"][place["row"]] > 0
    assert seen["accepted"] and seen["corrected"]


@pytest.mark.parametrize("options", [{}, {"verifier": "rejection", "same_text": True}], ids=["block", "same-text"])
def test_drafts_that_are_not_verified_one_by_one_have_no_chances_and_no_residual(
    folders: dict[str, str], options: dict[str, Any]
) -> None:
    events = run(loaded(folders, **options), but(temperature=1.0, accuracy=0.5))
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
    dropped = []
    for round_ in rounds_of(run(track, but(accuracy=0.0)), "speculative"):
        guesses = round_["tokens"][-1]["place"]["guesses"]
        assert not any(guess["accepted"] for guess in guesses)
        dropped.append(len(round_["dropped"]) if guesses else 0)
    assert max(dropped) == 3


def test_invalid_requests_are_refused(track: Track, folders: dict[str, str]) -> None:
    with pytest.raises(OutriderError, match="unknown method 'magic': available are draft, ngram"):
        track.encode(but(method="magic"))
    with pytest.raises(OutriderError, match="with max_tokens=60"):
        track.encode(but(prompt="x y z " * 400))
    llm = LLM(folders["target"], method="plain", max_batch=2, compile="never")
    with pytest.raises(OutriderError, match="none of the methods medusa fits"):
        Track(llm, ["medusa"], folders["draft"])


def test_figures_do_not_change_the_statistics() -> None:
    stats, plain = GenerationStats(), GenerationStats(num_steps=3, num_tokens=3)
    before = asdict(stats)
    race.figures(stats, plain)
    assert asdict(stats) == before


def test_a_lossy_verifier_is_reported_once_not_for_every_visitor(
    folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    track = loaded(folders, verifier="typical")
    caplog.clear()
    with serving(Demo(track, {})) as server:
        assert server.ask("GET", "/api/about").json()["lossless"] is False
    assert "lossy" not in caplog.text
