"""Values of transformers' configs from the entries of GGUF files: one function for each architecture.

transformers maps most entries by name, and ``architectures`` has further ones. These functions (``Architecture.complete``) add
values that depend on others or on tensors. They raise ``KeyError`` for a missing entry and ``ValueError`` for one that is not
supported. An entry that they read counts as understood.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from outrider.runner.gguf.architecture import Entry, Tensors, Values


def required(entry: Entry, name: str) -> Any:
    value = entry(name)
    if value is None:
        raise KeyError(name)
    return value


def add_positions(entry: Entry, values: Values, theta: float | None) -> None:
    """Add rotary positions, scaled linearly or by YaRN (Peng et al. 2023) if the entries state it.

    ``theta``: the base if they state none; None: the config class's own, and its own positions if they are not scaled.
    """
    kind, base = entry("rope.scaling.type"), entry("rope.freq_base")
    is_scaled = kind in ("linear", "yarn")
    if not is_scaled and theta is None:
        return
    values.pop("rope_theta", None)
    values["rope_parameters"] = positions = {"rope_type": kind if is_scaled else "default"}
    base = theta if base is None else base
    if base is not None:
        positions["rope_theta"] = base
    if is_scaled:
        positions["factor"] = required(entry, "rope.scaling.factor")
    if kind == "yarn":
        positions["original_max_position_embeddings"] = required(entry, "rope.scaling.original_context_length")
        names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
        found = {own: entry(f"rope.scaling.{name}") for name, own in names.items()}
        positions |= {own: value for own, value in found.items() if value is not None}


def by_layer(entry: Entry, name: str) -> list[Any]:
    """Return a needed entry that states a number for each layer, or one for all. Raises ``ValueError`` for another length."""
    value, num_layers = required(entry, name), required(entry, "block_count")
    if isinstance(value, list) and len(value) != num_layers:
        raise ValueError(f"{name} has {len(value)} numbers, expected {num_layers}")
    return value if isinstance(value, list) else [value] * num_layers


def layer_types_of(entry: Entry, values: Values, full_attention_every: int) -> list[str]:
    """Return the type of each layer. Without a pattern in the file, every ``full_attention_every``-th one has full attention,
    and the others a sliding window.
    """
    pattern = entry("attention.sliding_window_pattern") or full_attention_every
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern > 0 for layer in range(values["num_hidden_layers"])]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]


PHI3_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def phi3(entry: Entry, tensors: Tensors, values: Values) -> None:
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    rotated = (entry("rope.dimension_count") or head_dim) / head_dim
    if not 0 < rotated <= 1:
        raise ValueError(f"rope.dimension_count is {rotated:g} times the head size")
    values["sliding_window"] = entry("attention.sliding_window") or None  # 0 means none
    values["original_max_position_embeddings"] = entry("rope.scaling.original_context_length")
    values["rope_parameters"]["partial_rotary_factor"] = rotated
    if entry("rope.scaling.type") == "longrope" or any(name in tensors for name in PHI3_FACTORS.values()):
        values["rope_parameters"] |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": values["original_max_position_embeddings"],
            "attention_factor": entry("rope.scaling.attn_factor"),
            **{key: tensors[name].data.tolist() for key, name in PHI3_FACTORS.items()},
        }


def mistral3(entry: Entry, _: Tensors, values: Values) -> None:
    positions = values["rope_parameters"]
    positions["llama_4_scaling_beta"] = entry("attention.temperature_scale") or 0.0  # 0 in Mistral Small 3
    positions.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    if positions["rope_type"] == "yarn":
        positions |= {"mscale": 1.0, "mscale_all_dim": entry("rope.scaling.yarn_log_multiplier") or 0.0}


def granite(entry: Entry, _: Tensors, values: Values) -> None:
    if entry("rope.scaling.finetuned") is False:  # llama.cpp's switch of rotary positions in Granite 4
        raise ValueError("attention without rotary positions, which is not supported")
    if entry("expert_count"):
        raise ValueError("experts, which are not supported in this architecture")
    values["num_key_value_heads"] = max(by_layer(entry, "attention.head_count_kv"))
    # Granite 4 without recurrent layers states the width as that of an expert which all tokens share.
    values["intermediate_size"] = entry("expert_shared_feed_forward_length") or values["intermediate_size"]


def lfm2(entry: Entry, _: Tensors, values: Values) -> None:
    heads = required(entry, "attention.head_count_kv")  # by layer: 0 where it is a convolution
    if not isinstance(heads, list) or len(heads) != values["num_hidden_layers"] or not any(heads):
        raise ValueError(f"attention.head_count_kv={heads}, expected a number for each layer")
    values |= {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_L_cache": required(entry, "shortconv.l_cache"),
        "norm_eps": values.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,  # the file states the width after the adjustment
    }


def expert_entries(count: str, width: str = "", chosen: str = "num_experts_per_tok") -> dict[str, str]:
    """Return the entries with the number of experts, of those chosen for a token, and their width, by names in the config."""
    names = {count: "expert_count", chosen: "expert_used_count", width: "expert_feed_forward_length"}
    return {own: name for own, name in names.items() if own}


SOFTMAX, SIGMOID = 1, 2  # llama.cpp's codes of what a router does with its scores


def has_sigmoids(entry: Entry, tensors: Tensors) -> bool:
    """Return whether a router takes sigmoids. Files that do not say so are known by the bias which only such routers have."""
    kind = entry("expert_gating_func")
    return kind == SIGMOID or (not kind and has_expert_bias(tensors))


def has_expert_bias(tensors: Tensors) -> bool:
    return any(name.endswith("exp_probs_b.bias") for name in tensors)


def check_router(entry: Entry, expected: int) -> None:
    kind = entry("expert_gating_func") or expected
    if kind != expected:
        raise ValueError(f"expert_gating_func={kind}, expected {expected}")


def partial_rotary(entry: Entry, _: Tensors, values: Values) -> None:
    """Add the part of a head's features that positions rotate."""
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    values["rope_parameters"]["partial_rotary_factor"] = required(entry, "rope.dimension_count") / values["head_dim"]


