"""Tiny models with random weights, of every architecture of the installed transformers.

A config is the architecture's default one with known size fields replaced; further changes are in ``CHANGES``. Weights are
drawn such that greedy outputs do not loop over a few tokens, which would make comparisons meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from outrider.runner.loading import auto_class

VOCAB = 131  # a prime, so that no padding applies by chance
LENGTH = 256  # context length
WINDOW = 16  # of sliding and chunked attention, shorter than the prompts
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 4, 2, 16, 96

# Values of size fields, by name.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "embed_dim", "hidden_dim", "emb_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv"), HEAD_DIM),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "d_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dim_ff"), INNER
    ),
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size", "shared_intermediate_size", "dense_intermediate_size"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len"), LENGTH),
    **dict.fromkeys(("max_sequence_length", "seq_length", "model_max_length"), LENGTH),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    "v_head_dim": 12,
    "num_kv_shared_layers": 2,
    "first_k_dense_replace": 1,
    "max_window_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Values of size fields of the encoders in multimodal models.
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("out_hidden_size", "projection_dim"), HIDDEN),
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
TEXT_PARTS = ("text_config", "llm_config", "thinker_config", "decoder", "attn_config", "ffn_config")

LATENT = {"num_key_value_heads": HEADS, "head_dim": 8}
SLIDING = ["sliding_attention", "full_attention"] * 2
# Further changes per architecture.
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
IN_TEXT_SECTIONS = {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}}
HALF_ROTATED = {"text_config": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}}
COHERE = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE), "layer_types": SLIDING}
LLAMA_4 = {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]}
GEMMA_4 = {"global_head_dim": 32, "layer_types": SLIDING}
QWEN_4 = {"hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
QWEN_4["indexer_compress_ratio"] = 4
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config": COHERE},
    "cohere_compass_text": COHERE,
    "cosmos3_edge": IN_TEXT_SECTIONS,
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}},
    "gemma3n_text": {"intermediate_size": INNER, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "layer_types": SLIDING},
    "gemma4": {"text_config": GEMMA_4},
    "gemma4_text": GEMMA_4,
    "gemma4_unified": {"text_config": GEMMA_4},
    "gemma4_unified_text": GEMMA_4,
    "glm46v": IN_TEXT_SECTIONS,
    "glm4v": IN_TEXT_SECTIONS,
    "glm4v_moe": HALF_ROTATED,
    "glm_ocr": IN_TEXT_SECTIONS,
    "glmga": IN_TEXT_SECTIONS,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "hunyuan_vl": {"text_config": {"head_dim": HEAD_DIM}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"text_config": LLAMA_4},
    "llama4_text": {**LLAMA_4, "floor_scale": 8},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": HEAD_DIM},
    "mistral4": {"head_dim": 16},
    "moshi": {"sliding_window": LENGTH},  # as in the checkpoints: transformers' cache cuts at it, its forward does not
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS},
    "paddleocr_vl": IN_TEXT_SECTIONS,
    "qwen2_5_omni_thinker": IN_TEXT_SECTIONS | {"vision_start_token_id": 2},
    "qwen2_5_vl": IN_TEXT_SECTIONS,
    "qwen2_vl": IN_TEXT_SECTIONS,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 2},
    "qwen4_exp": {"text_config": QWEN_4},
    "qwen4_exp_text": QWEN_4,
    "whisper": {"is_encoder_decoder": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Variants of an architecture with features that its default config lacks: name -> architecture, changes.
ORIGINAL = {"original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + index for index in range(8)]}
LONGROPE = {**ORIGINAL, "rope_parameters": {**ROPE, "rope_type": "longrope", "factor": 4.0, **ORIGINAL, **FACTORS}}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama with {name} rope": ("llama", {"rope_parameters": {**ROPE, **rope}}) for name, rope in ROPES.items()},
    "deepseek_v3 with yarn rope": ("deepseek_v3", {"rope_parameters": {**ROPE, **ROPES["yarn"]}}),
    "qwen3 with yarn rope": ("qwen3", {"rope_parameters": {**ROPE, **ROPES["yarn"]}}),
    "phi3 with longrope": ("phi3", LONGROPE),
    "llama with tied weights": ("llama", {"tie_word_embeddings": True}),
    "mistral with a window": ("mistral", {"sliding_window": WINDOW}),
    "mixtral with a window": ("mixtral", {"sliding_window": WINDOW}),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": SLIDING}),
    "gpt2 with scores scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt_bigcode with several heads of keys": ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": HEADS}),
    "gemma4_text with shared keys": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "gemma4_text with keys as values": ("gemma4_text", {"num_kv_shared_layers": 0, "attention_k_eq_v": True}),
    "gemma4_text with experts": ("gemma4_text", {"num_kv_shared_layers": 0, **EXPERTS}),
    "granitemoehybrid with attention alone": ("granitemoehybrid", {"layer_types": ["full_attention"] * LAYERS}),
    "qwen3_moe with dense layers": ("qwen3_moe", {"mlp_only_layers": [1]}),
}
# Variants whose context is longer than Outrider's default.
ASKED_LENGTH = {"phi3 with longrope": LENGTH}


def architectures() -> list[str]:
    """Return the names of all architectures that can process text alone: language models, then multimodal ones."""
    return [*language_models(), *sorted(set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(language_models()))]


def language_models() -> list[str]:
    """Return the architectures of transformers' ``AutoModelForCausalLM``."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_multimodal(name: str) -> bool:
    """Return whether an architecture has inputs other than text."""
    return VARIANTS.get(name, (name,))[0] in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def tiny_config(name: str) -> PreTrainedConfig:
    """Return the config of an architecture or of one of ``VARIANTS``. Raises the errors of transformers' configs."""
    kind, extra = VARIANTS.get(name, (name, {}))
    default = AutoConfig.for_model(kind)
    values = merged(merged(shrunk(default, SIZES), CHANGES.get(kind, {})), extra)
    return AutoConfig.for_model(kind, **values)


