"""Temperature, top-k, top-p and min-p: from scores to the sampling distribution.

Top-k keeps ties with the k-th token; top-p keeps the smallest remaining set that reaches its mass, with the lowest ids among
ties at the border; min-p keeps tokens at least min_p times as likely as the likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider import native
from outrider.sampling.randomness import gumbel
from outrider.types import SamplingParams

NUM_NOISY = 32  # values with noise whose softmax is computed: noise for all costs more than a small draft's step
_MIN_TEMPERATURE = 1e-6  # lower temperatures would overflow and are equivalent to greedy decoding


class Shaping:
    """Distribution settings of B requests."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self.is_greedy = [param.is_greedy for param in params]
        rows = [
            (0.0, 0, 1.0, 0.0)
            if param.is_greedy
            else (
                max(param.temperature, _MIN_TEMPERATURE),
                param.top_k if param.top_k < vocab_size else 0,
                param.top_p,
                param.min_p,
            )
            for param in params
        ]
        self._settings = torch.tensor(rows, dtype=torch.float64, device=device).view(-1, 4)
        temperatures = self._settings[:, :1, None]
        self._greedy = temperatures == 0  # bool [B, 1, 1]
        self._temperatures = torch.where(self._greedy, 1.0, temperatures)  # float64 [B, 1, 1]
        self._truncates = any(row[1:] != (0, 1.0, 0.0) for row in rows)
        self._native = native.serves(device)

    def probs(self, scores: Tensor, widths: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return probabilities [B, M, V], one-hot for greedy rows, and the invalid rows of B * M: with NaN, +inf or only -inf.

        Only the first ``widths[b]`` rows of request b are defined, and checked.
        """
        if self._native:
            return torch.ops.outrider.shape_probs(scores.contiguous(), self._settings, widths)
        probs = torch.softmax(scores / self._temperatures.to(scores.dtype), dim=-1)
        invalid = _invalid_rows(probs[..., 0], widths)  # softmax propagates NaN over its row
        if self._truncates:
            probs = reference_truncated(probs, self._settings[:, 1:])
        if any(self.is_greedy):
            rows = self._greedy.flatten()
            best = scores[rows].argmax(dim=-1, keepdim=True)
            probs[rows] = torch.zeros_like(probs[rows]).scatter_(-1, best, 1.0)
        return probs, invalid

    def choose(self, scores: Tensor, keys: Sequence[int], widths: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the tokens int64 [B, M] of a deterministic round, the argmax of ``noisy``, and invalid rows as ``probs``."""
        if self._native:
            return torch.ops.outrider.choose(scores.contiguous(), self._settings, keys, widths)
        best, token_ids = self.noisy(scores, keys).max(dim=-1)
        return token_ids, _invalid_rows(best, widths)

    def likeliest(self, scores: Tensor, keys: Sequence[int], top_k: int) -> tuple[Tensor, Tensor]:
        """Return the K likeliest tokens int64 [B, M, K] that ``choose`` may return, and estimates of how likely they are.

        Greedy rows: the softmax. Others: that of the highest values of ``noisy``. NaN for invalid rows.
        """
        num_noisy = max(NUM_NOISY, top_k)
        if self._native:
            return torch.ops.outrider.likeliest(scores.contiguous(), self._settings, keys, top_k, num_noisy)
        probs = torch.softmax(self.noisy(scores, keys), dim=-1)
        highest, token_ids = probs.topk(min(num_noisy, probs.shape[-1]), dim=-1)
        if keys:
            highest = torch.where(self._greedy, highest, highest / highest.sum(-1, keepdim=True))
        return token_ids[..., :top_k], highest[..., :top_k]

    def noisy(self, scores: Tensor, keys: Sequence[int]) -> Tensor:
        """Return scores [B, M, V] by temperature, plus Gumbel noise, and -inf for truncated tokens; greedy rows unchanged.

        ``keys``: of the noise of B * M rows, equal ones for equal noise; empty if all rows are greedy.
        """
        if not keys:
            return scores
        distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        noise = gumbel(list(distinct), scores.shape[-1], scores.device)
        if len(distinct) < len(keys):  # nodes of a tree at the same depth
            noise = noise[[distinct[key] for key in keys]]
        noisy = scores / self._temperatures.to(scores.dtype) + noise.view(scores.shape).to(scores.dtype)
        if self._truncates:
            noisy = noisy.masked_fill(self.probs(scores, [scores.shape[1]] * len(scores))[0] == 0, -math.inf)
        if any(self.is_greedy):
            noisy = torch.where(self._greedy, scores, noisy)
        return noisy


def _invalid_rows(witness: Tensor, widths: Sequence[int]) -> list[int]:
    """Return the indices into [B * M] where ``witness`` [B, M] is not finite, among the first ``widths[b]`` of each request."""
    width = witness.shape[1]
    rows: list[int] = (~witness.isfinite()).flatten().nonzero().flatten().tolist()
    return [row for row in rows if row % width < widths[row // width]]


def reference_truncated(probs: Tensor, cuts: Tensor) -> Tensor:
    """Truncate and renormalise [B, M, V] by sorting; ``cuts`` float64 [B, 3]: top_k (0 keeps all), top_p, min_p."""
    top_k, top_p, min_p = cuts[:, None, :1].long(), cuts[:, None, 1:2], cuts[:, None, 2:].to(probs.dtype)  # [B, 1, 1]
    ordered = probs.sort(dim=-1, descending=True).values
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    everything = torch.full_like(top_k, probs.shape[-1]).expand(-1, probs.shape[1], -1)
    last = ordered.gather(-1, (top_k - 1).clamp_min(0).expand_as(everything))
    in_top_k = (ordered >= last).sum(dim=-1, keepdim=True).clamp_min(1)  # at least 1, also for NaN, which compares as false
    num_kept = torch.where(top_k > 0, in_top_k, everything)
    mass = torch.where(top_k > 0, cumulative.gather(-1, num_kept - 1), 1.0)
    in_top_p = (cumulative < top_p * mass).sum(dim=-1, keepdim=True) + 1
    num_kept = num_kept.minimum(torch.where(top_p < 1, in_top_p, everything))
    num_kept = num_kept.minimum((ordered >= min_p * ordered[..., :1]).sum(dim=-1, keepdim=True)).clamp_min(1)
    border = ordered.gather(-1, num_kept - 1)
    above, level = probs > border, probs == border
    kept = above | (level & (level.cumsum(dim=-1) <= num_kept - above.sum(dim=-1, keepdim=True)))
    return (probs * kept / cumulative.gather(-1, num_kept - 1)).to(probs.dtype)
