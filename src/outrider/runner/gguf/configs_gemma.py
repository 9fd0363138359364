"""Values of the configs of Gemma's architectures; see ``configs``."""

from __future__ import annotations

from functools import partial
from math import erf

from outrider.runner.gguf.architecture import Entry, Tensors, Values
from outrider.runner.gguf.configs import by_layer, expert_entries, required


def gemma2(entry: Entry, _: Tensors, values: Values) -> None:
    values["query_pre_attn_scalar"] = _gemma_scale(values, layers_of_the_largest=46)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[name] = entry(name)


def gemma3(entry: Entry, _: Tensors, values: Values) -> None:
    values["query_pre_attn_scalar"] = _gemma_scale(values, layers_of_the_largest=62)
    values["final_logit_softcapping"] = entry("final_logit_softcapping")
    if not entry("attention.sliding_window"):
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    values["rope_parameters"] = {
        "full_attention": values["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": entry("rope.freq_base_swa") or 1e4},
    }


def _gemma_scale(values: Values, layers_of_the_largest: int) -> int | None:
    """Return the number whose inverse square root scales attention scores. Files do not state it: llama.cpp takes the head
    size, except in the models of 27B, which it recognises by their number of layers.
    """
    if values["num_hidden_layers"] != layers_of_the_largest:
        return values.get("head_dim")
    return int(values["hidden_size"] // values["num_attention_heads"])


def gemma4(entry: Entry, tensors: Tensors, values: Values) -> None:
    needed = partial(required, entry)

    pattern = needed("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
    heads, widths = by_layer(entry, "attention.head_count_kv"), by_layer(entry, "feed_forward_length")
    full = kinds.index("full_attention")
    sliding = kinds.index("sliding_attention") if "sliding_attention" in kinds else full
    # Of each pair of rotated features the factor is 1, of the others 1e30.
    factors = tensors["rope_freqs.weight"].data
    values |= {
        "layer_types": kinds,
        "head_dim": needed("attention.key_length_swa"),
        "global_head_dim": needed("attention.key_length"),
        "num_key_value_heads": heads[sliding],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": entry("attention.shared_kv_layers"),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": len({*widths}) > 1,
        "hidden_size_per_layer_input": entry("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": values["vocab_size"],
        "final_logit_softcapping": entry("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": needed("rope.freq_base"),
                "partial_rotary_factor": float((factors == 1).mean()),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": needed("rope.freq_base_swa")},
        },
    }
    if entry("expert_count"):
        experts = expert_entries("num_experts", "moe_intermediate_size", chosen="top_k_experts")
        values |= {own: needed(name) for own, name in experts.items()}
        values["enable_moe_block"] = True


def gemma3n(entry: Entry, tensors: Tensors, values: Values) -> None:
    needed = partial(required, entry)
    sliding = needed("attention.sliding_window_pattern")
    scales = needed("activation_sparsity_scale")  # quantiles of the normal distribution, to which probabilities belong
    values |= {
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding],
        "sliding_window": needed("attention.sliding_window"),
        "num_kv_shared_layers": needed("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": needed("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": values["vocab_size"],
        "altup_num_inputs": needed("altup.num_inputs"),
        "altup_active_idx": needed("altup.active_idx"),
        "laurel_rank": tensors["blk.0.laurel_l.weight"].shape[0],
        "activation_sparsity_pattern": [round((1 + erf(scale / 2**0.5)) / 2, 6) for scale in scales],
        "final_logit_softcapping": entry("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": entry("rope.freq_base_swa") or 1e4},
        },
    }
