"""What the policy knows of one request: acceptance of its drafts, and how often a grammar forces tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from outrider.tune.acceptance import Acceptance

DECAY = 0.93  # decay of a request's counts per round: about 14 rounds
FIRST_PAUSE = 8  # rounds without drafts before the first probe


@dataclass(slots=True)
class Track:
    """Policy state of a request."""

    shared: Acceptance  # shared by requests with its temperature
    own: Acceptance
    num_seen: int = 0  # committed tokens at the last call of the proposer
    is_new: bool = True  # no round of it has begun
    rest: int = FIRST_PAUSE  # rounds until a draft for it is tried again while others draft
    pause: int = FIRST_PAUSE  # initial value of that rest
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
        most = max(most, 0)
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
