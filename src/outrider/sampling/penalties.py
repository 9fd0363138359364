"""Repetition, presence and frequency penalties from the committed and drafted tokens before a row.

Only the logits of these tokens are read and written: far fewer than the vocabulary's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from outrider.types import Request, ancestor_matrix


@dataclass(slots=True)
class _Counted:
    """Token counts of one request's committed tokens."""

    request: Request
    seen: Tensor  # float32 [V], 1 for tokens of prompt and output
    counts: Tensor  # float32 [V], in the output
    ids: Tensor  # int64 [n], the distinct tokens
    known: set[int]  # the same
    num_tokens: int = 0  # counted so far

    @classmethod
    def of(cls, request: Request, vocab_size: int, device: torch.device) -> _Counted:
        seen, ids = torch.zeros(vocab_size, device=device), torch.zeros(0, dtype=torch.long, device=device)
        return cls(request, seen, seen.clone(), ids, set())

    def continued(self, request: Request) -> _Counted:
        """Return a copy for the same request with more tokens."""
        return replace(self, request=request, seen=self.seen.clone(), counts=self.counts.clone(), known=set(self.known))

    def update(self) -> None:
        """Count the tokens that were committed since the last call."""
        first, self.num_tokens = self.num_tokens, len(self.request.token_ids)
        if first == self.num_tokens:
            return
        new_ids = self.request.token_ids[first:]
        fresh = torch.tensor(new_ids, device=self.seen.device)
        self.seen[fresh] = 1.0
        output = fresh[max(self.request.num_prompt_tokens - first, 0) :]
        self.counts.index_add_(0, output, torch.ones_like(output, dtype=self.counts.dtype))
        added = set(new_ids) - self.known
        self.known |= added
        self.ids = torch.cat((self.ids, torch.tensor(list(added), dtype=torch.long, device=self.ids.device)))

    def penalise_(self, logits: Tensor, drafts: Tensor, mask: Tensor) -> None:
        """Apply penalties to logits [M, V], in place. ``mask`` [M, N]: the drafts [N] on the path to each row."""
        before = logits.index_select(1, drafts)
        scores = self._penalised(logits.index_select(1, self.ids), None, self.counts[self.ids])
        logits.scatter_(1, self.ids.expand_as(scores), scores)
        if len(drafts):
            drafted = mask @ (drafts.unsqueeze(-1) == drafts).to(mask.dtype)  # [M, N]: how often each draft is on the path
            scores = self._penalised(before, self.seen[drafts] + drafted, self.counts[drafts] + drafted)
            logits.scatter_(1, drafts.expand_as(scores), scores)

    def _penalised(self, scores: Tensor, occurs: Tensor | None, times: Tensor) -> Tensor:
        """Return penalised logits [M, K] of K tokens. ``occurs`` (None: each does) and ``times``: their counts in the context
        and in the output.
        """
        params = self.request.params
        if params.repetition_penalty != 1.0:
            repeated = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
            scores = repeated if occurs is None else torch.where(occurs > 0, repeated, scores)
        if params.presence_penalty:
            scores = scores - params.presence_penalty * (times > 0).to(scores.dtype)
        if params.frequency_penalty:
            scores = scores - params.frequency_penalty * times.to(scores.dtype)
        return scores


class Penalties:
    """Token counts of requests with penalties, updated in O(new tokens) per call."""

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device, earlier: Penalties | None = None
    ) -> None:
        """``earlier``: of another batch, whose counts of the same requests are shared."""
        known = {} if earlier is None else {counted.request: counted for _, counted in earlier._counted}
        self._counted: list[tuple[int, _Counted]] = [
            (b, known.get(request) or _Counted.of(request, vocab_size, device))
            for b, request in enumerate(requests)
            if request.params.has_penalties
        ]
        self.is_empty = not self._counted

    def continued(self, requests: Mapping[int, Request]) -> Penalties:
        """Return the penalties of the same batch in which some requests, given by index, have more tokens."""
        other = copy.copy(self)
        other._counted = [(b, counted.continued(requests[b]) if b in requests else counted) for b, counted in self._counted]
        return other

    def apply_(self, logits: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, widths: Sequence[int]) -> None:
        """Apply penalties to the first ``widths[b]`` rows of logits [B, M, V], in place."""
        if start + logits.shape[1] - 1 > (0 if drafts is None else drafts.shape[1]):
            raise ValueError("penalties need the drafts before each row of logits")
        for b, counted in self._counted:
            counted.update()
            width = widths[b]
            num_drafts = start + width - 1  # of the last row; later ones may be padding
            token_ids = counted.ids[:0] if drafts is None else drafts[b, :num_drafts]
            if parents is None:
                rows = torch.arange(start, start + width, device=logits.device)
                mask = torch.arange(num_drafts, device=logits.device) < rows.unsqueeze(-1)
            else:
                mask = path_mask(parents[b : b + 1, :num_drafts], start, width)[0]
            # drafts made from text are on the CPU, also for a target on a GPU
            counted.penalise_(logits[b, :width], token_ids.to(logits.device), mask.to(logits.device).float())


def drafts_before_rows(parents: Tensor | None, start: int, width: int, batch: int) -> list[list[int]]:
    """Return the number of drafts before each row of logits [B][M]; row j follows draft ``start + j - 1``."""
    if parents is None:
        return [list(range(start, start + width))] * batch
    return path_mask(parents, start, width).sum(dim=-1).tolist()


def path_mask(parents: Tensor, start: int, width: int) -> Tensor:
    """Return bool [B, width, N] from parents [B, N]: whether node n is on the path from the root to node ``start + j - 1``."""
    with_root = functional.pad(ancestor_matrix(parents), (0, 0, 1, 0))  # [B, N + 1, N]: row 0 is the root
    return with_root[:, start : start + width].to(parents.device)
