"""Statistics per request and in total. Terms are defined in docs/glossary.md."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.runner.cost_book import PlainRound
from outrider.types import PhaseTimes, Round

PHASES = ("draft", "score", "verify", "host")  # of a round


def expected_tau(alpha: float, k: float) -> float:
    """Return the expected tokens per round at acceptance alpha: (1 - alpha^(K+1)) / (1 - alpha), Leviathan eq. 1."""
    return k + 1 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def expected_speedup(alpha: float, k: float, cost_ratio: float) -> float:
    """Return the expected speedup (Leviathan et al. 2023, theorem 3.8): tokens per round over its cost K c + 1."""
    return expected_tau(alpha, k) / (k * cost_ratio + 1)


@dataclass(slots=True)
class GenerationStats:
    """Counts and times of one request or of an engine. A request's times are those of the rounds it was part of."""

    acceptance_histogram: dict[int, int] = field(default_factory=dict)  # {num_accepted: rounds}
    num_cached: int = 0  # prompt tokens whose cache an earlier request left
    num_tokens: int = 0  # emitted tokens, after truncation at a stop
    num_grammar_tokens: int = 0  # accepted drafts of a grammar, forced or guessed; excluded from all counts of drafts
    num_drafts: int = 0  # drafted tokens
    num_drafted_rounds: int = 0  # rounds with drafts
    most_drafts: int = 0  # maximum of drafted tokens in a round
    num_reached: int = 0  # depths that the verifier reached: all drafts before them were accepted
    num_steps: int = 0  # engine steps: one round for each request of the batch
    num_draft_steps: int = 0  # sum over the steps of the longest path that the proposer drafted, forced tokens included
    faults: int = 0  # failures of the proposer, or of the target on drafts; in an engine's total, one per affected request
    times: PhaseTimes = field(default_factory=PhaseTimes)
    shared_seconds: float = 0.0  # seconds that plain decoding would spend too: prefill, and rounds without drafts
    num_replaced: float = 0.0  # plain rounds replaced by rounds with drafts
    num_priced: float = 0.0  # replaced plain rounds whose cost was known at the time
    priced_seconds: float = 0.0  # predicted seconds of these
    pass_seconds: float = 0.0  # predicted seconds of one plain pass per drafted decoding round, for the cost ratio
    num_timed_rounds: int = 0  # rounds counted in pass_seconds

    def add_counts(self, num_drafts: int, num_reached: int, num_accepted: int, num_emitted: int, num_grammar: int = 0) -> None:
        """Add the counts of one request in a round, of emitted tokens except for ``num_drafts``.

        ``num_reached``: accepted drafts, plus one if the next was rejected.
        """
        histogram = self.acceptance_histogram
        histogram[num_accepted] = histogram.get(num_accepted, 0) + 1
        self.num_tokens += num_emitted
        self.num_grammar_tokens += num_grammar
        self.num_drafts += num_drafts
        self.num_drafted_rounds += num_drafts > 0
        self.most_drafts = max(self.most_drafts, num_drafts)
        self.num_reached += num_reached

    def add_times(self, round_: Round, emitted_per_request: float, plain: PlainRound | None) -> None:
        """Add the times of a round. ``plain``: predicted seconds of a plain decoding round, None if unknown."""
        times = round_.times
        self.times.add(times)
        self.num_steps += 1
        self.num_draft_steps += round_.most_proposed
        self.shared_seconds += times.prefill
        if round_.is_prefill or not round_.has_drafts:
            self.shared_seconds += times.score + times.overhead
        if not round_.has_drafts:
            return
        num_replaced = emitted_per_request - round_.is_prefill  # prefill yields a token in plain decoding too
        self.num_replaced += num_replaced
        if plain is None:
            return
        self.num_priced += num_replaced
        self.priced_seconds += num_replaced * (plain.score + (times.overhead if plain.overhead is None else plain.overhead))
        if not round_.is_prefill:
            self.pass_seconds += plain.score
            self.num_timed_rounds += 1

    @property
    def plain_seconds(self) -> float | None:
        """Predict the seconds without drafts; None if no plain pass was measured."""
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
        # Iterate over a copy: the server reads statistics from another thread.
        return sum(accepted * rounds for accepted, rounds in tuple(self.acceptance_histogram.items()))

    @property
    def mean_acceptance_length(self) -> float:
        """Return tau: tokens per target pass, without the drafts of a grammar.

        It is 1 + accepted / rounds, unless a stop cut the tokens of a round.
        """
        return (self.num_tokens - self.num_grammar_tokens) / self.num_rounds if self.num_rounds else 1.0

    @property
    def tokens_per_round(self) -> float:
        """Return the tokens per target pass, including the drafts of a grammar."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Return alpha: accepted drafts / drafts reached (of a tree: depths). None without drafts."""
        return self.num_accepted / self.num_reached if self.num_reached else None

    @property
    def draft_acceptance_rate(self) -> float:
        """Return accepted drafts / drafted tokens. Unlike alpha it decreases with K."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0

    @property
    def cost_ratio(self) -> float | None:
        """Return c: seconds of a draft step / seconds of a plain target pass. None if either was not measured."""
        if not self.num_draft_steps or not self.num_timed_rounds:
            return None
        return (self.times.draft / self.num_draft_steps) / (self.pass_seconds / self.num_timed_rounds)

    @property
    def expected_speedup(self) -> float | None:
        """Return the speedup by the formula at the measured alpha, c and mean K; compare with ``tok_s / plain_tok_s``."""
        alpha, ratio = self.acceptance_rate, self.cost_ratio
        if alpha is None or ratio is None:
            return None
        return expected_speedup(alpha, self.num_draft_steps / max(self.num_steps, 1), ratio)

    @property
    def tok_s(self) -> float:
        """Return emitted tokens per second, prefill included."""
        return self.num_tokens / self.times.total if self.times.total else 0.0

    @property
    def plain_tok_s(self) -> float | None:
        """Return the predicted tokens per second of plain decoding, prefill included. None if unknown."""
        seconds = self.plain_seconds
        return self.num_tokens / seconds if seconds else None

    @property
    def ms_per_round(self) -> dict[str, float]:
        """Return mean milliseconds per step (one round of the whole batch) by phase: draft, score, verify, host."""
        steps = max(self.num_steps, 1)
        return {name: 1e3 * getattr(self.times, name) / steps for name in PHASES}
