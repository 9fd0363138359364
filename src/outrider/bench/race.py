"""Run plain and speculative decoding of one prompt in turns on one machine, each with its own clock.

The lane with the smaller clock runs next, and a clock counts only the rounds of its own lane. So both are real runs of the
engine, and neither takes processor time from the other. The only interaction is that each turn starts with the processor's
caches as the other lane left them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.engine.config import build_engine, build_scheduler
from outrider.engine.engine import Engine
from outrider.engine.outputs import Emission
from outrider.engine.policy import LengthPolicy
from outrider.engine.round import RoundResult
from outrider.engine.stats import GenerationStats
from outrider.types import OutriderError, Request, Round, SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.proposers.base import Proposer


def engine_for(llm: LLM, proposer: Proposer, policy: LengthPolicy) -> Engine:
    """Return a separate engine for ``proposer`` that shares the target of ``llm``, for one request at a time.

    A race needs one engine per lane, and an ``llm`` with a batch of at least the number of lanes.
    """
    return build_engine(llm.speculation, llm.runner, proposer, policy, build_scheduler(llm.runner, llm.tokenizer, max_batch=1))


@dataclass
class Lane:
    """One run of an engine with its own clock."""

    name: str
    engine: Engine
    request: Request
    clock: float = 0.0  # seconds of this lane's rounds
    first_seconds: float = 0.0  # clock at its first tokens
    stats: GenerationStats = field(default_factory=GenerationStats)  # without the first round, which includes the prefill
    finish_reason: str | None = None

    @property
    def output(self) -> list[int]:
        return self.request.token_ids[self.request.num_prompt_tokens :]

    def step(self) -> Step:
        """Run one round. Raises ``OutriderError`` if the target fails."""
        seen: list[tuple[RoundResult, Round]] = []
        engine = self.engine
        engine.observer = lambda result, round_: seen.append((result, round_))
        emissions = engine.step()
        while not emissions:  # a long prompt is prefilled in chunks
            emissions = engine.step()
        (emission,) = emissions
        self.finish_reason = emission.finish_reason
        if emission.finish_reason == "error" or not seen:
            raise OutriderError(emission.error or "the target failed")
        result, round_ = seen[0]
        self.clock += round_.times.total
        if round_.is_prefill:
            self.first_seconds = self.clock
        else:
            num_tokens = len(emission.token_ids)
            self.stats.add_counts(round_.num_drafts[0], round_.num_reached[0], round_.num_accepted[0], num_tokens)
            self.stats.add_times(round_, num_tokens, None)
        return Step(self, emission, result, round_)

    def leave(self) -> None:
        """Free the request's cache."""
        self.engine.observer = None
        self.engine.abort(self.request.request_id)


@dataclass(frozen=True)
class Step:
    """One round of one lane."""

    lane: Lane
    emission: Emission
    result: RoundResult
    round: Round


class Race:
    """Two lanes with the same prompt, settings and seed."""

    def __init__(self, engines: Mapping[str, Engine], prompt: Sequence[int], params: SamplingParams, turn: float = 0.0) -> None:
        """``engines``: lane -> engine, plain first; ``turn``: minimum seconds per turn of a lane."""
        seed = params.seed or 0
        self.turn = turn
        self.lanes = []
        for name, engine in engines.items():
            request = Request(f"race-{name}", list(prompt), len(prompt), params, seed)
            self.lanes.append(Lane(name, engine, request))

    def run(self) -> Generator[Step, None, None]:
        """Yield every round when it ends. Closing the iterator or ``stop`` ends the race.

        Raises ``OutriderError`` if the prompt fills the context, or if the target fails.
        """
        try:
            for lane in self.lanes:
                lane.engine.add(lane.request)
            while running := [lane for lane in self.lanes if lane.finish_reason is None]:
                lane = min(running, key=lambda lane: lane.clock)
                until = min([other.clock for other in running if other is not lane], default=lane.clock) + self.turn
                yield lane.step()
                while lane.finish_reason is None and lane.clock < until:
                    yield lane.step()
        finally:
            for lane in self.lanes:
                lane.leave()

    def stop(self, reason: str) -> None:
        """End all running lanes before their next round."""
        for lane in self.lanes:
            lane.finish_reason = lane.finish_reason or reason

    @property
    def first_difference(self) -> int | None:
        """Return ``first_difference`` of the outputs, as far as both lanes ran: a race may be stopped."""
        one, other = (lane.output for lane in self.lanes)
        return first_difference(one[: len(other)], other[: len(one)])


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first position at which two token sequences differ, the shorter length if one is a prefix; None if equal."""
    shorter = min(len(first), len(second))
    at = next((at for at in range(shorter) if first[at] != second[at]), shorter)
    return None if at == len(first) == len(second) else at
