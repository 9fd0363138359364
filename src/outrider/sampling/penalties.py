"""Repetition, presence and frequency penalties from the committed and drafted tokens before a row."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from outrider import native
from outrider.types import Request, ancestor_matrix


@dataclass(slots=True)
class _Counted:
    """Token counts of one request's committed tokens."""

    request: Request
    factors: tuple[float, float, float]  # repetition, presence, frequency
    ids: Tensor  # int64 [V]; the first num_ids are the distinct tokens
    seen: Tensor  # uint8 [V]
    counts: Tensor  # float32 [V], in the output
    num_ids: int = 0
    num_tokens: int = 0  # counted so far

    @classmethod
    def of(cls, request: Request, vocab_size: int, device: torch.device) -> _Counted:
        params = request.params
        return cls(
            request,
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
            torch.empty(vocab_size if native.serves(device) else 0, dtype=torch.long),
            torch.zeros(vocab_size, dtype=torch.uint8, device=device),
            torch.zeros(vocab_size, device=device),
        )

    def continued(self, request: Request) -> _Counted:
        """Return a copy for the same request with more tokens."""
        copies = {name: getattr(self, name).clone() for name in ("ids", "seen", "counts")}
        return replace(self, request=request, **copies)


class Penalties:
    """Token counts of requests with penalties, updated in O(new tokens) per call."""

    def __init__(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device, earlier: Penalties | None = None
    ) -> None:
        """``earlier``: of another batch, whose counts of the same requests are shared."""
        self._native = native.serves(device)
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

    def apply_(self, logits: Tensor, drafts: Tensor | None, parents: Tensor | None, start: int, counts: Sequence[int]) -> None:
        """Apply penalties to the first ``counts[b]`` rows of contiguous logits [B, M, V], in place."""
        if start + logits.shape[1] - 1 > (0 if drafts is None else drafts.shape[1]):
            raise ValueError("penalties need the drafts before each row of logits")
        for b, counted in self._counted:
            self._count(counted)
            rows = logits[b, : counts[b]]
            # drafts made from text are on the CPU, also for a target on a GPU
            draft_ids, parent_ids = (
                None if each is None else each[b].to(logits.device).contiguous() for each in (drafts, parents)
            )
            if self._native:
                committed = (counted.ids, counted.num_ids, counted.counts)
                torch.ops.outrider.penalise_(rows, *committed, draft_ids, parent_ids, start, *counted.factors)
            else:
                reference_penalise_(rows, counted.seen, counted.counts, draft_ids, parent_ids, start, counted.factors)

    def _count(self, counted: _Counted) -> None:
        """Count the tokens that were committed since the last call."""
        text, first = counted.request.token_ids, counted.num_tokens
        if first == len(text):
            return
        num_prompt = max(counted.request.num_prompt_tokens - first, 0)
        counted.num_tokens = len(text)
        fresh = torch.tensor(text[first:], device=counted.seen.device)
        if self._native:
            known = (counted.ids, counted.num_ids, counted.seen, counted.counts)
            counted.num_ids = torch.ops.outrider.count_tokens(fresh, num_prompt, *known)
            return
        counted.seen[fresh] = 1
        output = fresh[num_prompt:]
        counted.counts.index_add_(0, output, torch.ones_like(output, dtype=counted.counts.dtype))


def reference_penalise_(
    logits: Tensor,  # [M, V]
    seen: Tensor,  # [V]
    counts: Tensor,  # [V]
    drafts: Tensor | None,  # [N]
    parents: Tensor | None,
    start: int,
    factors: tuple[float, float, float],
) -> None:
    """Apply one request's penalties in place; reference of ``outrider::penalise_``."""
    width = logits.shape[0]
    occurs, times = seen.float().unsqueeze(0), counts.unsqueeze(0)  # [1, V]
    if drafts is not None and start + width > 1:
        if parents is None:
            mask = torch.ones(width, len(drafts), device=drafts.device).tril(start - 1)
        else:
            mask = path_mask(parents.unsqueeze(0), start, width)[0].float()
        drafted = torch.zeros(width, logits.shape[1], device=logits.device)
        drafted.scatter_add_(-1, drafts.expand(width, -1), mask)
        occurs, times = occurs + drafted, times + drafted
    repetition, presence, frequency = factors
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    scores = torch.where(occurs > 0, repeated, logits) - presence * (times > 0).to(logits.dtype)
    logits.copy_(scores - frequency * times.to(logits.dtype))


def drafts_before_rows(parents: Tensor | None, start: int, width: int, batch: int) -> list[list[int]]:
    """Return the number of drafts before each row of logits [B][M]; row j follows draft ``start + j - 1``."""
    if parents is None:
        return [list(range(start, start + width))] * batch
    return path_mask(parents, start, width).sum(dim=-1).tolist()


def path_mask(parents: Tensor, start: int, width: int) -> Tensor:
    """Return bool [B, width, N] from parents [B, N]: whether node n is on the path from the root to node ``start + j - 1``."""
    with_root = functional.pad(ancestor_matrix(parents), (0, 0, 1, 0))  # [B, N + 1, N]: row 0 is the root
    return with_root[:, start : start + width].to(parents.device)
