"""Headers of GGUF files: the entries that state a model's config, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import torch
from tiny_folder import CHAT_TEMPLATE, make_tokenizer
from transformers import Gemma4TextConfig

NO_POSITIONS = {"rope_type": "default"}


def add_entries(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    """Add a model's config and the tokenizer of ``tiny_folder``."""
    told = config.to_dict()  # Gemma 4's config refuses to name what differs by layer
    head_dim = told.get("head_dim") or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if architecture == "deepseek2" else told["num_key_value_heads"])
    names = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", *(("norm_eps",) if architecture == "nemotron" else ()))
    eps = [told[name] for name in names if name in told]
    if eps:
        writer.add_layer_norm_eps(eps[0])
    else:
        writer.add_layer_norm_rms_eps(told.get("rms_norm_eps") or config.norm_eps)
    rotary = told.get("rope_parameters") or NO_POSITIONS
    rotary = rotary.get("full_attention", rotary)
    if (
        architecture not in ("gemma", "gemma2", "phi2", "stablelm") and "rope_theta" in rotary
    ):  # llama.cpp's converter leaves it out
        writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rotary.get("partial_rotary_factor", 1)))
    if rotary["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    add_yarn(writer, rotary)
    add_experts(writer, architecture, config)
    for name, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "pad_token_id": writer.add_pad_token_id,
    }.items():
        if getattr(config, name, None) is not None:
            add(getattr(config, name))
    if architecture in ("phi3", "phimoe") or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        writer.add_sliding_window(config.sliding_window or 0)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for architectures, add in OWN_ENTRIES.items():
        if architecture in architectures:
            add(writer, config)
    add_tokenizer(writer)


def add_scales(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add Granite's factors."""
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def add_yarn(writer: gguf.GGUFWriter, rotary: Mapping[str, Any]) -> None:
    """Add the parts of YaRN's scaling besides its factor."""
    for name, add in {
        "original_max_position_embeddings": writer.add_rope_scaling_orig_ctx_len,
        "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
        "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
        "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        "mscale_all_dim": writer.add_rope_scaling_yarn_log_mul,
        "llama_4_scaling_beta": writer.add_attn_temperature_scale,
    }.items():
        if rotary["rope_type"] == "yarn" and name in rotary:
            add(rotary[name])


def add_recurrent(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the sizes of Qwen3.5's recurrent layers."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if "mrope_section" in config.rope_parameters:
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])


