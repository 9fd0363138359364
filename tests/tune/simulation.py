"""A simulated machine, text and drafting method for draft-length policies, without a model or a clock.

Whether a draft is accepted depends on the token's position, so that every policy sees the same text. Times shown to the policy
have noise and outliers; its result is computed without them.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any

from outrider.engine.grammar_drafts import MAX_DRAFTS
from outrider.engine.ledger import NUM_COLD
from outrider.engine.policy import FixedLength, LengthPolicy
from outrider.runner.cost_book import CostBook
from outrider.tune import DraftLengthPolicy
from outrider.types import Context, PhaseTimes, Request, Round, SamplingParams

MAX_K = 15
FIXED = (1, 2, 4, 8, 12)
LENGTHS = (64, 32, 128, 48, 256, 64)  # tokens of consecutive requests
NUM_PROMPT_TOKENS = 120
# An unsteady machine: slowdown at its lower speed, and mean milliseconds at each speed.
SLOW, DWELL = 1.5, 400.0
STEADY = 64  # rounds without drafts until their times are constant
# of a pass: relative deviation; probability of an outlier, and its additional time as a multiple
NOISE, HICCUP_RATE, LINE_SPIKE = 0.05, 0.01, 3.0


@dataclass(frozen=True)
class Machine:
    """Milliseconds of the target's passes and of a method's drafting on a machine."""

    plain: float  # a pass of one row
    row: float  # each further row, a draft's or another request's, relative to ``plain``
    base: float  # drafting, independent of the number of drafts
    step: float  # each draft
    read: float  # each token that the proposer has not processed yet
    outside: float  # verifier and host
    overhead: float = 0.0  # an adaptive policy, per round
    keep: float = 0.0  # an adaptive policy, per round and request that may draft: its hidden states are kept
    crowd: float = 0.0  # growth of a draft step with each further request
    prompt: float = 0.16  # a prompt token, relative to ``plain``
    padded: bool = False  # a pass has as many tokens per request as the request with the most
    unsteady: bool = False  # with two speeds as seen by the policy, because of other processes
    cold: float = 0.0  # relative slowdown of a pass without drafts after one with drafts; half of it in the next one, and so on
    cold_outside: float = 0.0  # relative slowdown of verifier and host in the first such round

    def times(self, lengths: list[int], lens: list[int], behind: int, num_plain: int = STEADY) -> PhaseTimes:
        """Return the times of a round that requested ``lengths`` and scored ``lens``.

        ``num_plain``: rounds since the last draft.
        """
        rows = len(lens) * (1 + max(lens)) if self.padded else len(lens) + sum(lens)
        score, outside = self.plain * (1 + self.row * (rows - 1)), self.outside
        if not any(lengths):
            score *= 1 + self.cold * 0.5**num_plain
            outside *= 1 + (self.cold_outside if num_plain == 0 else 0)
        others = sum(k > 0 for k in lengths) - 1
        draft = (self.base + self.step * max(lengths)) * (1 + self.crowd * others) + self.read * behind if any(lengths) else 0.0
        return PhaseTimes(draft / 1e3, score / 1e3, 0.5 * outside / 1e3, 0.5 * outside / 1e3)


@dataclass(frozen=True)
class Text:
    """Acceptance of one workload: stretches of ``stretch`` tokens alternate in acceptance and in the presence of drafts."""

    rates: tuple[float, ...]  # acceptance of a draft whose predecessors were accepted, for each kind of stretch
    made: tuple[float, ...] = (1.0,)  # probability that there is a draft
    decay: float = 1.0  # factor of the rate per position in the draft
    stretch: int = 48
    longest: int = MAX_K  # the method makes no longer drafts, however many are requested

    def at(self, values: tuple[float, ...], position: int) -> float:
        return values[position // self.stretch % len(values)]


@dataclass(frozen=True)
class Cell:
    """One condition of the grid."""

    machine: Machine
    text: Text
    batch: int = 1
    lengths: tuple[int, ...] = LENGTHS
    seed: int = 0
    temperature: float = 0.0
    forced: tuple[int, ...] = ()  # lengths of stretches of every text by turns: a grammar forces each second one
    others: tuple[Text, ...] = ()  # texts that the requests after the first have by turns, where they have others


class _Row:
    """A request, and the random outcome at each of its tokens."""

    def __init__(self, name: str, slot: int, length: int, luck: random.Random, cell: Cell, text: Text) -> None:
        params = SamplingParams(max_tokens=length, temperature=cell.temperature)
        matcher: Any = object() if cell.forced else None  # the policy asks only whether there is one
        self.request = Request(name, [0] * NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS, params, 0, matcher)
        self.slot, self.length, self.text, self.ends = slot, length, text, [*accumulate(cell.forced)]
        self.accepts = [luck.random() for _ in range(length + 1)]
        self.makes = [luck.random() for _ in range(length + 1)]

    @property
    def left(self) -> int:
        return self.length - self.request.num_output_tokens

    def draft(self, k: int) -> _Drafts:
        """The drafts of a round that asks for k: what is forced, the method's, and what is forced after all of those."""
        text, first = self.text, self.request.num_output_tokens
        run = self._run(first, self.left - 1)
        at = first + run
        wanted = min(k, self.left - run - 1, text.longest)
        if wanted <= 0 or self.makes[at] >= text.at(text.made, at):
            return _Drafts(run, run, 0, 0, 0)
        free = [not self.is_forced(at + i) for i in range(wanted)]
        count = depth = 0
        for is_free in free:
            if is_free and self.accepts[at + count] >= text.at(text.rates, at + count) * text.decay**depth:
                break
            depth += is_free
            count += 1
        tail = self._run(at + wanted, min(MAX_DRAFTS - run - wanted, self.left - run - wanted - 1))
        num_grammar_tokens, num_taken = wanted - sum(free), count - depth
        return _Drafts(
            run + num_grammar_tokens + tail, run + num_taken + (tail if count == wanted else 0), sum(free), depth, wanted
        )

    def is_forced(self, position: int) -> bool:
        return bool(self.ends) and bisect_right(self.ends, position % self.ends[-1]) % 2 == 1

    def _run(self, position: int, most: int) -> int:
        """The number of forced tokens from a position on, at most as many as a round takes."""
        count = 0
        while count < min(most, MAX_DRAFTS) and self.is_forced(position + count):
            count += 1
        return count


