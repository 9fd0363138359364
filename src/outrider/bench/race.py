"""Plain and speculative decoding of one prompt on one machine: the lanes take turns, each by its own clock.

The lane whose clock is behind runs next, and a clock counts the seconds of its own lane's rounds alone. So both are real runs
of the engine, and neither takes processor time from the other; what remains is that each finds the processor's caches as the
other left them, once a turn.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outrider.engine import Emission, Engine, GenerationStats, LengthPolicy, Observation, Scheduler
from outrider.engine.config import build_verifiers, eos_token_ids
from outrider.engine.detokenizer import DetokenizerFactory
from outrider.types import OutriderError, Request, Round, SamplingParams

if TYPE_CHECKING:
    from outrider.engine import LLM
    from outrider.proposers.base import Proposer


def engine_for(llm: LLM, proposer: Proposer, policy: LengthPolicy) -> Engine:
    """Return an engine of its own for ``proposer`` over the target of ``llm``, for one request at a time.

    A race needs one per lane, and an ``llm`` with room for as many requests.
    """
    runner, tokenizer = llm.runner, llm.tokenizer
    make_detokenizer = DetokenizerFactory(tokenizer) if tokenizer is not None else None
    scheduler = Scheduler(1, runner.max_len, sorted(eos_token_ids(runner, tokenizer)), make_detokenizer)
    asked = llm.speculation
    return Engine(
        runner, proposer, build_verifiers(asked), policy, scheduler, asked.same_text, grammar_drafts=asked.grammar_drafts
    )


@dataclass
class Lane:
    """One run of an engine with its own clock."""

    name: str
    engine: Engine
    request: Request
    clock: float = 0.0  # seconds of this lane's rounds
    first_seconds: float = 0.0  # of them, until its first tokens
    stats: GenerationStats = field(default_factory=GenerationStats)  # after its first round, which reads the prompt
    finish_reason: str | None = None

    @property
    def output(self) -> list[int]:
        return self.request.token_ids[self.request.num_prompt_tokens :]

    def step(self) -> tuple[Emission, Observation | None]:
        """Run one round."""
        seen: list[Observation] = []
        engine = self.engine
        engine.observer = seen.append
        emissions = engine.step()
        while not emissions:  # a long prompt is read in parts
            emissions = engine.step()
        (emission,) = emissions
        self.finish_reason = emission.finish_reason
        if not seen:  # the target failed
            return emission, None
        self.clock += seen[0].round.times.total
        if seen[0].is_prefill:
            self.first_seconds = self.clock
        else:
            self._count(seen[0].round, len(emission.token_ids))
        return emission, seen[0]

    def _count(self, round_: Round, num_tokens: int) -> None:
        stats = self.stats
        stats.count(round_.lens[0], round_.num_judged[0], round_.num_accepted[0], num_tokens)
        stats.times.add(round_.times)
        stats.num_steps += 1
        stats.num_draft_steps += round_.depths[0]

    def leave(self) -> None:
        """Free the request's cache, however the race ended."""
        self.engine.observer = None
        self.engine.abort(self.request.request_id)


@dataclass(frozen=True)
class Step:
    """One round of one lane."""

    lane: Lane
    emission: Emission
    seen: Observation


class Race:
    """Two lanes from the same prompt with the same settings and the same seed."""

    def __init__(self, engines: Mapping[str, Engine], prompt: Sequence[int], params: SamplingParams, turn: float = 0.0) -> None:
        """``engines``: one per lane, by name, plain first. ``turn``: seconds that a lane gains before the other's turn."""
        seed = params.seed or 0
        self.turn = turn
        self.lanes = []
        for name, engine in engines.items():
            generator = torch.Generator().manual_seed(seed)
            request = Request(f"race-{name}", list(prompt), len(prompt), params, seed, generator)
            self.lanes.append(Lane(name, engine, request))

    def run(self) -> Generator[Step, None, None]:
        """Yield every round as it ends. Closing the iterator ends the race; so does ``stop``.

        Raises ``OutriderError`` for a prompt that leaves no room, and where the target fails.
        """
        try:
            for lane in self.lanes:
                lane.engine.add(lane.request)
            while running := [lane for lane in self.lanes if lane.finish_reason is None]:
                lane = min(running, key=lambda lane: lane.clock)
                until = min([other.clock for other in running if other is not lane], default=lane.clock) + self.turn
                yield self._step(lane)
                while lane.finish_reason is None and lane.clock < until:
                    yield self._step(lane)
        finally:
            for lane in self.lanes:
                lane.leave()

    def stop(self, reason: str) -> None:
        """End every lane that still runs, before its next round."""
        for lane in self.lanes:
            lane.finish_reason = lane.finish_reason or reason

    @staticmethod
    def _step(lane: Lane) -> Step:
        emission, seen = lane.step()
        if emission.finish_reason == "error" or seen is None:
            raise OutriderError(emission.error or "the target failed")
        return Step(lane, emission, seen)

    @property
    def first_difference(self) -> int | None:
        """The first position at which the lanes' tokens differ, where both have one; None if they are equal up to there."""
        pairs = zip(*(lane.output for lane in self.lanes), strict=False)
        return next((at for at, (first, second) in enumerate(pairs) if first != second), None)
