"""How many drafts a round asks for: the engine's side of it. The policy that adapts lives in outrider.tune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.registry import Registry
from outrider.types import Context, OutriderError, Round

POLICIES = Registry("draft length", {"auto": "outrider.tune.policy:DraftLengthPolicy"})


class LengthPolicy(Protocol):
    """Chooses each request's K, round by round, from what the rounds before cost and gained."""

    def next_lengths(self, context: Context) -> list[int]:
        """Drafts to ask for this round, of each request; 0 for all is plain decoding."""
        ...

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        """Learns from a round, its tokens committed. A prefill's seconds say nothing of decoding.

        Requests with a K of their own (``num_draft_tokens``) were drafted for as they wish.
        """
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests that ended."""
        ...


class FixedLength:
    """The same K for every request and round."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise OutriderError(f"the number of draft tokens must be 0 or more, not {k}")
        self.k = k

    def next_lengths(self, context: Context) -> list[int]:
        return [self.k] * len(context.requests)

    def observe(self, context: Context, round_: Round, is_prefill: bool) -> None:
        """Nothing to learn."""

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget."""