@dataclass(frozen=True)
class _Drafts:
    """Of one request in a round: what a grammar forces, scored and accepted, and the method's other drafts."""

    num_grammar_tokens: int
    forced_accepted: int
    num_drafts: int
    num_accepted: int
    reach: int  # the method's drafts, forced ones included

    @property
    def num_emitted(self) -> int:
        return self.forced_accepted + self.num_accepted + 1


def simulate(policy: LengthPolicy, cell: Cell, costs: CostBook | None = None) -> float:
    """Return the tokens per second over all requests of the cell.

    Batches run one after another, and each shrinks as its requests end. If requests have different texts, an ended request is
    replaced by the next one of its text, as in a server, up to the same number of tokens: otherwise the slowest request would
    determine the duration.
    """
    noise, luck = random.Random(cell.seed + 1), random.Random(cell.seed)
    texts, wanted = (cell.text, *cell.others), sum(cell.lengths) * cell.batch
    lengths = [cycle(cell.lengths) for _ in range(cell.batch)]
    rows: list[_Row] = []
    requests: tuple[Request, ...] = ()
    seen: dict[_Row, int] = {}
    seconds, num_tokens, number, num_plain, slowness = 0.0, 0, 0, STEADY, 1.0
    while num_tokens < wanted:
        fresh = [b for b in range(cell.batch) if b not in {row.slot for row in rows}]
        if fresh and (cell.others or not rows):
            number += 1
            rows += [_Row(f"{number}.{b}", b, next(lengths[b]), luck, cell, texts[b % len(texts)]) for b in fresh]
            requests = tuple(row.request for row in rows)
        else:
            fresh = []
        context = Context(requests, tuple(row.left - 1 for row in rows), None)  # type: ignore[arg-type]
        asked_lengths = policy.next_lengths(context)
        drafts = [row.draft(k) for row, k in zip(rows, asked_lengths, strict=True)]
        lens = [each.num_grammar_tokens + each.num_drafts for each in drafts]
        requested = context.limited(asked_lengths)
        drafted_for = [row for row, limit in zip(rows, requested.limits, strict=True) if limit > 0]
        behind = sum(len(row.request.token_ids) - seen.get(row, 0) for row in drafted_for)
        times = cell.machine.times(asked_lengths, lens, behind, num_plain)
        times.host += cell.machine.keep / 1e3 * sum(row.request.may_draft for row in rows) if costs is not None else 0.0
        num_plain = 0 if any(asked_lengths) else num_plain + 1
        is_cold = cell.machine.cold > 0 and 0 < num_plain <= NUM_COLD
        seconds += times.total + (cell.machine.overhead / 1e3 if costs is not None else 0.0)
        if fresh:
            prompt = cell.machine.prompt * cell.machine.plain * NUM_PROMPT_TOKENS * len(fresh) / 1e3
            times.score += prompt
            seconds += prompt
        if cell.machine.unsteady and noise.random() < times.total * 1e3 / DWELL:
            slowness = SLOW + 1 - slowness
        times = _as_measured(times, slowness, noise)
        for row, each in zip(rows, drafts, strict=True):
            num_tokens += each.num_emitted
            row.request.token_ids.extend([0] * each.num_emitted)
            if row in drafted_for:
                seen[row] = len(row.request.token_ids)
        if costs is not None and not fresh:
            outside = times.verify + times.host
            costs.record_round(lens, NUM_PROMPT_TOKENS, times.score, outside, cell.temperature == 0, is_cold=is_cold)
        policy.observe(requested, _round(max(asked_lengths), drafts, times, is_cold, bool(fresh)))
        ended = [row.request.request_id for row in rows if row.left <= 0]
        if ended:
            policy.release(ended)
            rows = [row for row in rows if row.left > 0]
            requests = tuple(row.request for row in rows)
    return num_tokens / seconds


