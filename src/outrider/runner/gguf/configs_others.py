"""Values of the configs of architectures that few models have; see ``configs``."""

from __future__ import annotations

from outrider.runner.gguf.architecture import Entry, Tensors, Values
from outrider.runner.gguf.configs import (
    PHI3_FACTORS,
    SIGMOID,
    add_experts,
    check_router,
    exaone4,
    has_bias,
    required,
    unscaled,
)


def apertus(_: Entry, tensors: Tensors, values: Values) -> None:
    values["attention_bias"] = has_bias(tensors)
    values.setdefault("rope_parameters", unscaled(values, 1.2e7))  # the config class defaults to Llama 3's factors


def phimoe(entry: Entry, tensors: Tensors, values: Values) -> None:
    if any(name in tensors for name in PHI3_FACTORS.values()):
        raise ValueError(
            "it lacks short_mscale and long_mscale of its longrope positions: put the model's config.json into the file's"
            " folder and pass the folder"
        )
    add_experts(entry, values, "num_local_experts")
    values |= {
        "sliding_window": entry("attention.sliding_window") or None,  # 0 means none
        "attention_bias": has_bias(tensors),
        "lm_head_bias": "output.bias" in tensors,
        "rope_parameters": unscaled(values, 1e4),
    }


def exaone_moe(entry: Entry, tensors: Tensors, values: Values) -> None:
    exaone4(entry, tensors, values)
    check_router(entry, SIGMOID)
    add_experts(entry, values, "num_experts", "moe_intermediate_size")
    values |= {
        "num_shared_experts": required(entry, "expert_shared_count"),
        "first_k_dense_replace": entry("leading_dense_block_count") or 0,
        "routed_scaling_factor": entry("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(entry("expert_weights_norm")),
        "n_group": entry("expert_group_count") or 1,
        "topk_group": entry("expert_group_used_count") or 1,
    }
    entry("expert_shared_feed_forward_length")  # that of all shared experts together


def jais2(entry: Entry, tensors: Tensors, values: Values) -> None:
    values |= {
        "layer_norm_eps": required(entry, "attention.layer_norm_epsilon"),
        "attention_bias": has_bias(tensors),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
