"""Attention of a head trained on its own outputs: training-time test (EAGLE-3, arXiv 2503.01840, section 3.2).

In step s, entry j reads token j + 1 + s and drafts token j + 2 + s, counted from 0. It attends to entries 0 to j of the first
step, which are computed from the target's features, and in later steps only to entries with the same j, its own ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.runner.attention import range_of

NAME = "outrider_rollout"

_steps: dict[int, list[tuple[Tensor, Tensor]]] | None = None  # layer -> keys and values of each step so far


@contextmanager
def rollout() -> Iterator[None]:
    """Context manager: passes of a head are steps of one rollout."""
    global _steps
    previous, _steps = _steps, {}
    try:
        yield
    finally:
        _steps = previous


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float = 1.0, **options: Any
) -> tuple[Tensor, None]:
    """Attend with query [B, H, T, D], key and value [B, Hkv, T, D] of this step -> [B, T, H, D].

    Applies the window, the cap of the scores and the attention sinks of the layer, as the runner does in use.
    """
    assert _steps is not None, "a head in training runs within rollout()"
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    steps = _steps.setdefault(int(module.layer_idx), [])  # type: ignore[arg-type]
    steps.append((key, value))
    window, cap, sinks = range_of(module, options).window, options.get("softcap"), options.get("s_aux")
    is_plain = not window and not cap and sinks is None
    if len(steps) == 1 and is_plain and query.is_cuda:  # its CPU backward pass is slower than the plain products below
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling).transpose(1, 2), None
    (first_keys, first_values), *later = steps
    length = query.shape[2]
    sees = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if window:
        sees = sees.triu(len(later) + 1 - window)
    own = [(query * keys).sum(-1, keepdim=True) for keys, _ in later]  # s of [B, H, T, 1]
    scores = torch.cat((query @ first_keys.transpose(2, 3), *own), -1) * scaling  # [B, H, T, T + s]
    if cap:
        scores = cap * (scores / cap).tanh()
    scores = scores.masked_fill(~pad(sees, (0, len(later)), value=True), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1).to(value.dtype)
    out = weights[..., :length] @ first_values
    for index, (_, values) in enumerate(later):
        out = out + weights[..., length + index, None] * values
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, attend)