def shrunk(default: PreTrainedConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that make a config small: size fields, per-layer lists, and the same for its sub-configs."""
    known = default.to_dict()
    counts = {known.get(name) for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")} - {None}
    values: dict[str, Any] = {}
    for name, value in known.items():
        part = getattr(default, name, None) if name in default.sub_configs else None
        if isinstance(part, PreTrainedConfig):
            values[name] = {"model_type": part.model_type, **shrunk(part, SIZES if name in TEXT_PARTS else TOWER)}
        elif value is not None and name in sizes and not isinstance(value, (list, dict)):
            values[name] = sizes[name]
        elif isinstance(value, (list, tuple)) and len(value) in counts and len(value) > LAYERS:
            kinds = list(dict.fromkeys(value))  # distinct kinds, in order
            values[name] = [kinds[layer % len(kinds)] for layer in range(sizes.get("num_hidden_layers", LAYERS))]
    if "qk_rope_head_dim" in values:  # multi-head latent attention
        values |= {name: value for name, value in LATENT.items() if name in known}
    if "is_decoder" in known and not default.sub_configs:  # models that can be encoders or decoders
        values |= {"is_decoder": True, "is_encoder_decoder": False}
    return values


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` updated with ``changes``, sub-configs recursively."""
    result = dict(values)
    for name, change in changes.items():
        both = isinstance(change, Mapping) and isinstance(result.get(name), Mapping) and name != "rope_parameters"
        result[name] = merged(result[name], change) if both else change
    return result


def tiny_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a random float32 model with weights large enough that its outputs vary from token to token."""
    torch.manual_seed(seed)
    return randomised(auto_class(config).from_config(config, dtype=torch.float32)).requires_grad_(False)


def randomised(model: PreTrainedModel, std: float = 0.7) -> PreTrainedModel:
    """Randomise a model's weights for evaluation, large enough that its greedy tokens vary, and return it."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std / parameter.shape[-1] ** 0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.eval()
    return model
