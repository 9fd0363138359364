"""A race of plain and speculative decoding on one machine: the lanes take turns, round by round, each by its own clock.

Whoever's clock is behind runs next, and a clock counts the seconds of its lane's own rounds alone. So both are real runs of the
engine, neither slows the other down but by what it leaves in the processor's caches, and a page can play them side by side.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter

import torch

from outrider.engine import Emission, Engine, Observation
from outrider.engine.stats import expected_speedup
from outrider.server.demo.distributions import Place, places, verdict_path
from outrider.server.demo.race_request import Event
from outrider.server.demo.token_texts import TokenTexts
from outrider.types import OutriderError, Request, SamplingParams

SLICE = 0.05  # seconds of rounds between two looks at whether the visitor is still there
PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass
class Tally:
    """What a lane has done after its first round, which reads the prompt: counts and seconds, as docs/glossary.md has them."""

    rounds: int = 0
    tokens: int = 0
    accepted: int = 0
    judged: int = 0
    seconds: float = 0.0
    score_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_steps: int = 0

    def add(self, seen: Observation, num_tokens: int) -> None:
        round_ = seen.round
        accepted, depth = round_.num_accepted[0], round_.depths[0]
        self.rounds += 1
        self.tokens += num_tokens
        self.accepted += accepted
        self.judged += accepted + (_is_rejected(seen) if depth else 0)
        self.seconds += round_.times.total
        self.score_seconds += round_.times.score
        self.draft_seconds += round_.times.draft
        self.draft_steps += depth

    @property
    def tok_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @property
    def alpha(self) -> float | None:
        """Accepted drafts over steps of depth that were reached."""
        return self.accepted / self.judged if self.judged else None

    def figures(self, plain: Tally) -> dict[str, float | None]:
        """Measured rates, and what the formula makes of them with the other lane's passes as the price of one."""
        cost_ratio = None
        if self.draft_steps and plain.score_seconds:
            cost_ratio = (self.draft_seconds / self.draft_steps) / (plain.score_seconds / plain.rounds)
        mean_k = self.draft_steps / self.rounds if self.rounds else 0.0
        expected = None
        if cost_ratio is not None and self.alpha is not None:
            expected = expected_speedup(self.alpha, mean_k, cost_ratio)
        speedup = self.tok_s / plain.tok_s if self.tok_s and plain.tok_s else None
        return {
            "tok_s": self.tok_s,
            "tau": 1 + self.accepted / self.rounds if self.rounds else None,
            "alpha": self.alpha,
            "mean_k": mean_k,
            "cost_ratio": cost_ratio,
            "expected": expected,
            "speedup": speedup,
        }


def _is_rejected(seen: Observation) -> bool:
    """Whether a draft was tried behind the accepted path, and failed."""
    path = verdict_path(seen)
    last = path[-1] if path else -1
    count = int(seen.proposal.lens[0])
    parents = seen.proposal.parents
    return last + 1 < count if parents is None else last in parents[0, :count].tolist()


@dataclass
class Lane:
    """One run of the engine with its own clock."""

    name: str
    engine: Engine
    request: Request
    clock: float = 0.0  # seconds of this lane's rounds
    tally: Tally = field(default_factory=Tally)
    finish_reason: str | None = None

    @property
    def output(self) -> list[int]:
        return self.request.token_ids[self.request.num_prompt_tokens :]

    def step(self) -> tuple[Emission, Observation | None]:
        """One round. The target's runner is shared by the lanes, and each tells it what its proposer wants to see."""
        seen: list[Observation] = []
        engine = self.engine
        engine.runner.needs_hidden = engine.proposer.needs_hidden
        engine.observer = seen.append
        emissions = engine.step()
        while not emissions:  # a long prompt is read in parts
            emissions = engine.step()
        (emission,) = emissions
        self.finish_reason = emission.finish_reason
        if not seen:  # the target failed
            return emission, None
        self.clock += seen[0].round.times.total
        if not seen[0].is_prefill:
            self.tally.add(seen[0], len(emission.token_ids))
        return emission, seen[0]

    def leave(self) -> None:
        """Frees the request's cache, however the race ended."""
        self.engine.observer = None
        self.engine.abort(self.request.request_id)


