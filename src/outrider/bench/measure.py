"""Generate outputs and record their times: total, by phase, and of each arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.bench.loops import loop_start
from outrider.engine.stats import GenerationStats
from outrider.types import OutriderError, Round, SamplingParams

if TYPE_CHECKING:
    from outrider.bench.contenders import Contender, Contenders
    from outrider.engine.outputs import Chunk


@dataclass(frozen=True, slots=True)
class Arrival:
    """One arrival of tokens of one prompt in a batch."""

    seconds: float  # since the start of the batch
    prompt: int
    num_tokens: int  # tokens of that prompt so far
    num_rounds: int  # decoding rounds of the batch so far


@dataclass(frozen=True)
class Batch:
    """Measurements of one batch of prompts, from its start to its last token."""

    num_tokens: int
    seconds: float  # prefill included
    first_tokens: int = 0  # tokens emitted until every prompt had its first tokens (long prompts are prefilled in chunks)
    first_seconds: float = 0.0  # seconds until every prompt had its first tokens
    plain_seconds: float | None = None  # predicted seconds of plain decoding
    waits: tuple[float, ...] = ()  # per prompt: seconds until its first tokens
    arrivals: tuple[Arrival, ...] = ()  # in order of time
    rounds: tuple[Round, ...] = ()  # decoding rounds

    def before(self, ends: Sequence[int]) -> Batch:
        """Return the batch up to the last round after which no prompt has more tokens than given in ``ends``."""
        beyond = [each.num_rounds for each in self.arrivals if each.num_tokens > ends[each.prompt]]
        num_rounds = min(beyond, default=len(self.rounds) + 1) - 1
        if num_rounds < 1:  # no decoding round before that point
            return Batch(0, 0.0)
        kept = [each for each in self.arrivals if each.num_rounds <= num_rounds]
        num_tokens = {each.prompt: each.num_tokens for each in kept}
        seconds = max(each.seconds for each in kept)
        return Batch(sum(num_tokens.values()), seconds, self.first_tokens, self.first_seconds, rounds=self.rounds[:num_rounds])


@dataclass
class Run:
    """A contender's generations for a list of prompts."""

    token_ids: list[list[int]] = field(default_factory=list)  # per prompt
    batches: list[Batch] = field(default_factory=list)
    pauses: list[tuple[float, int]] = field(default_factory=list)  # (seconds before tokens, tokens that arrived together)
    faults: int = 0

    @property
    def rounds(self) -> list[Round]:
        """Return the decoding rounds of all batches."""
        return [round_ for batch in self.batches for round_ in batch.rounds]

    @property
    def stats(self) -> GenerationStats:
        """Return the counts and phase times of the decoding rounds, as if no stop had cut their tokens."""
        stats = GenerationStats()
        for round_ in self.rounds:
            for num_drafts, reached, accepted in zip(round_.num_drafts, round_.num_reached, round_.num_accepted, strict=True):
                stats.add_counts(num_drafts, reached, accepted, num_emitted=accepted + 1)
            stats.add_times(round_, emitted_per_request=0.0, plain=None)
        return stats

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def seconds(self) -> float:
        """Return the total seconds, prefill included."""
        return sum(batch.seconds for batch in self.batches)

    @property
    def first_seconds(self) -> float:
        """Return seconds until every prompt of each batch had its first tokens."""
        return sum(batch.first_seconds for batch in self.batches)

    @property
    def tok_s(self) -> float:
        """Return tokens / seconds, prefill included."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Return tokens per second after the first tokens; 0 if there were none."""
        seconds = self.seconds - self.first_seconds
        return (self.num_tokens - sum(batch.first_tokens for batch in self.batches)) / seconds if seconds > 0 else 0.0

    @property
    def predicted_plain_tok_s(self) -> float | None:
        """Return the predicted plain speed from the engine's costs; None if unknown."""
        seconds = [batch.plain_seconds for batch in self.batches]
        known = [each for each in seconds if each]
        return self.num_tokens / sum(known) if known and len(known) == len(seconds) else None

    def acceptance_counts(self) -> list[tuple[int, int]]:
        """Return the accepted and the reached drafts by position, up to the last one that was reached."""
        accepted = [depth for round_ in self.rounds for depth in round_.num_accepted]
        reached = [depth for round_ in self.rounds for depth in round_.num_reached]
        places = range(max(reached, default=0))
        return [(sum(depth > place for depth in accepted), sum(depth > place for depth in reached)) for place in places]

    @property
    def ms(self) -> dict[str, float]:
        """Return mean milliseconds per decoding round of the batch by phase; ``host`` is the rest of the wall-clock time."""
        stats, seconds = self.stats, self.seconds - self.first_seconds
        ms = stats.ms_per_round
        return ms | {"host": max(1e3 * seconds / max(stats.num_steps, 1) - ms["draft"] - ms["score"] - ms["verify"], 0.0)}

    def batches_before_loops(self) -> list[Batch]:
        """Return the batches, each cut before the first loop in any of its outputs."""
        texts = iter(self.token_ids)
        return [batch.before([loop_start(text) for text in islice(texts, len(batch.waits))]) for batch in self.batches]


