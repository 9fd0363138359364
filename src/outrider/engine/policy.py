"""Interface of draft-length policies. The adaptive policy is in outrider.tune."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from outrider.types import Context, DraftPrices, OutriderError, Request, Round


class LengthPolicy(Protocol):
    """Chooses K for each request in each round. A subclass needs ``next_lengths`` only."""

    @property
    def prices(self) -> DraftPrices | None:
        """Return the cost of a further draft, in expected tokens; None: the proposer makes as many drafts as requested."""
        return None

    def start(self, request: Request, batch: int, num_draft_cached: int, num_recomputed: int) -> bool:
        """Start a new request without its own K, before its first round. Return whether it takes part in drafting.

        Called if the proposer needs hidden states. ``num_draft_cached``: leading tokens that it has cached; ``num_recomputed``:
        further ones that the target has cached, but must process again if the request takes part; ``batch``: the running
        requests, with this one.
        """
        return True

    @abstractmethod
    def next_lengths(self, context: Context) -> list[int]:
        """Return K for each request of this round; 0 for all of them is plain decoding.

        It may clear ``may_draft`` of a request, as if ``start`` had returned False: K is 0 until it ends.
        """
        ...

    def observe(self, context: Context, round_: Round) -> None:
        """Learn from a committed round.

        Requests with their own K (``num_draft_tokens``) used that one.
        """
        return

    def release(self, request_ids: Sequence[str]) -> None:
        """Remove requests that ended."""
        return


class FixedLength(LengthPolicy):
    """Uses the same K for every request and round."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise OutriderError(f"invalid number of draft tokens {k}: expected 0 or more")
        self.k = k

    def start(self, request: Request, batch: int, num_draft_cached: int, num_recomputed: int) -> bool:
        return self.k > 0

    def next_lengths(self, context: Context) -> list[int]:
        return [self.k] * len(context.requests)
