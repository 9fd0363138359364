"""Convert a race (``bench.race``) to events for the page: one per round, with the distributions at every token."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from time import perf_counter
from typing import Any

from outrider.bench.race import Race, Step
from outrider.engine.detokenizer import DetokenizerFactory
from outrider.engine.stats import GenerationStats
from outrider.server.answers import TokenTexts
from outrider.server.demo.distributions import places

Event = dict[str, Any]  # one message to the page, with its kind under "type"
MAX_SECONDS = 120.0  # duration of a race, both lanes together
SLICE = 0.05  # seconds of rounds between two checks that the visitor is connected


def figures(stats: GenerationStats, plain: GenerationStats) -> dict[str, float | None]:
    """Return a lane's acceptance rates, costs relative to a plain pass, and expected speedup. None means unknown."""
    stats = replace(stats, pass_seconds=plain.times.score, num_timed_rounds=plain.num_steps)
    return {
        "tok_s": stats.tok_s or None,
        "tau": stats.mean_acceptance_length if stats.num_rounds else None,
        "alpha": stats.acceptance_rate,
        "mean_k": stats.num_draft_steps / max(stats.num_steps, 1),
        "cost_ratio": stats.cost_ratio,
        "expected": stats.expected_speedup,
        "speedup": stats.tok_s / plain.tok_s if stats.tok_s and plain.tok_s else None,
    }


class ShownRace:
    """A race of two lanes with the same prompt, settings and seed."""

    def __init__(self, race: Race, names: TokenTexts, detokenizers: DetokenizerFactory, has_chances: bool) -> None:
        """``has_chances``: see ``places``."""
        self._race, self._name, self._has_chances, self.lanes = race, names.text, has_chances, race.lanes
        prompt = race.lanes[0].request.token_ids
        self._detokenizers = {lane.name: detokenizers(prompt) for lane in race.lanes}

    def run(self) -> Generator[list[Event], None, None]:
        """Yield lists of events until the race ends, its time limit is reached or the generator is closed.

        Raises ``OutriderError`` if the prompt does not fit into the context, or if the target fails.
        """
        started = perf_counter()
        pending: list[Event] = [{"type": "started"}]
        last = started
        steps = self._race.run()
        try:
            for step in steps:
                pending.append(self._round(step))
                now = perf_counter()
                if now - started > MAX_SECONDS:
                    self._race.stop("time")
                if now - last > SLICE:
                    yield pending
                    pending, last = [], now
            yield [*pending, self._finished()]
        finally:
            steps.close()

    def _round(self, step: Step) -> Event:
        """Return the event of one round: its tokens, their origins, and the rejected drafts."""
        lane, emission = step.lane, step.emission
        shown = places(step.result, emission.token_ids, self._name, self._has_chances)
        tokens = [
            {"text": self._detokenizers[lane.name].feed([id_]), "name": self._name(id_), "origin": origin, "place": place}
            for id_, origin, place in zip(emission.token_ids, emission.origins, shown, strict=True)
        ]
        return {
            "type": "round",
            "lane": lane.name,
            "clock": lane.clock,
            "is_prefill": step.round.is_prefill,
            "tokens": tokens,
            "dropped": self._dropped(step),
            "figures": figures(lane.stats, self.lanes[0].stats),
            "finish_reason": emission.finish_reason,
        }

    def _dropped(self, step: Step) -> list[str]:
        """Return the drafts of a chain after the rejected one, which were not reached."""
        proposal = step.result.proposal
        if proposal.parents is not None:
            return []
        first = step.round.num_accepted[0] + 1
        return [self._name(token) for token in proposal.token_ids[0, first : int(proposal.lens[0])].tolist()]

    def _finished(self) -> Event:
        return {
            "type": "finished",
            "reasons": {lane.name: lane.finish_reason for lane in self.lanes},
            "first_difference": self._race.first_difference,
            "figures": figures(self.lanes[1].stats, self.lanes[0].stats),
            "plain_tok_s": self.lanes[0].stats.tok_s or None,
        }
