"""Text written by the target itself, in large batches with a cache: what the draft is distilled on, and samples."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM


@torch.no_grad()
def continue_rows(
    model: LlamaForCausalLM, prompts: Tensor, new_tokens: int, temperature: Tensor, generator: torch.Generator
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
    for position in range(length, length + new_tokens):
        scores = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()  # [B, V]
        drawn = torch.multinomial((scores / divisor).softmax(-1), 1, generator=generator)[:, 0]
        ids = torch.where(greedy, scores.argmax(-1), drawn)[:, None]
        out[:, position] = ids[:, 0]
    return out