def _round(k: int, drafts: Sequence[_Drafts], times: PhaseTimes, is_cold: bool, is_prefill: bool) -> Round:
    accepted, depths = [each.num_accepted for each in drafts], [each.num_drafts for each in drafts]
    forced, reaches = [each.num_grammar_tokens for each in drafts], [each.reach for each in drafts]
    lens = [more + depth for more, depth in zip(forced, depths, strict=True)]
    judged = [min(taken + 1, depth) for taken, depth in zip(accepted, depths, strict=True)]
    return Round(k, lens, depths, reaches, accepted, judged, times, is_cold=is_cold, num_grammar=forced, is_prefill=is_prefill)


def _as_measured(times: PhaseTimes, slowness: float, noise: random.Random) -> PhaseTimes:
    times = PhaseTimes(*(slowness * phase for phase in times.by_phase().values()))
    times.score *= noise.gauss(1, NOISE) + (LINE_SPIKE if noise.random() < HICCUP_RATE else 0)
    times.draft *= noise.gauss(1, NOISE) + (LINE_SPIKE if noise.random() < HICCUP_RATE else 0)
    return times


def automatic(cell: Cell) -> float:
    """Return the tokens per second of a new policy."""
    costs = CostBook(cell.machine.padded)
    return simulate(DraftLengthPolicy(MAX_K, costs), cell, costs)


def plain(cell: Cell) -> float:
    return simulate(FixedLength(0), cell)


def best_fixed(cell: Cell) -> float:
    """Return the tokens per second of the best fixed K, including 0."""
    return max(simulate(FixedLength(k), cell) for k in (0, *FIXED))


def weigh(cell: Cell) -> tuple[float, float]:
    """Return (auto / plain, auto / best fixed K)."""
    auto, without = automatic(cell), plain(cell)
    return auto / without, auto / max(without, *(simulate(FixedLength(k), cell) for k in FIXED))


class Recorded:
    """Records the requests of another policy.

    ``slow``: additional seconds shown for a phase of the ``slow_at``-th round with drafts, counted from 1.
    ``cold``: rounds with drafts, and the factor of the times of drafting and host shown for them.
    """

    def __init__(
        self,
        inner: LengthPolicy,
        slow: float = 0.0,
        phase: str = "draft",
        slow_at: int = 1,
        cold: tuple[int, float] = (0, 1.0),
    ) -> None:
        self.inner, self.slow, self.phase, self.left = inner, slow, phase, slow_at
        self.num_cold, self.factor = cold
        self.requested: list[int] = []  # the maximum over requests
        self.lengths: list[list[int]] = []
        self.starts: list[int] = []  # rounds in which a prompt was prefilled
        self.may_draft: dict[Request, bool] = {}

    def next_lengths(self, context: Context) -> list[int]:
        self.lengths.append(self.inner.next_lengths(context))
        self.requested.append(max(self.lengths[-1]))
        self.may_draft |= {request: request.may_draft for request in context.requests}
        return self.lengths[-1]

    def observe(self, context: Context, round_: Round) -> None:
        if round_.is_prefill:
            self.starts.append(len(self.requested) - 1)
        self.left -= round_.k > 0
        if round_.k and self.left == 0:
            setattr(round_.times, self.phase, getattr(round_.times, self.phase) + self.slow)
        if round_.k and self.num_cold > 0:
            self.num_cold -= 1
            round_.times.draft *= self.factor
            round_.times.host *= self.factor
        self.inner.observe(context, round_)

    def release(self, request_ids: Sequence[str]) -> None:
        self.inner.release(request_ids)
