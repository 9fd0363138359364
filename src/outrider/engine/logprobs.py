"""Log-probabilities of emitted tokens: the target's own, before any sampler setting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one emitted token, and of the likeliest tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


def token_logprobs(logits: Tensor, rows: list[int], token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Compute from logits [N + 1, V] of one request; ``rows[i]`` is the row that ``token_ids[i]`` was sampled from."""
    logits = logits[rows].float()  # [T, V]
    total = logits.logsumexp(-1, keepdim=True)  # [T, 1]
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)  # [T, 1]
    chosen = (logits.gather(-1, ids) - total).squeeze(-1).tolist()
    if not num_top:
        return [TokenLogprobs(logprob) for logprob in chosen]
    highest, likeliest = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    highest = highest - total
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in zip(likeliest.tolist(), highest.tolist(), strict=True)]
    return [TokenLogprobs(logprob, top) for logprob, top in zip(chosen, tops, strict=True)]
