"""What happened: per request and in total. The acceptance histogram is the stored primitive, every rate is derived from it.

This module knows no model and no clock: the engine hands it counts and seconds. Names are those of docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.runner.cost_book import PlainRound
from outrider.types import PhaseTimes, Round


def expected_tau(alpha: float, k: float) -> float:
    """Tokens a round emits if each draft survives with probability alpha: (1 - alpha^(K+1)) / (1 - alpha), Leviathan eq. 1."""
    return k + 1 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def expected_speedup(alpha: float, k: float, cost_ratio: float) -> float:
    """Leviathan et al. 2023, theorem 3.8: tokens of a round over its cost in target passes, K c + 1."""
    return expected_tau(alpha, k) / (k * cost_ratio + 1)


@dataclass(slots=True)
class GenerationStats:
    """Counts of one request, or of everything an engine has done. A request's seconds are those it was part of."""

    acceptance_histogram: dict[int, int] = field(default_factory=dict)  # {num_accepted: rounds}
    num_tokens: int = 0  # emitted, after truncation at a stop
    num_drafts: int = 0  # drafted tokens
    num_drafted_rounds: int = 0  # that had any
    num_judged: int = 0  # steps of depth that were reached: all before them had been accepted
    num_steps: int = 0  # engine steps: a round of each request of the batch
    num_draft_steps: int = 0  # the longest path of each step, summed
    faults: int = 0  # rounds in which the proposer failed
    times: PhaseTimes = field(default_factory=PhaseTimes)
    shared_seconds: float = 0.0  # of rounds that plain decoding would have run just so
    num_replaced: float = 0.0  # rounds that plain decoding would have run instead of those with drafts
    num_priced: float = 0.0  # those of them whose price was known
    priced_seconds: float = 0.0  # and what they would have taken
    pass_seconds: float = 0.0  # plain passes, one a decoding round, for the cost ratio
    num_timed_rounds: int = 0

    def count(self, num_drafts: int, num_judged: int, num_accepted: int, num_emitted: int) -> None:
        """Adds one request's part of a round. ``num_judged``: accepted, and one more where all that came next was rejected."""
        histogram = self.acceptance_histogram
        histogram[num_accepted] = histogram.get(num_accepted, 0) + 1
        self.num_tokens += num_emitted
        self.num_drafts += num_drafts
        self.num_drafted_rounds += num_drafts > 0
        self.num_judged += num_judged

    def clock(self, round_: Round, is_prefill: bool, emitted_per_row: float, plain: PlainRound | None) -> None:
        """Adds one round's seconds. ``plain``: what a decoding round without drafts takes, None if unknown."""
        times = round_.times
        self.times.add(times)
        self.num_steps += 1
        self.num_draft_steps += max(round_.depths, default=0)
        outside = times.verify + times.host
        self.shared_seconds += times.read
        has_drafts = any(round_.lens)
        if is_prefill or not has_drafts:
            self.shared_seconds += times.score + outside
        if not has_drafts:
            return
        num_replaced = emitted_per_row - is_prefill  # the pass over the prompt gives plain decoding a token too
        self.num_replaced += num_replaced
        if plain is None:
            return
        self.num_priced += num_replaced
        self.priced_seconds += num_replaced * (plain.score + (outside if plain.outside is None else plain.outside))
        if not is_prefill:
            self.pass_seconds += plain.score
            self.num_timed_rounds += 1

    @property
    def plain_seconds(self) -> float | None:
        """What the same tokens would have taken without drafts; None where no plain pass was measured."""
        if not self.num_replaced:
            return self.shared_seconds
        if not self.num_priced:
            return None
        return self.shared_seconds + self.num_replaced * self.priced_seconds / self.num_priced

    @property
    def num_rounds(self) -> int:
        return sum(self.acceptance_histogram.values())

    @property
    def num_accepted(self) -> int:
        # From a copy: a server asks for it in another thread than the one that counts.
        return sum(accepted * rounds for accepted, rounds in tuple(self.acceptance_histogram.items()))

    @property
    def mean_acceptance_length(self) -> float:
        """tau = 1 + accepted / rounds: tokens per target pass."""
        return 1 + self.num_accepted / max(self.num_rounds, 1)

    @property
    def acceptance_rate(self) -> float:
        """alpha: accepted drafts over steps of depth that were reached (in a tree: with any draft). 0 without drafts."""
        return self.num_accepted / self.num_judged if self.num_judged else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts over drafted tokens: falls with K, so it is not alpha."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry i: the part of all rounds in which draft i + 1 was accepted."""
        longest = max(self.acceptance_histogram, default=0)
        rounds = max(self.num_rounds, 1)
        return [
            sum(count for accepted, count in self.acceptance_histogram.items() if accepted > i) / rounds for i in range(longest)
        ]

    @property
    def cost_ratio(self) -> float | None:
        """c: seconds of one draft step over seconds of one plain target pass. None where either was never measured."""
        if not self.num_draft_steps or not self.num_timed_rounds:
            return None
        return (self.times.draft / self.num_draft_steps) / (self.pass_seconds / self.num_timed_rounds)

    @property
    def expected_speedup(self) -> float | None:
        """The formula's speedup at the measured alpha, c and mean K: compare it with ``tok_s / plain_tok_s``."""
        ratio = self.cost_ratio
        if ratio is None:
            return None
        return expected_speedup(self.acceptance_rate, self.num_draft_steps / max(self.num_steps, 1), ratio)

    @property
    def tok_s(self) -> float:
        """Emitted tokens per second of rounds, prefill included."""
        return self.num_tokens / self.times.total if self.times.total else 0.0

    @property
    def plain_tok_s(self) -> float | None:
        """The speed that plain decoding would have had on the same tokens, prefill included. None if unknown."""
        seconds = self.plain_seconds
        return self.num_tokens / seconds if seconds else None

    @property
    def ms_per_round(self) -> dict[str, float]:
        """Mean milliseconds of a step (one round of the whole batch) by phase: draft, score, verify, host."""
        steps = max(self.num_steps, 1)
        return {name: 1e3 * getattr(self.times, name) / steps for name in ("draft", "score", "verify", "host")}
