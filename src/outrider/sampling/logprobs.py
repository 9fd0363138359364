"""Log-probabilities under the model itself, before any sampler setting."""

from __future__ import annotations

from torch import Tensor


def raw_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probability of each token: [..., V], [...] -> float32 [...]."""
    logits = logits.float()
    return logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` highest log-probabilities and token ids: [..., V] -> float32 [..., count], int64 [..., count]."""
    highest, token_ids = logits.float().topk(min(count, logits.shape[-1]), dim=-1)
    return highest - logits.float().logsumexp(dim=-1, keepdim=True), token_ids