def deepseek_v3(entry: Entry, _: Tensors, values: Values) -> None:
    """Add the sizes of attention over a latent. Head sizes in files are those of one shared head over the latent."""
    rotated, needed = required(entry, "rope.dimension_count"), partial(required, entry)
    size = entry("attention.key_length_mla") or needed("attention.key_length")
    width = needed("attention.value_length")  # of the latent where the next entry is
    values |= {
        "num_key_value_heads": values["num_attention_heads"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": entry("attention.value_length_mla") or width,
        "q_lora_rank": entry("attention.q_lora_rank"),
        "kv_lora_rank": needed("attention.kv_lora_rank"),
        "rope_interleave": True,
    }
    if values.get("rope_parameters", {}).get("rope_type") == "yarn":
        scale = (entry("rope.scaling.yarn_log_multiplier") or 0.0) / 0.1  # the converter multiplies it by 0.1
        values["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}


def deepseek_v2(entry: Entry, tensors: Tensors, values: Values) -> None:
    deepseek_v3(entry, tensors, values)
    values["topk_method"] = "greedy" if values["n_group"] == 1 else "group_limited_greedy"


def granitehybrid(entry: Entry, _: Tensors, values: Values) -> None:
    """Granite 4: layers of Mamba 2 and of attention, with a dense network beside the experts, or without experts."""
    _add_recurrent(entry, values, *MAMBA2)
    heads = by_layer(entry, "attention.head_count_kv")  # 0 where a layer is recurrent
    values |= {
        "num_key_value_heads": max(heads),
        "layer_types": ["attention" if number else "mamba" for number in heads],
        "mamba_expand": entry("ssm.inner_size") // values["hidden_size"],
        "num_local_experts": entry("expert_count") or 0,
        "num_experts_per_tok": entry("expert_used_count") or 0,
        "shared_intermediate_size": required(entry, "expert_shared_feed_forward_length"),
        "position_embedding_type": "nope" if entry("rope.scaling.finetuned") is False else "rope",  # llama.cpp's switch
    }


def _add_recurrent(entry: Entry, values: Values, heads: str, head_dim: str, state: str, groups: str, conv: str) -> None:
    """Add the sizes of Mamba 2 or of the delta rule: ``heads`` ... are their names in the config."""
    needed = partial(required, entry)
    values[heads] = needed("ssm.time_step_rank")
    values[head_dim] = needed("ssm.inner_size") // values[heads]
    values |= {state: needed("ssm.state_size"), groups: needed("ssm.group_count"), conv: needed("ssm.conv_kernel")}


DELTA = (
    *("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    *("linear_num_key_heads", "linear_conv_kernel_dim"),
)
MAMBA2 = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def nemotron_h(entry: Entry, _: Tensors, values: Values) -> None:
    """Nemotron: each layer is one of Mamba 2, attention, experts, or a dense network."""
    needed, num_layers = partial(required, entry), values.pop("num_hidden_layers")
    heads, widths = by_layer(entry, "attention.head_count_kv"), by_layer(entry, "feed_forward_length")
    dense = "moe" if entry("expert_count") else "mlp"
    kinds = zip(heads[:num_layers], widths[:num_layers], strict=True)
    _add_recurrent(entry, values, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    values |= {
        "layer_types": ["full_attention" if number else dense if width else "linear_attention" for number, width in kinds],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "layer_norm_epsilon": entry("attention.layer_norm_epsilon") or needed("attention.layer_norm_rms_epsilon"),
        "moe_latent_size": entry("moe_latent_size"),
    }


def exaone4(entry: Entry, _: Tensors, values: Values) -> None:
    """Add which layers have a window, by default none."""
    values["sliding_window"] = entry("attention.sliding_window") or None
    values["layer_types"] = layer_types_of(entry, values, full_attention_every=1)


def olmo3(entry: Entry, tensors: Tensors, values: Values) -> None:
    exaone4(entry, tensors, values)
    full = values["rope_parameters"]
    sliding = {"rope_type": "default", "rope_theta": entry("rope.freq_base_swa") or full["rope_theta"]}
    values["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}


def lfm2moe(entry: Entry, tensors: Tensors, values: Values) -> None:
    lfm2(entry, tensors, values)
    values["use_expert_bias"] = has_expert_bias(tensors)


def qwen35(entry: Entry, tensors: Tensors, values: Values) -> None:
    add_delta(entry, tensors, values)
    sections = [section for section in required(entry, "rope.dimension_sections") if section]
    values["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}


def add_delta(entry: Entry, tensors: Tensors, values: Values) -> None:
    """Add the layers of Qwen3-Next and 3.5: those with the delta rule, and those of attention."""
    kinds = {True: "linear_attention", False: "full_attention"}
    num_layers, period = values["num_hidden_layers"], required(entry, "full_attention_interval")
    recurrent = entry("attention.recurrent_layers") or [(layer + 1) % period > 0 for layer in range(num_layers)]
    values["layer_types"] = [kinds[bool(is_recurrent)] for is_recurrent in recurrent[:num_layers]]
    _add_recurrent(entry, values, *DELTA)
    partial_rotary(entry, tensors, values)


def gpt_oss(_: Entry, __: Tensors, values: Values) -> None:
    # The config class defaults to YaRN. The public models set ``truncate`` to false, which files do not state.
    values["rope_parameters"]["truncate"] = False


def cohere2(entry: Entry, _: Tensors, values: Values) -> None:
    values["layer_types"] = layer_types_of(entry, values, full_attention_every=4)


def hunyuan_moe(entry: Entry, _: Tensors, values: Values) -> None:
    shared, widths = entry("expert_shared_count"), [entry(f"expert_{kind}feed_forward_length") for kind in ("", "shared_")]
    if shared != 1 or widths != [values["intermediate_size"]] * 2:
        raise ValueError(f"{shared} shared experts, widths of experts {widths}: expected one, all as wide as a dense layer")


def afmoe(entry: Entry, _: Tensors, values: Values) -> None:
    if not entry("expert_weights_norm"):
        raise ValueError("expert_weights_norm is not set, expected shares of experts that add up to 1")
    groups = [entry(f"expert_group_{name}") or 1 for name in ("count", "used_count")]
    if groups != [1, 1]:  # which transformers' model does not have
        raise ValueError(f"experts in {groups[0]} groups, {groups[1]} of them chosen: expected no groups")
    values["layer_types"] = layer_types_of(entry, values, full_attention_every=4)


def falcon_h1(entry: Entry, _: Tensors, values: Values) -> None:
    _add_recurrent(entry, values, *MAMBA2)
    values["mamba_d_ssm"] = entry("ssm.inner_size")


def stablelm(entry: Entry, tensors: Tensors, values: Values) -> None:
    values["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors  # like llama.cpp, which does not read the entry
    partial_rotary(entry, tensors, values)


def phimoe(entry: Entry, tensors: Tensors, values: Values) -> None:
    if any(name in tensors for name in PHI3_FACTORS.values()):
        raise ValueError(
            "it lacks short_mscale and long_mscale of its longrope positions: put the model's config.json into the file's"
            " folder and pass the folder"
        )
    values["sliding_window"] = entry("attention.sliding_window") or None  # 0 means none
