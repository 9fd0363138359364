"""Tiny models with recurrent layers of each kind: delta rule, short convolution, Mamba, Mamba-2, with and without attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "lfm2": {},
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "attn_layer_indices": [1, 3]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 2},
}


def hybrid(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a tiny random model with weights large enough that its output does not loop."""
    torch.manual_seed(0)
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(SMALL | HYBRIDS[kind] | changes))).float().eval()
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return model.to(dtype)


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a draft for a model: its weights with noise, so that some drafts are rejected."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        parameter.data.add_(0.03 * torch.randn_like(parameter))
    return draft


PROMPTS = [[7, 3, 9], [(5 * i * i + i) % 60 + 1 for i in range(45)], [(3 * i) % 11 + 1 for i in range(30)]]
