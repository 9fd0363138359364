"""Text that a plain transformers model writes itself, in one batch with transformers' own cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def continue_rows(
    model: PreTrainedModel, prompts: Tensor, new_tokens: int, temperature: Tensor, generator: torch.Generator
) -> Tensor:
    """Continuations of prompts [B, S] at temperature [B] (0 is greedy): ids [B, S + new_tokens].

    Rows share one prompt length; text after an end token is kept, it is simply the next document.
    """
    rows, length = prompts.shape
    out = torch.empty(rows, length + new_tokens, dtype=torch.int64, device=prompts.device)
    out[:, :length] = prompts
    cache = DynamicCache(config=model.config)
    ids = prompts
    greedy = temperature == 0
    divisor = temperature.clamp(min=1e-3)[:, None]
    with torch.compiler.set_stance("force_eager"):  # every step has another shape
        for position in range(length, length + new_tokens):
            scores = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
            probs = (scores / divisor).softmax(-1)
            drawn = torch.multinomial(probs, 1, replacement=True, generator=generator)[:, 0]  # without: a draw for each token
            ids = torch.where(greedy, scores.argmax(-1), drawn)[:, None]
            out[:, position] = ids[:, 0]
    return out
