"""GGUF files of tiny models, written with the gguf package, and models with the values stored in the files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from architectures.tiny import randomised
from gguf import GGMLQuantizationType as Kind
from tiny_folder import CHAT_TEMPLATE, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
}
RECURRENT = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 8.0, "original_max_position_embeddings": 32}
CONFIGS: Mapping[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaConfig(**SHAPE | {"head_dim": 64, "rope_theta": 5e5} | more),
    "qwen2": lambda **more: Qwen2Config(**SHAPE | {"rope_theta": 2e4} | more),
    "qwen3": lambda **more: Qwen3Config(**SHAPE | {"head_dim": 64, "rope_theta": 1e6} | more),
    "gemma2": lambda **more: Gemma2Config(
        **SHAPE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "attn_logit_softcapping": 20.0} | more
    ),
    "gemma3": lambda **more: Gemma3TextConfig(
        **SHAPE | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "num_hidden_layers": 6} | more
    ),
    "gemma4": lambda **more: Gemma4TextConfig(
        **SHAPE
        | {"head_dim": 64, "global_head_dim": 128, "sliding_window": 8, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": SHAPE["vocab_size"]}
        | more
    ),
    "gemma4 with experts": lambda **more: CONFIGS["gemma4"](
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256} | more
    ),
    "phi3": lambda **more: Phi3Config(
        **SHAPE | {"pad_token_id": 0, "sliding_window": 8, "partial_rotary_factor": 0.75, "rope_theta": 2e4} | more
    ),
    "qwen3moe": lambda **more: Qwen3MoeConfig(
        **SHAPE
        | {"head_dim": 64, "rope_theta": 1e6, "norm_topk_prob": True}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        | more
    ),
    "qwen35": lambda **more: Qwen3_5TextConfig(**SHAPE | RECURRENT | more),
    "qwen35moe": lambda **more: Qwen3_5MoeTextConfig(
        **SHAPE
        | RECURRENT
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
        | more
    ),
    "mistral3": lambda **more: Ministral3Config(
        **SHAPE
        | {"head_dim": 64}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.125}}
        | more
    ),
    "granite": lambda **more: GraniteConfig(
        **SHAPE
        | {"rope_theta": 2e4, "attention_multiplier": 0.1, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.5, "logits_scaling": 2.0}
        | more
    ),
    "smollm3": lambda **more: SmolLM3Config(**SHAPE | {"pad_token_id": 0, "num_hidden_layers": 4, "rope_theta": 2e4} | more),
    "olmo2": lambda **more: Olmo2Config(**SHAPE | {"pad_token_id": 0, "rope_theta": 2e4} | more),
    "lfm2": lambda **more: Lfm2Config(
        **SHAPE
        | {"pad_token_id": 0, "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
        | {"layer_types": ["conv", "full_attention", "conv"], "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
        | more
    ),
    "gpt-oss": lambda **more: GptOssConfig(
        **SHAPE
        | {"head_dim": 64, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}}
        | more
    ),
}
ARCHITECTURES = {  # llama.cpp's names where they differ
    "qwen3_moe": "qwen3moe",
    "ministral3": "mistral3",
    "gpt_oss": "gpt-oss",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
TURNED = ("llama", "mistral3", "granite", "smollm3")  # llama.cpp interleaves the halves of their heads
# Offsets of the float16 scales in the bytes of a block, and their size for weights of usual magnitude.
SCALES = {
    Kind.Q2_K: {80: 6e-3, 82: 5e-3},
    Kind.Q3_K: {108: 9e-4},
    Kind.Q4_K: {0: 2.5e-4, 2: 1.5e-3},
    Kind.Q5_K: {0: 1.2e-4, 2: 1.5e-3},
    Kind.Q6_K: {208: 3e-5},
}


def mixed(name: str) -> Kind:
    """Return the type of a tensor as in Q4_K_M files: 6 bits for sensitive ones, 4 bits for the others."""
    return Kind.Q6_K if any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.weight")) else Kind.Q4_K


def make_model(architecture: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random float32 model whose greedy tokens vary."""
    torch.manual_seed(seed)
    return randomised(AutoModelForCausalLM.from_config(CONFIGS[architecture](**config), dtype=torch.float32), std=0.8)


