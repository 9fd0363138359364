"""Generate text with a plain transformers model in one batch, with transformers' cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from outrider.runner.loading import cache_argument
from outrider.train.decoder import evaluating


@torch.no_grad()
def continue_rows(
    model: PreTrainedModel,
    prompts: Tensor,
    new_tokens: int,
    temperature: Tensor,
    generator: torch.Generator,
    vocab_size: int | None = None,
) -> Tensor:
    """Continue prompts [B, S] at temperature [B] (0 is greedy); return ids [B, S + new_tokens].

    Rows share one prompt length; tokens after an end token are kept as the next document. ``vocab_size``: number of tokens that
    may be drawn, if the model has more, such as a mask token.
    """
    rows, length = prompts.shape
    out = torch.empty(rows, length + new_tokens, dtype=torch.int64, device=prompts.device)
    out[:, :length] = prompts
    cache = DynamicCache(config=model.config)
    ids = prompts
    temperature = temperature[:, None]
    greedy, divisor = temperature == 0, temperature.clamp(min=1e-3)
    past: dict[str, Any] = {cache_argument(model): cache}
    with evaluating(model):
        for position in range(length, length + new_tokens):
            logits = model(input_ids=ids, **past, use_cache=True, logits_to_keep=1).logits
            scores = logits[:, -1, :vocab_size].float()
            probs = (scores / divisor).softmax(-1)
            drawn = torch.multinomial(probs, 1, replacement=True, generator=generator)  # otherwise one number per token
            ids = torch.where(greedy, scores.argmax(-1, keepdim=True), drawn)
            out[:, position] = ids[:, 0]
    return out