def generate(
    contenders: Contenders,
    contender: Contender,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    batch: int,
    run: Run | None = None,
) -> Run:
    """Generate outputs for all prompts in batches of ``batch`` and measure them.

    ``params``: common to all prompts, or one per prompt; ``run``: earlier result of the contender, to which this one is added.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    run = run or Run()
    with contenders.active(contender) as rounds:
        faults = contenders.llm.engine.stats.faults
        for at in range(0, len(prompts), batch):
            part = list(prompts[at : at + batch])
            with closing(contenders.llm.stream(part, each[at : at + batch])) as stream:
                _generate_batch(stream, len(part), run, rounds)
        run.faults += contenders.llm.engine.stats.faults - faults
    return run


def _generate_batch(chunks: Iterator[Chunk], num_prompts: int, run: Run, rounds: list[Round]) -> None:
    """Generate one batch and add it to ``run``. ``rounds``: the list to which its decoding rounds are added.

    Raises ``OutriderError`` if the target fails.
    """
    outputs: list[list[int]] = [[] for _ in range(num_prompts)]
    plain: list[float | None] = []
    arrivals: list[Arrival] = []
    rounds.clear()
    started = perf_counter()
    for chunk in chunks:
        seconds, output = perf_counter() - started, outputs[chunk.prompt_index]
        if chunk.finish_reason == "error":
            raise OutriderError(chunk.error or "the target failed")
        output += chunk.token_ids
        arrivals.append(Arrival(seconds, chunk.prompt_index, len(output), len(rounds)))
        if chunk.finish_reason is not None:
            plain.append(chunk.stats.plain_seconds)
    seconds = perf_counter() - started
    # The time of a batch is that of its longest request.
    plain_seconds = max((each for each in plain if each is not None), default=None) if None not in plain else None
    run.token_ids += outputs
    run.pauses += pauses(arrivals)
    run.batches.append(batch_of(arrivals, rounds, seconds, plain_seconds))


def pauses(arrivals: Sequence[Arrival]) -> list[tuple[float, int]]:
    """Return the seconds before each later arrival of a prompt, and the number of tokens that arrived."""
    found: list[tuple[float, int]] = []
    latest: dict[int, Arrival] = {}
    for each in arrivals:
        before = latest.get(each.prompt)
        if before is not None and each.num_tokens > before.num_tokens:
            found.append((each.seconds - before.seconds, each.num_tokens - before.num_tokens))
        latest[each.prompt] = each
    return found


def batch_of(arrivals: Sequence[Arrival], rounds: Sequence[Round], seconds: float, plain_seconds: float | None) -> Batch:
    """Return the measurements of a batch. Decoding starts after the round in which the last prompt got its first tokens.

    Arrivals of one round may be in any order.
    """
    firsts = {each.prompt: each for each in reversed(arrivals)}
    num_before = max((each.num_rounds for each in firsts.values()), default=0)
    num_tokens = {each.prompt: each.num_tokens for each in arrivals}
    first_tokens = {each.prompt: each.num_tokens for each in arrivals if each.num_rounds <= num_before}
    waits = tuple(firsts[prompt].seconds for prompt in sorted(firsts))
    return Batch(
        sum(num_tokens.values()),
        seconds,
        sum(first_tokens.values()),
        max(waits, default=0.0),
        plain_seconds,
        waits,
        tuple(replace(each, num_rounds=max(each.num_rounds - num_before, 0)) for each in arrivals),
        tuple(rounds[num_before:]),
    )
