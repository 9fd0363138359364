"""Shapes of large Llama-shaped models for ``--inflate``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.types import OutriderError

SIZES = {"1b": 1_060_000_000}  # other sizes are what their names say


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama-like model; ``head_dim`` and vocabulary are those of the source."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int


def source_shape(config: Mapping[str, Any]) -> Shape:
    """Return the shape described by a ``config.json``."""
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        ffn=config["intermediate_size"],
    )


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def num_params(size: str) -> int:
    """Parse ``"1b"``, ``"350m"``, ``"1.5b"`` to a number of parameters. Raises ``OutriderError`` for anything else."""
    name = size.strip().lower()
    if name in SIZES:
        return SIZES[name]
    try:
        value = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1:]]
    except (ValueError, KeyError):
        value = 0.0
    if not (1e6 <= value <= 1e11):
        raise OutriderError(f"invalid size {size!r} of an inflated model: expected a size such as 350m, 1b or 8b")
    return int(value)


def shape_for(config: Mapping[str, Any], params: int) -> Shape:
    """Return a typical shape (Qwen3, Llama 3) of about ``params`` parameters that can hold the source.

    Raises ``OutriderError`` for fewer parameters than the source has.
    """
    small = source_shape(config)
    own = count_params(config, small)
    if params < own:
        what = f"a model of {own / 1e9:.3g} B parameters to {params / 1e9:.3g} B"
        raise OutriderError(f"cannot inflate {what}: give a larger size")
    dim = head_dim(config)
    wanted, layers = next(
        row[1:] for row in ((2e8, 512, 24), (2.5e9, 1024, 28), (6e9, 2048, 32), (math.inf, 4096, 36)) if params < row[0]
    )
    hidden = small.hidden
    while hidden * 2 < wanted:
        hidden *= 4
    layers = max(layers, small.layers)
    heads = hidden // dim
    while heads * dim < 2048:
        heads *= 2
    kv_heads = max(heads // 4, 1)  # four query heads per key/value head, as in Llama 3
    bare = Shape(hidden, layers, heads, kv_heads, ffn=0)
    ffn = (params - count_params(config, bare)) / (3 * hidden * layers)
    return replace(bare, ffn=max(256 * round(ffn / 256), small.ffn, 256))


def count_params(config: Mapping[str, Any], shape: Shape) -> int:
    """Return the number of parameters of a Llama of that shape, without norms and biases."""
    dim = head_dim(config)
    embeddings = config["vocab_size"] * shape.hidden * (1 if config.get("tie_word_embeddings") else 2)
    layer = 2 * shape.hidden * dim * (shape.heads + shape.kv_heads) + 3 * shape.hidden * shape.ffn
    return int(embeddings + shape.layers * layer)
