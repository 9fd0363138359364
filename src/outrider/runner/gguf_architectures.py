"""Configs of transformers from the entries of GGUF files: one record for each supported architecture of llama.cpp.

transformers maps most entries by name. Here are the entries that it ignores, and values that files leave out because
llama.cpp's code fixes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

EXPERT_TENSOR = re.compile(r"(blk\.\d+\.ffn_)(gate|up|down)_exps\.(weight|bias)")
Array = np.ndarray[Any, Any]
Values = dict[str, Any]  # arguments of a config class of transformers
Entry = Callable[[str], Any]  # name without the architecture -> its value, or None


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    model_type: str  # transformers' name
    entries: str = "(?!)"  # pattern of the entries that ``complete`` reads; no entry by default
    complete: Callable[[Entry, Mapping[str, Any], Values], None] | None = None  # (entries, tensors, values): adds values
    config_tensors: tuple[str, ...] = ()  # tensors that belong to the config
    scalings: tuple[str, ...] = ("linear", "yarn")  # the supported kinds of scaled rotary positions
    changes_like: str = ""  # the architecture whose changes of tensors transformers undoes, if not its own
    renamed: Mapping[str, str] = field(default_factory=dict)  # patterns of tensors that transformers does not map -> names
    restore: Callable[[Array, str, Any], Array] | None = None  # (rows, tensor, config): undoes changes instead of transformers
    input_order: Callable[[str, Any], Array | None] = lambda *_: None  # (tensor, config): the input of each column

    def own_name(self, name: str, known: Mapping[str, str]) -> str:
        """Return the model's name of a tensor, "" for an unknown tensor. ``known``: the names that transformers maps."""
        for pattern, own in self.renamed.items():
            if re.fullmatch(pattern, name):
                return re.sub(pattern, own, name)
        expert = EXPERT_TENSOR.fullmatch(name)
        if expert and f"{expert[1]}down_exps" in known:  # the only one of them that transformers maps
            part, ending = "down" if expert[2] == "down" else "gate_up", "_bias" if expert[3] == "bias" else ""
            return f"{known[f'{expert[1]}down_exps'].removesuffix('down_proj')}{part}_proj{ending}"
        return known.get(name) or known.get(name.removesuffix(".weight")) or ""  # a buffer's name has no such ending


def _needed(entry: Entry, name: str) -> Any:
    value = entry(name)
    if value is None:
        raise KeyError(name)
    return value