def write(
    path: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], Kind],
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    without: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Write a model, each matrix in the type given by ``kind_of`` its name. Returns a copy with the values of the file.

    K types have random codes, because the package cannot quantise to them. ``change`` adds entries or tensors before writing.
    """
    config, model_type = model.config, model.config.model_type.removesuffix("_text")
    architecture = ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, architecture)
    add_entries(writer, architecture, config)
    if change is not None:
        change(writer)
    exact = copy.deepcopy(model)
    values = exact.state_dict()
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    rng = np.random.default_rng(0)
    for own, name, weight, value in file_tensors(names, model.state_dict(), values):
        base = own.rpartition(".")[0]
        if (own == "lm_head.weight" and config.tie_word_embeddings) or name in without:
            continue
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(base.rpartition(".")[2])
        turned = getattr(config, heads) if heads and architecture in TURNED else None
        array = weight.contiguous().numpy()
        order = value_heads(own, array, config)
        if order is not None:
            array = np.take(array, *order)
        if (
            array.ndim < 2
            or name.endswith(".bias")
            or "ffn_gate_inp" in name
            or "conv" in name.rpartition(".")[0].rpartition(".")[2]
        ):
            adds_one = (
                architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe") and "norm" in own and "linear_attn" not in own
            )
            shift = np.float32(adds_one)  # these multiply by 1 + weight
            stored = -np.exp(array) if name.endswith("ssm_a") else array + shift
            writer.add_tensor(name, stored.squeeze(1) if "conv" in name and stored.ndim == 3 else stored)
            back = np.log(-stored) if name.endswith("ssm_a") else stored - shift
            value.copy_(torch.from_numpy(back if order is None else np.take(back, np.argsort(order[0]), order[1])))
            continue
        kind = kind_of(name)
        if turned:
            array = array.reshape(turned, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        data = random_codes(array.shape, kind, rng) if kind in SCALES else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        decoded = gguf.quants.dequantize(data, kind).astype(np.float32)
        if turned:
            decoded = decoded.reshape(turned, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        value.copy_(torch.from_numpy(decoded if order is None else np.take(decoded, np.argsort(order[0]), order[1])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def file_tensors(
    names: gguf.TensorNameMap, weights: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Return the model's name, the file's name, the weight and a place for its value, for every tensor of a file.

    Of experts, weight and place are views in the layout of files: gate and up projection are a tensor each.
    """
    for own, weight in weights.items():
        base, _, suffix = own.rpartition(".")
        if suffix in ("scale", "per_expert_scale"):  # of Gemma 4's router
            stem = base.replace("model.layers", "blk").removesuffix("router")
            yield own, f"{stem}{'ffn_gate_inp' if suffix == 'scale' else 'ffn_down_exps'}.scale", weight, values[own]
            continue
        if suffix in ("A_log", "dt_bias"):
            stem = base.replace("model.layers", "blk").replace("linear_attn", "ssm")
            yield own, f"{stem}_{'a' if suffix == 'A_log' else 'dt.bias'}", weight, values[own]
            continue
        if ".experts." not in own:
            is_buffer = suffix in ("layer_scalar", "sinks")
            yield own, f"{names.get_name(own)}.weight" if is_buffer else f"{names.get_name(base)}.{suffix}", weight, values[own]
            continue
        if ".mlp." not in base:  # Gemma 4's: gate and up projection are one tensor
            yield own, f"{names.get_name(own)}.weight", weight, values[own]
            continue
        part, ending = suffix.split("_proj")
        stem = names.get_name(f"{base}.down_proj").removesuffix("down_exps")
        views = [weight, values[own]]
        is_gpt_oss = f"{base}.down_proj_bias" in weights  # which has inputs first, and alternates gate and up
        if is_gpt_oss and not ending:
            views = [view.transpose(1, 2) for view in views]
        halves = [[view] for view in views]
        if part == "gate_up":
            halves = [[view[:, ::2], view[:, 1::2]] if is_gpt_oss else [*view.chunk(2, 1)] for view in views]
        for name, source, place in zip(("gate", "up") if part == "gate_up" else ("down",), *halves, strict=True):
            yield own, f"{stem}{name}_exps.{'bias' if ending else 'weight'}", source, place


