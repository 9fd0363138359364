"""What a search tries. Does not import torch, so that options can be checked before it is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.registry import AUTO

if TYPE_CHECKING:
    from outrider.proposers.base import Proposer


@dataclass(frozen=True)
class SearchSpace:
    """The search space."""

    lengths: tuple[int, ...] = (1, 2, 4, 8, 15)  # K of the candidates; the adaptive length is always added
    batches: tuple[int, ...] = (1,)  # batch sizes that the plan is for
    repeat: int = 3  # maximum runs of the finalists over the whole traffic

    def lengths_of(self, proposer: Proposer) -> list[int | str]:
        """Return the lengths that the proposer supports, and the adaptive one."""
        return [*sorted({min(k, proposer.max_drafts) for k in self.lengths}), AUTO]