def add_scaling(entry: Entry, values: Values) -> None:
    """Add rotary positions that are scaled linearly or by YaRN (Peng et al. 2023), if the entries state them."""
    kind = entry("rope.scaling.type")
    if kind not in ("linear", "yarn"):
        return
    theta = {"rope_theta": values.pop("rope_theta")} if "rope_theta" in values else {}
    values["rope_parameters"] = scaling = {"rope_type": kind, "factor": _needed(entry, "rope.scaling.factor"), **theta}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _needed(entry, "rope.scaling.original_context_length")
        betas = {name: entry(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling |= {name: value for name, value in betas.items() if value is not None}


def _gemma2(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    values["query_pre_attn_scalar"] = _gemma_scale(values, layers_of_the_largest=46)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[name] = entry(name)


def _gemma3(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    values["query_pre_attn_scalar"] = _gemma_scale(values, layers_of_the_largest=62)
    values["final_logit_softcapping"] = entry("final_logit_softcapping")
    if not entry("attention.sliding_window"):
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    full = {"rope_type": "default", "rope_theta": values.pop("rope_theta", 1e6)}
    values["rope_parameters"] = {
        "full_attention": full | values.get("rope_parameters", {}),
        "sliding_attention": {"rope_type": "default", "rope_theta": entry("rope.freq_base_swa") or 1e4},
    }


def _gemma_scale(values: Values, layers_of_the_largest: int) -> int | None:
    """Return the number whose inverse square root scales attention scores. Files do not state it: llama.cpp takes the head
    size, except in the models of 27B, which it recognises by their number of layers.
    """
    if values["num_hidden_layers"] != layers_of_the_largest:
        return values.get("head_dim")
    return int(values["hidden_size"] // values["num_attention_heads"])


def _gemma4(entry: Entry, tensors: Mapping[str, Any], values: Values) -> None:
    needed = partial(_needed, entry)

    def by_layer(name: str) -> list[int]:
        value = needed(name)
        if isinstance(value, list) and len(value) != len(kinds):
            raise ValueError(f"{name} has {len(value)} numbers, expected {len(kinds)}")
        return value if isinstance(value, list) else [value] * len(kinds)

    pattern = needed("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
    heads, widths = by_layer("attention.head_count_kv"), by_layer("feed_forward_length")
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
        _add_experts(entry, values, "num_experts", "moe_intermediate_size", chosen="top_k_experts")
        values["enable_moe_block"] = True


PHI3_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def _phi3(entry: Entry, tensors: Mapping[str, Any], values: Values) -> None:
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    rotated = (entry("rope.dimension_count") or head_dim) / head_dim
    if not 0 < rotated <= 1:
        raise ValueError(f"rope.dimension_count is {rotated:g} times the head size")
    values["sliding_window"] = entry("attention.sliding_window") or None  # 0 means none
    values["original_max_position_embeddings"] = entry("rope.scaling.original_context_length")
    theta = values.pop("rope_theta", 1e4)
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated}
    if entry("rope.scaling.type") == "longrope" or any(name in tensors for name in PHI3_FACTORS.values()):
        values["rope_parameters"] |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": values["original_max_position_embeddings"],
            "attention_factor": entry("rope.scaling.attn_factor"),
            **{key: tensors[name].data.tolist() for key, name in PHI3_FACTORS.items()},
        }


def _mistral3(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    positions = values.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": values.pop("rope_theta", 1e4)})
    positions["llama_4_scaling_beta"] = entry("attention.temperature_scale") or 0.0  # 0 in Mistral Small 3
    positions.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    if positions["rope_type"] == "yarn":
        positions |= {"mscale": 1.0, "mscale_all_dim": entry("rope.scaling.yarn_log_multiplier") or 0.0}


def _granite(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    if entry("rope.scaling.finetuned") is False:  # llama.cpp's switch of rotary positions in Granite 4
        raise ValueError("attention without rotary positions, which is not supported")
    values |= {
        "attention_multiplier": _needed(entry, "attention.scale"),
        "embedding_multiplier": entry("embedding_scale") or 1.0,
        "residual_multiplier": entry("residual_scale") or 1.0,
        "logits_scaling": entry("logit_scale") or 1.0,
    }


def _lfm2(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    heads = _needed(entry, "attention.head_count_kv")  # by layer: 0 where it is a convolution
    if not isinstance(heads, list) or len(heads) != values["num_hidden_layers"] or not any(heads):
        raise ValueError(f"attention.head_count_kv={heads}, expected a number for each layer")
    values |= {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_L_cache": _needed(entry, "shortconv.l_cache"),
        "norm_eps": values.pop("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,  # the file states the width after the adjustment
        "rope_parameters": {"rope_type": "default", "rope_theta": values.pop("rope_theta", 1e6)},
    }


EXPERT_ENTRIES = r"expert_(count|used_count|feed_forward_length)"


def _add_experts(entry: Entry, values: Values, count: str, width: str, chosen: str = "num_experts_per_tok") -> None:
    """Add what ``EXPERT_ENTRIES`` state: ``count``, ``chosen`` and ``width`` are their names in the config."""
    names = {"count": count, "used_count": chosen, "feed_forward_length": width}
    values |= {own: _needed(entry, f"expert_{name}") for name, own in names.items()}


def _qwen35(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    needed = partial(_needed, entry)
    kinds = {True: "linear_attention", False: "full_attention"}
    num_layers = values["num_hidden_layers"] - (entry("nextn_predict_layers") or 0)  # the last ones are an MTP head
    period = needed("full_attention_interval")
    recurrent = entry("attention.recurrent_layers") or [(layer + 1) % period > 0 for layer in range(num_layers)]
    heads = needed("ssm.time_step_rank")
    values |= {
        "num_hidden_layers": num_layers,
        "layer_types": [kinds[bool(is_recurrent)] for is_recurrent in recurrent[:num_layers]],
        "linear_conv_kernel_dim": needed("ssm.conv_kernel"),
        "linear_key_head_dim": needed("ssm.state_size"),
        "linear_num_key_heads": needed("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": needed("ssm.inner_size") // heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": values.pop("rope_theta", 1e7),
            "partial_rotary_factor": needed("rope.dimension_count") / values["head_dim"],
            "mrope_section": [section for section in needed("rope.dimension_sections") if section],
            "mrope_interleaved": True,
        },
    }


def _qwen35moe(entry: Entry, tensors: Mapping[str, Any], values: Values) -> None:
    _qwen35(entry, tensors, values)
    _add_experts(entry, values, "num_experts", "moe_intermediate_size")
    values["shared_expert_intermediate_size"] = _needed(entry, "expert_shared_feed_forward_length")


def _restore_qwen35(rows: Array, name: str, config: Any) -> Array:
    """Undo what llama.cpp's converter does: it adds 1 to norms, stores A instead of its logarithm, and separates the value
    heads of a key head (see ``_by_key_head``). Those of ``ssm_out`` are columns; in quantised rows they stay where they are.
    """
    part, size = re.sub(r"^blk\.\d+\.", "", name), config.linear_value_head_dim
    by_key_head = partial(_by_key_head, config=config)
    if part.endswith("norm.weight") and part != "ssm_norm.weight":
        return np.subtract(rows, 1, dtype=rows.dtype)
    if part == "ssm_a":
        return by_key_head(np.log(-rows), 1)
    if part in ("ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return by_key_head(rows, 1)
    if part == "attn_gate.weight":
        return by_key_head(rows, size)
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        num_other = 2 * config.linear_key_head_dim * config.linear_num_key_heads  # rows of queries and keys
        turned = np.concatenate([rows[:num_other], by_key_head(rows[num_other:], size)])
        return turned[:, None] if part == "ssm_conv1d.weight" else turned
    if part == "ssm_out.weight":
        inputs = config.linear_num_value_heads * size
        numbers = rows.view(np.uint16) if rows.shape[1] == 2 * inputs else rows  # bfloat16 comes in bytes
        is_plain = numbers.shape[1] == inputs  # otherwise in blocks
        return np.ascontiguousarray(by_key_head(numbers.T, size).T).view(rows.dtype) if is_plain else rows
    return rows.reshape(1, -1) if part == "ffn_gate_inp_shexp.weight" else rows


def _by_key_head(rows: Array, size: int, config: Any) -> Array:
    """Order value heads of ``size`` rows by their key head: files have the first of every key head, then the second ..."""
    turned = rows.reshape(-1, config.linear_num_key_heads, size, *rows.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(turned).reshape(rows.shape)


def _inputs_of_qwen35(name: str, config: Any) -> Array | None:
    heads, keys, size = config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim
    if not name.endswith("ssm_out.weight") or heads == keys:
        return None
    return np.arange(heads * size).reshape(keys, heads // keys, size).swapaxes(0, 1).reshape(-1)


QWEN35 = (
    r"full_attention_interval|ssm\.(conv_kernel|state_size|group_count|time_step_rank|inner_size)|nextn_predict_layers"
    r"|rope\.dimension_sections|attention\.recurrent_layers"
)
QWEN35_CHANGES: dict[str, Any] = {
    "scalings": (),
    "renamed": {r"blk\.(\d+)\.ssm_dt\.bias": r"model.layers.\1.linear_attn.dt_bias"},
    "restore": _restore_qwen35,
    "input_order": _inputs_of_qwen35,
}


def _gpt_oss(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    _add_experts(entry, values, "num_local_experts", "intermediate_size")
    values["sliding_window"] = _needed(entry, "attention.sliding_window")
    # The config class defaults to YaRN. The public models set ``truncate`` to false, which files do not state.
    plain = {"rope_type": "default", "rope_theta": values.pop("rope_theta", 1.5e5)}
    values["rope_parameters"] = values.get("rope_parameters", plain) | {"truncate": False}


def _qwen3moe(entry: Entry, _: Mapping[str, Any], values: Values) -> None:
    _add_experts(entry, values, "num_experts", "moe_intermediate_size")
    values["norm_topk_prob"] = True  # llama.cpp's code makes the shares of the chosen experts add up to 1


ARCHITECTURES = {
    "llama": Architecture("llama"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", EXPERT_ENTRIES, _qwen3moe),
    "gemma2": Architecture("gemma2", r"(attn|final)_logit_softcapping|attention\.sliding_window", _gemma2),
    "gemma3": Architecture("gemma3_text", r"final_logit_softcapping|attention\.sliding_window|rope\.freq_base_swa", _gemma3),
    "gemma4": Architecture(
        "gemma4_text",
        r"attention\.(sliding_window(_pattern)?|(key|value)_length_swa|shared_kv_layers)|embedding_length_per_layer_input"
        rf"|rope\.(freq_base_swa|dimension_count_swa)|final_logit_softcapping|{EXPERT_ENTRIES}",
        _gemma4,
        scalings=(),
        renamed={
            r"blk\.(\d+)\.ffn_gate_inp\.scale": r"model.layers.\1.router.scale",
            r"blk\.(\d+)\.ffn_down_exps\.scale": r"model.layers.\1.router.per_expert_scale",
        },
    ),
    "phi3": Architecture(
        "phi3",
        r"attention\.sliding_window|rope\.scaling\.attn_factor",
        _phi3,
        tuple(PHI3_FACTORS.values()),
        ("longrope",),
    ),
    "mistral3": Architecture(
        "ministral3", r"attention\.temperature_scale|rope\.scaling\.yarn_log_multiplier", _mistral3, changes_like="llama"
    ),
    "granite": Architecture("granite", r"attention\.scale|(embedding|residual|logit)_scale", _granite, changes_like="llama"),
    "smollm3": Architecture("smollm3", changes_like="llama"),
    "olmo2": Architecture("olmo2"),
    "lfm2": Architecture("lfm2", r"shortconv\.l_cache", _lfm2, scalings=()),
    "qwen35": Architecture("qwen3_5_text", QWEN35, _qwen35, **QWEN35_CHANGES),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", rf"{QWEN35}|{EXPERT_ENTRIES}|expert_shared_feed_forward_length", _qwen35moe, **QWEN35_CHANGES
    ),
    "gpt-oss": Architecture("gpt_oss", rf"{EXPERT_ENTRIES}|attention\.sliding_window", _gpt_oss),
}