def value_heads(own: str, array: np.ndarray, config: Any) -> tuple[np.ndarray, int] | None:
    """Return the order of rows or columns of a Qwen3.5 tensor in files, and the axis; None for tensors in their own order.

    In files the first value heads of all key heads come first, then the second ones.
    """
    part = own.rpartition("linear_attn.")[2]
    size = getattr(config, "linear_value_head_dim", 1)
    sizes = dict.fromkeys(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"), 1)
    sizes |= dict.fromkeys(("in_proj_z.weight", "in_proj_qkv.weight", "conv1d.weight", "out_proj.weight"), size)
    if part == own or part not in sizes:
        return None
    keys, heads, axis = config.linear_num_key_heads, config.linear_num_value_heads, int(part == "out_proj.weight")
    order = [key * heads // keys + which for which in range(heads // keys) for key in range(keys)]
    index = np.add.outer(np.array(order) * sizes[part], np.arange(sizes[part])).ravel()
    start = array.shape[axis] - len(index)  # rows of queries and keys
    return np.concatenate([np.arange(start), start + index]), axis


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
    writer.add_head_count_kv(told["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(told.get("rms_norm_eps") or config.norm_eps)
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    if architecture != "gemma2":  # llama.cpp's converter leaves it out
        writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rotary.get("partial_rotary_factor", 1)))
    if rotary["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    add_yarn(writer, rotary)
    add_recurrent(writer, architecture, config)
    add_experts(writer, architecture, config)
    for name, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "pad_token_id": writer.add_pad_token_id,
    }.items():
        if getattr(config, name, None) is not None:
            add(getattr(config, name))
    if architecture == "phi3" or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        writer.add_sliding_window(config.sliding_window or 0)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "granite":
        add_scales(writer, config)
    if architecture == "lfm2":
        writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture == "gemma4":
        add_gemma4(writer, config)
    add_tokenizer(writer)


def add_scales(writer: gguf.GGUFWriter, config: GraniteConfig) -> None:
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
        "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        "mscale_all_dim": writer.add_rope_scaling_yarn_log_mul,
        "llama_4_scaling_beta": writer.add_attn_temperature_scale,
    }.items():
        if rotary["rope_type"] == "yarn" and name in rotary:
            add(rotary[name])


def add_recurrent(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    """Add the sizes of Qwen3.5's recurrent layers."""
    if architecture in ("qwen35", "qwen35moe"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])


def add_experts(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    """Add the sizes of a mixture's layers."""
    if architecture == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    told = config.to_dict()
    chosen = told.get("num_experts_per_tok") or told.get("top_k_experts")
    if chosen is not None:
        writer.add_expert_count(config.num_local_experts if architecture == "gpt-oss" else config.num_experts)
        writer.add_expert_used_count(chosen)
        writer.add_expert_feed_forward_length(told.get("moe_intermediate_size") or config.intermediate_size)


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


def random_codes(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Return bytes of random codes with scales of usual size."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at, largest in SCALES[kind].items():
        raw[..., at : at + 2] = rng.uniform(0.5, 1, (*raw.shape[:-1], 1)).astype(np.float16).view(np.uint8)
        half = raw[..., at : at + 2].copy().view(np.float16) * np.float16(largest * 16 / shape[-1] ** 0.5)
        raw[..., at : at + 2] = half.astype(np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


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
