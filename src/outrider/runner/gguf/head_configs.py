"""Values of heads' configs from the entries of GGUF files, as in ``configs``, under the names of the heads' own formats."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.runner.gguf.architecture import FACTORS, Entry, Tensors, Values
from outrider.runner.gguf.configs import _needed as needed
from outrider.runner.gguf.configs import gemma4

# llama.cpp stores Llama 3's scaled rotary positions as divisors of the frequencies. All of its models were scaled with these.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def eagle3(entry: Entry, tensors: Tensors, values: Values) -> None:
    """Read an EAGLE-3 head. Whether it has a norm before fc is known from its tensors."""
    entry("norm_before_fc")
    values |= {
        "eagle_aux_hidden_state_layer_ids": needed(entry, "target_layers"),
        "target_hidden_size": needed(entry, "target_hidden_size"),
        "norm_before_residual": bool(entry("norm_before_residual")),
    }
    _add_llama3_scaling(tensors, values)


def dflash(entry: Entry, tensors: Tensors, values: Values) -> None:
    """Read a block drafter: DFlash, DFlash 2 or DSpark."""
    rotated = entry("rope.dimension_count")
    if rotated not in (None, values["head_dim"]):
        raise ValueError(f"rotary positions of {rotated} of {values['head_dim']} features, expected all")
    pattern = entry("attention.sliding_window_pattern") or [False] * values["num_hidden_layers"]
    values |= {
        "aux_hidden_state_layer_ids": needed(entry, "target_layers"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern],
        "sliding_window": entry("attention.sliding_window"),
        "use_sliding_window": any(pattern),
        "is_causal": entry("attention.causal"),
        "output_multiplier": entry("logit_scale"),
        "input_embedding_scale": entry("embedding_scale"),
    }
    for name in ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "sample_from_anchor"):
        values[name] = entry(name)
    values["final_logit_softcapping"] = entry("final_logit_softcapping")
    _add_llama3_scaling(tensors, values)


def gemma4_assistant(entry: Entry, tensors: Tensors, values: Values) -> None:
    """Read one of Gemma 4's assistants. llama.cpp leaves out ordered embeddings: logits are those of all tokens."""
    gemma4(entry, tensors, values)
    values["sliding_window"] = needed(entry, "attention.sliding_window")
    none = {"attention_k_eq_v": False, "vocab_size_per_layer_input": 0}  # its layers have neither keys nor inputs of their own
    text = {name: value for name, value in (values | none).items() if value is not None}
    values.clear()
    values |= {
        "text_config": text,
        "backbone_hidden_size": needed(entry, "embedding_length_out"),
    }


def _add_llama3_scaling(tensors: Tensors, values: Values) -> None:
    """Add Llama 3's scaling if the file has divisors of frequencies. Raises ``ValueError`` if they are others than its."""
    if FACTORS not in tensors:
        return
    found = torch.from_numpy(tensors[FACTORS].data.copy())
    plain: Values = {"rope_type": "default", "rope_theta": values.pop("rope_theta", 1e4)}
    scaled = plain | LLAMA3 | {"rope_type": "llama3", "factor": float(found.max())}
    sizes = {"head_dim": values["head_dim"], "max_position_embeddings": 1 << 20}
    with torch.device("cpu"):  # also where only headers are read
        before, after = (
            LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(each))).inv_freq for each in (plain, scaled)
        )
    if found.shape != before.shape or not torch.allclose(found, before / after, rtol=1e-4):
        raise ValueError(f"{FACTORS} holds other divisors than Llama 3's")
    values["rope_parameters"] = scaled
