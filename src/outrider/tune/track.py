"""Policy state of requests and batches: acceptance of drafts, and how often a grammar forces tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from outrider.runner.cost_book import MethodCosts, RoundCosts
from outrider.tune.acceptance import Acceptance
from outrider.types import Context, Request

DECAY = 0.93  # decay of a request's counts per round: about 14 rounds
IDLE_DECAY = 0.97  # the same per round in which only others draft: after about 30, drafts are tried again


@dataclass(slots=True)
class Track:
    """Policy state of a request."""

    shared: Acceptance  # shared by requests with its temperature
    own: Acceptance
    num_seen: int = 0  # committed tokens at the last call of the proposer
    # Decaying counts: rows of a grammar's drafts, all other tokens of these rounds; the proposer's drafts, those not forced.
    grammar_rows: float = 0.0
    free_tokens: float = 0.0
    num_own: float = 0.0
    num_free: float = 0.0

    def gains(self, expected: Sequence[float], most: int) -> list[float]:
        """Return, per depth, the probability that a draft there is accepted, given that the proposer makes a first one.

        0 beyond ``most``. ``expected``: acceptance by depth of a request without counts.

        Drafts that a grammar forces add none: depths and values are scaled by the share of drafts that are free.
        """
        gains = list(accumulate(self.shared.request_rates(self.own, expected), mul))
        share = self.num_free / self.num_own if self.num_own else 1.0
        gains = [share * gains[int(share * depth)] for depth in range(len(gains))]
        return gains[:most] + [0.0] * len(gains[most:])

    @property
    def grammar_rate(self) -> float:
        """Return the rows that its grammar adds to passes for each other token: a property of the text, whatever K is."""
        return self.grammar_rows / self.free_tokens if self.grammar_rows else 0.0

    def add_grammar(self, num_rows: int, num_others: int) -> None:
        self.grammar_rows = DECAY * self.grammar_rows + num_rows
        self.free_tokens = DECAY * self.free_tokens + num_others

    def add_own(self, num_own: int, num_free: int) -> None:
        self.num_own = DECAY * self.num_own + num_own
        self.num_free = DECAY * self.num_free + num_free

    def made_rates(self, longest: int) -> list[float]:
        return self.own.made_rates(self.shared.made_rates([1.0] * longest))


@dataclass(slots=True)
class TrackedBatch:
    """The requests of a round with their policy state, and the estimated costs of their rounds."""

    context: Context  # of this round, before the chosen K limit it
    tracks: list[Track]
    costs: MethodCosts
    num_nodes: Callable[[int], int]  # drafts in a proposal with paths of length k
    plain: float | None = None  # seconds of a plain round at the last decision; None until measured

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.context.requests

    @property
    def has_grammars(self) -> bool:
        return any([request.matcher is not None for request in self.requests])

    def num_unseen(self, b: int) -> int:
        """Return a request's committed tokens since the last call of the proposer."""
        return len(self.requests[b].token_ids) - self.tracks[b].num_seen

    def zero_left_out(self, lens: Sequence[int]) -> list[int]:
        """Return the lengths with 0 for requests that take no part in drafting."""
        return [k if request.may_draft else 0 for k, request in zip(lens, self.requests, strict=True)]

    def round_costs(self, num_grammar: Sequence[float] = ()) -> RoundCosts | None:
        return self.costs.round_costs(len(self.tracks), self.context.cache_len, num_grammar)


def rows_by_depth(num_nodes: Callable[[int], int], k: int) -> list[int]:
    """Return the tokens that each depth of a proposal up to k adds to a pass, at least one."""
    totals = [num_nodes(depth) for depth in range(k + 1)]
    return [max(1, after - before) for before, after in pairwise(totals)]
