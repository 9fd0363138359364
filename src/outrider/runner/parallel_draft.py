"""A draft model that reads mask tokens: all drafts of a round from one pass (PARD: An et al. 2025, arXiv 2504.18583).

The pass reads the committed tokens that the cache lacks, then K - 1 mask tokens. The logits after the last committed token and
after each mask are the K draft distributions; none of them depends on the drafts before it. Mask tokens never count as cached:
the next pass writes in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.runner.config import RunnerConfig
from outrider.runner.kv_cache import CacheShape
from outrider.runner.loading import text_config
from outrider.runner.model_runner import ModelRunner, NextToken
from outrider.types import OutriderError

MASK_KEYS = ("pard_token", "ptd_token_id")  # keys in configs: AMD's published drafts; also read by vLLM


def mask_token_of(config: PreTrainedConfig) -> int | None:
    """Return the mask token that a draft's config names, None without one.

    Raises ``OutriderError`` for a mask token without an embedding.
    """
    text: Any = text_config(config)
    for name in MASK_KEYS:
        token = getattr(config, name, getattr(text, name, None))
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < text.vocab_size:
            raise OutriderError(
                f"invalid {name} {token!r} in the draft's config: expected a token id, 0 to {text.vocab_size - 1}"
            )
        return token
    return None


class ParallelDraft(ModelRunner):
    """Runs a draft model whose config names a mask token."""

    def __init__(
        self, model: PreTrainedModel, config: RunnerConfig, device: torch.device, name: str, shape: CacheShape
    ) -> None:
        super().__init__(model, config, device, name, shape)
        token = mask_token_of(model.config)
        assert token is not None, "other models are run by ModelRunner"
        self.mask_token = token

    def rollout(
        self, request_ids: Sequence[str], sequences: Sequence[Sequence[int]], steps: int, next_token: NextToken
    ) -> None:
        """Draft ``steps`` tokens after each sequence in one pass; ``next_token(logits [B, 1, V], step)`` chooses each."""
        rows, pending = self.catch_up(request_ids, sequences, draft_slots=steps)
        bases, masks = [self.cache.cached_lens[row] for row in rows], [self.mask_token] * (steps - 1)
        # Padded passes are captured once per width: the next round catches up with at most ``steps`` + 1 tokens.
        inputs = self.layouts.chain([tokens + masks for tokens in pending], rows, bases, least=2 * steps)
        last = [start + len(tokens) - 1 for start, tokens in zip(inputs.starts, pending, strict=True)]
        logits, _ = self.passes.run(inputs.ids, inputs.layout, (), self.layouts.row_indices(last, [steps] * len(rows)))
        for row, sequence in zip(rows, sequences, strict=True):
            self.cache.cached_lens[row] = len(sequence)
        by_step = logits.view(len(rows), steps, -1).float()
        for step in range(steps):
            if next_token(by_step[:, step : step + 1], step) is None:
                return