class Race:
    """Both lanes, from the same prompt with the same settings and the same seed."""

    def __init__(self, lanes: Mapping[str, Engine], prompt: Sequence[int], params: SamplingParams, texts: TokenTexts) -> None:
        """``lanes``: the engine of each, plain first."""
        seed = params.seed or 0
        self.lanes = []
        for name, engine in lanes.items():
            generator = torch.Generator().manual_seed(seed)
            request = Request(f"race-{name}", list(prompt), len(prompt), params, seed, generator)
            self.lanes.append(Lane(name, engine, request))
        self._texts = texts

    def run(self, seconds: float) -> Generator[list[Event], None, None]:
        """The race's events, in slices. Closing the iterator ends it; so does its time, both lanes together.

        Raises ``OutriderError`` for a prompt that leaves no room, and where the target fails.
        """
        started, pending = perf_counter(), [self._started()]
        last = started
        try:
            for lane in self.lanes:
                lane.engine.add(lane.request)
            while running := [lane for lane in self.lanes if lane.finish_reason is None]:
                lane = min(running, key=lambda lane: lane.clock)
                emission, seen = lane.step()
                if emission.finish_reason == "error":
                    raise OutriderError(emission.error or "the target failed")
                if seen is not None:
                    pending.append(self._round(lane, emission, seen))
                now = perf_counter()
                if now - started > seconds:
                    for late in running:
                        late.finish_reason = late.finish_reason or "time"
                if now - last > SLICE:
                    yield pending
                    pending, last = [], now
            yield [*pending, self._finished()]
        finally:
            for lane in self.lanes:
                lane.leave()

    def _started(self) -> Event:
        return {"type": "started", "num_prompt_tokens": self.lanes[0].request.num_prompt_tokens}

    def _round(self, lane: Lane, emission: Emission, seen: Observation) -> Event:
        """One round as the page draws it: its tokens, where each came from, and what was drafted in vain."""
        tokens: list[Event] = []
        for token_id, origin, place in zip(emission.token_ids, emission.origins, places(seen, emission.token_ids), strict=True):
            text, name = self._texts.next(lane.name, token_id)
            tokens.append({"text": text, "name": name, "origin": origin, "place": self._place(place, token_id)})
        plain = self.lanes[0].tally
        return {
            "type": "round",
            "lane": lane.name,
            "clock": lane.clock,
            "ms": {name: 1e3 * value for name, value in asdict(seen.round.times).items()},
            "k": seen.round.k,
            "drafted": seen.round.lens[0],
            "accepted": seen.round.num_accepted[0],
            "is_prefill": seen.is_prefill,
            "tokens": tokens,
            "dropped": self._dropped(seen),
            "figures": lane.tally.figures(plain),
            "finish_reason": emission.finish_reason,
        }

    def _dropped(self, seen: Observation) -> list[str]:
        """Drafts of a chain behind the rejected one: nobody looked at them."""
        if seen.proposal.parents is not None:
            return []
        first = seen.round.num_accepted[0] + 1
        return [self._texts.name(token) for token in seen.proposal.token_ids[0, first : int(seen.proposal.lens[0])].tolist()]

    def _place(self, place: Place, token_id: int) -> Event:
        """A place as the page draws it: names of tokens, and indices into them, for two tokens may share a name."""
        name, row_of = self._texts.name, place.token_ids.index
        return {
            "guesses": [
                {
                    "text": name(guess.token_id),
                    "row": row_of(guess.token_id),
                    "chance": round(guess.chance, 4),
                    "accepted": guess.is_accepted,
                }
                for guess in place.guesses
            ],
            "row": row_of(token_id),
            "tokens": [name(token) for token in place.token_ids],
            "target": place.target,
            "draft": place.draft,
            "residual": place.residual,
            "odds": place.odds,
            "is_point_mass": place.is_point_mass,
        }

    def _finished(self) -> Event:
        plain, speculative = (lane.output for lane in self.lanes)
        pairs = zip(plain, speculative, strict=False)
        difference = next((at for at, (first, second) in enumerate(pairs) if first != second), None)
        return {
            "type": "finished",
            "reasons": {lane.name: lane.finish_reason for lane in self.lanes},
            "num_tokens": {lane.name: len(lane.output) for lane in self.lanes},
            "clocks": {lane.name: lane.clock for lane in self.lanes},
            "first_difference": difference,
            "figures": self.lanes[1].tally.figures(self.lanes[0].tally),
            "plain_tok_s": self.lanes[0].tally.tok_s,
        }