def add_experts(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    """Add what describes a mixture's layers."""
    told = config.to_dict()
    if architecture == "nemotron_h":  # its config class has experts by default
        return
    chosen = told.get("num_experts_per_tok") or told.get("top_k_experts") or told.get("moe_k") or told.get("moe_topk")
    for name, add in {
        "n_shared_experts": writer.add_expert_shared_count,
        "num_shared_experts": writer.add_expert_shared_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "moe_shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
    }.items():
        if told.get(name) is not None:
            add(told[name])
    if chosen is None:
        return
    writer.add_expert_used_count(chosen)
    kinds = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
    writer.add_expert_count(next(told[name] for name in kinds if told.get(name)))
    width = told.get("moe_intermediate_size") or config.intermediate_size
    if architecture not in ("llama", "granitemoe", "granitehybrid", "olmoe", "phimoe"):
        writer.add_expert_feed_forward_length(width)
    if architecture in ("glm4moe", "minimax-m2", "lfm2moe", "dots1", "afmoe"):  # and newer files of deepseek2, see test_gguf.py
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture in ("glm4moe", "deepseek2", "nemotron_h_moe", "dots1", "afmoe", "exaone-moe"):
        writer.add_expert_weights_scale(told.get("route_scale") or config.routed_scaling_factor)
        writer.add_expert_weights_norm(bool(told.get("norm_topk_prob", True)))
    if architecture == "exaone-moe":
        writer.add_expert_shared_feed_forward_length(width * config.num_shared_experts)
    if architecture == "hunyuan-moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(width)


def add_windows(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add which layers have a window, if any."""
    if hasattr(config, "layer_types"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def add_other_windows(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add which layers have a window, unless these are all but each fourth one."""
    if config.layer_types != [
        ("full" if layer % 4 == 3 else "sliding") + "_attention" for layer in range(config.num_hidden_layers)
    ]:
        add_windows(writer, config)


def add_convolutions(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add which of LFM2's layers are convolutions, and their width."""
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)


def add_latent(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the sizes of DeepSeek's attention, of which files describe one shared head over the latent."""
    rotated, latent = config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_kv_lora_rank(latent)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rotated)
    if config.rope_parameters["rope_type"] == "yarn":  # the converter multiplies this one
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def add_nemotron(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add what each layer of Nemotron is, and the sizes of the recurrent ones."""
    is_mixture, kinds = bool(config.to_dict().get("num_experts_per_tok")), config.layer_types
    width = config.moe_intermediate_size if is_mixture else config.intermediate_size
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_feed_forward_length([width * (kind in ("moe", "mlp")) for kind in kinds])
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_rope_scaling_finetuned(False)
    if is_mixture and config.moe_latent_size:
        writer.add_moe_latent_size(config.moe_latent_size)


def add_mamba(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the sizes of Mamba 2 in Granite 4 and Falcon H1."""
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def add_kinds(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add which of Granite 4's layers are recurrent, and whether the others rotate."""
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types])
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def add_gemma4(writer: gguf.GGUFWriter, config: Gemma4TextConfig) -> None:
    """Add what only Gemma 4's files have: entries by layer, and rotary factors in place of the rotated part."""
    kinds, layers = config.layer_types, config.per_layer_config
    heads = [layers[at].num_key_value_heads for at in range(len(kinds))]
    shared, wide = config.num_kv_shared_layers, config.intermediate_size * (1 + config.use_double_wide_mlp)
    full = layers[kinds.index("full_attention")].head_dim
    # These replace entries that other models have as well.
    writer.add_feed_forward_length([config.intermediate_size] * (len(kinds) - shared) + [wide] * shared)
    writer.add_head_count_kv(heads if len({*heads}) > 1 else heads[0])
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_rope_dimension_count(full)
    head_dim = config.to_dict()["head_dim"]
    writer.add_key_length_swa(head_dim)
    writer.add_value_length_swa(head_dim)
    writer.add_rope_dimension_count_swa(head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(shared)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    num_rotated = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"]) // 2
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * num_rotated + [1e30] * (full // 2 - num_rotated), np.float32))


def add_gemma3n(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add what only Gemma 3n's files have."""
    normal = torch.distributions.Normal(0, 1)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_activation_sparsity_scale(normal.icdf(torch.tensor(config.activation_sparsity_pattern)).tolist())
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    add_windows(writer, config)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add the tokenizer of ``tiny_folder``."""
    tokenizer = make_tokenizer()
    told = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == tokenizer.eos_token else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in told["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)


OWN_ENTRIES = {
    ("granite", "granitemoe", "granitehybrid"): add_scales,
    ("granitehybrid", "falcon-h1"): add_mamba,
    ("granitehybrid",): add_kinds,
    ("command-r", "cohere2"): lambda writer, config: writer.add_logit_scale(config.logit_scale),
    ("deepseek2",): add_latent,
    ("exaone4", "exaone-moe", "olmo2"): add_windows,
    ("cohere2", "afmoe"): add_other_windows,
    ("nemotron_h", "nemotron_h_moe"): add_nemotron,
    ("lfm2", "lfm2moe"): add_convolutions,
    ("gemma3n",): add_gemma3n,
    ("stablelm",): lambda writer, config: writer.add_parallel_residual(True),  # whatever the model does
    ("gemma4",): add_gemma4,
    ("qwen3next", "qwen35", "qwen35moe"): add_recurrent,
}
