"""Undo what llama.cpp's converter changes in tensors, where transformers does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from outrider.runner.gguf.architecture import BLOCK, Array, name_in_layer


def restore_qwen35(rows: Array, name: str, config: Any) -> Array:
    """Undo what llama.cpp's converter does: it adds 1 to norms, stores A instead of its logarithm, and separates the value
    heads of a key head (see ``_by_key_head``). Those of ``ssm_out`` are columns; in quantised rows they stay where they are.
    """
    part, size = name_in_layer(name), config.linear_value_head_dim
    by_key_head = partial(_by_key_head, config=config)
    if part in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return by_key_head(np.log(-rows) if part == "ssm_a" else rows, 1)
    if part == "attn_gate.weight":
        return by_key_head(rows, size)
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        num_other = 2 * config.linear_key_head_dim * config.linear_num_key_heads  # rows of queries and keys
        rows = np.concatenate([rows[:num_other], by_key_head(rows[num_other:], size)])
        return restore_qwen3next(rows, name, config)
    if part == "ssm_out.weight":
        is_in_blocks = rows.shape[1] != config.linear_num_value_heads * size
        return rows if is_in_blocks else by_key_head(rows.T, size).T
    return restore_qwen3next(rows, name, config)


def _by_key_head(rows: Array, size: int, config: Any) -> Array:
    """Order value heads of ``size`` rows by their key head: files have the first of every key head, then the second ..."""
    turned = rows.reshape(-1, config.linear_num_key_heads, size, *rows.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(turned).reshape(rows.shape)


def inputs_of_qwen35(name: str, config: Any) -> Array | None:
    heads, keys, size = config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim
    if not name.endswith("ssm_out.weight") or heads == keys:
        return None
    return np.arange(heads * size).reshape(keys, heads // keys, size).swapaxes(0, 1).reshape(-1)


def restore_qwen3next(rows: Array, name: str, _: Any) -> Array:
    """Undo changes of values and shapes: the converter adds 1 to norms and stores A instead of its logarithm."""
    part = name_in_layer(name)
    if part.endswith("norm.weight") and part != "ssm_norm.weight":
        return np.subtract(rows, 1, dtype=rows.dtype)
    if part == "ssm_a":
        return np.log(-rows)
    if part == "ssm_conv1d.weight":
        return rows[:, None]
    return rows.reshape(1, -1) if part == "ffn_gate_inp_shexp.weight" else rows


def rows_of_qwen3next(parameter: str, config: Any) -> Array | None:
    """Return the order of the rows of queries, keys, values and gates, which the model has key head by key head.

    Files have gates in one tensor, which comes first, and all queries, all keys and all values in the other.
    """
    if not parameter.endswith("in_proj_qkvz.weight"):
        return None
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    width = config.linear_num_value_heads // heads * config.linear_value_head_dim  # rows of a head's values
    starts = np.cumsum([0, heads * width, heads * size, heads * size])
    gates, queries, keys, values = (
        np.arange(start, start + heads * rows).reshape(heads, rows)
        for start, rows in zip(starts, (width, size, size, width), strict=True)
    )
    return np.concatenate([queries, keys, values, gates], 1).reshape(-1)


def shape_of_qwen3next(name: str, config: Any) -> list[int] | None:
    """Return the shapes of these two tensors."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    if name.endswith("attn_qkv.weight"):
        return [2 * keys + values, config.hidden_size]
    return [values, config.hidden_size] if name.endswith("attn_gate.weight") else None


def shape_of_deepseek(name: str, config: Any) -> list[int] | None:
    """Return the shape of the projections of DeepSeek's latent to keys and to values, which files hold apart.

    The former is [heads, latent, size], the latter [heads, size, latent].
    """
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    if name.endswith("attn_k_b.weight"):
        return [heads, latent, config.qk_nope_head_dim]
    return [heads, config.v_head_dim, latent] if name.endswith("attn_v_b.weight") else None


def restore_deepseek(rows: Array, name: str, _: Any) -> Array:
    """Return both of these projections as [heads, size, latent], and other tensors as they are."""
    return rows.swapaxes(1, 2) if name.endswith("attn_k_b.weight") else rows


def restore_mamba2(rows: Array, name: str, _: Any) -> Array:
    """Undo changes of Mamba 2's tensors: shapes, and A in place of its logarithm."""
    part = name_in_layer(name)
    if part == "ssm_a":
        return np.log(-rows).reshape(-1)
    if part in ("ssm_d", "ssm_norm.weight"):
        return rows.reshape(-1)
    if part == "ssm_conv1d.weight":
        return rows[:, None]
    return rows


def is_unused_in_shared_layers(name: str, config: Any) -> bool:
    """Return whether a tensor belongs to keys or values of one of Gemma's last layers, which read those of earlier layers."""
    block = BLOCK.fullmatch(name)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    return block is not None and int(block[1]) >= first and block[2] in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
