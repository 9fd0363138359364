"""Interface of draft-length policies. The adaptive policy is in outrider.tune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.registry import Registry
from outrider.types import Context, OutriderError, Round

POLICIES = Registry("draft length", {"auto": "outrider.tune.policy:DraftLengthPolicy"})


class LengthPolicy(Protocol):
    """Chooses each request's K every round from the costs and gains of earlier rounds."""

    def next_lengths(self, context: Context) -> list[int]:
        """Return the drafts to request in this round, per request; all 0 is plain decoding."""
        ...

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        """Learn from a committed round. The seconds of a prefill are not those of decoding.

        Requests with their own K (``num_draft_tokens``) used it.
        """
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Remove requests that ended."""
        ...


class FixedLength:
    """Uses the same K for every request and round."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise OutriderError(f"invalid number of draft tokens {k}: expected 0 or more")
        self.k = k

    def next_lengths(self, context: Context) -> list[int]:
        return [self.k] * len(context.requests)

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        """Do nothing."""

    def release(self, request_ids: Sequence[str]) -> None:
        """Do nothing."""
