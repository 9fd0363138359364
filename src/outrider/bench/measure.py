"""One timed generation: what came out, how long it took, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.engine import Round
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.bench.contenders import Contender, Contenders
    from outrider.engine import Chunk

PHASES = ("draft", "score", "verify", "host")


@dataclass
class Run:
    """A contender's generations over a list of prompts, added up."""

    token_ids: list[list[int]] = field(default_factory=list)  # of each prompt
    seconds: float = 0.0  # prompts included
    first_seconds: float = 0.0  # until the first tokens of each batch
    first_tokens: int = 0  # that came with them
    histogram: Counter[int] = field(default_factory=Counter)  # {num_accepted: rounds}, of each request
    reached: Counter[int] = field(default_factory=Counter)  # {place: drafts that were reached there}, from 0
    kept: Counter[int] = field(default_factory=Counter)  # {place: drafts that were accepted there}
    num_drafts: int = 0
    num_judged: int = 0  # drafts that were reached
    num_steps: int = 0  # rounds of the whole batch
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    faults: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tok_s(self) -> float:
        """All tokens over the whole time, the prompts' passes included."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first ones over the time after them. 0 where there were none."""
        seconds = self.seconds - self.first_seconds
        return (self.num_tokens - self.first_tokens) / seconds if seconds > 0 else 0.0

    @property
    def num_accepted(self) -> int:
        return sum(accepted * rounds for accepted, rounds in self.histogram.items())

    @property
    def mean_acceptance_length(self) -> float:
        """tau = 1 + accepted / rounds, over decoding rounds."""
        return 1 + self.num_accepted / max(sum(self.histogram.values()), 1)

    def acceptance_by_position(self, num_places: int) -> list[float]:
        """Conditional: the part of the drafts reached in each place that were accepted."""
        return [self.kept[place] / self.reached[place] if self.reached[place] else 0.0 for place in range(num_places)]

    @property
    def acceptance_rate(self) -> float:
        """alpha: accepted drafts over drafts that were reached. 0 where nothing was drafted."""
        return self.num_accepted / self.num_judged if self.num_judged else 0.0

    @property
    def ms(self) -> dict[str, float]:
        """Mean milliseconds of a decoding round of the batch, by phase; ``host`` is everything outside the other three."""
        return {name: 1e3 * seconds / max(self.num_steps, 1) for name, seconds in self.phase_seconds.items()}

    def add_rounds(self, rounds: Sequence[Round], decode_seconds: float) -> None:
        """Adds decoding rounds that together took ``decode_seconds`` on the wall clock."""
        for round_ in rounds:
            for drafted, accepted in zip(round_.lens, round_.num_accepted, strict=True):
                self.histogram[accepted] += 1
                self.reached.update(range(min(accepted + 1, drafted)))
                self.kept.update(range(accepted))
                self.num_drafts += drafted
                self.num_judged += accepted + 1 if accepted < drafted else drafted
            for name in ("draft", "score", "verify"):
                self.phase_seconds[name] += getattr(round_.times, name)
                decode_seconds -= getattr(round_.times, name)
        self.phase_seconds["host"] += max(decode_seconds, 0.0)
        self.num_steps += len(rounds)


def generate(
    contenders: Contenders,
    contender: Contender,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    batch: int,
    show: Callable[[str], None] | None = None,
) -> Run:
    """Generates for every prompt, ``batch`` at a time, and times it. ``show`` is given the text as it comes."""
    run = Run()
    with contenders.active(contender) as recorder:
        faults = contenders.llm.stats.faults
        for at in range(0, len(prompts), batch):
            part = list(prompts[at : at + batch])
            _generate_batch(contenders.llm.stream(part, params), len(part), run, recorder.rounds, show)
        run.faults = contenders.llm.stats.faults - faults
    return run


def _generate_batch(
    chunks: Iterator[Chunk], num_prompts: int, run: Run, rounds: list[Round], show: Callable[[str], None] | None
) -> None:
    """Reads one batch to its end. Its prompts are read in one step, and what that step takes and brings counts as first."""
    outputs: list[list[int]] = [[] for _ in range(num_prompts)]
    rounds.clear()
    started = first = perf_counter()
    for chunk in chunks:
        if not outputs[chunk.prompt_index]:
            first = perf_counter()
            run.first_tokens += len(chunk.token_ids)
        outputs[chunk.prompt_index] += chunk.token_ids
        if show is not None:
            show(chunk.text)
    ended = perf_counter()
    run.token_ids += outputs
    run.seconds += ended - started
    run.first_seconds += first - started
    run.add_rounds(rounds, ended - first)
