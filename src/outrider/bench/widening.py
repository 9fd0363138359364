"""Place a small model's weights in a larger one that computes the same function; see ``inflate``.

This module works on tensors and shapes, not on files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.bench.shapes import Shape, head_dim, source_shape
from outrider.types import OutriderError

WEIGHT_STD = 0.02  # standard deviation of random weights, as in trained models


class Noise:
    """Random weights sliced from one pool, so that billions of them cost only memory bandwidth."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.empty(16_777_213).normal_(0.0, WEIGHT_STD, generator=generator).to(dtype)
        self._at = 0

    def __call__(self, *shape: int) -> Tensor:
        flat = torch.empty(math.prod(shape), dtype=self._pool.dtype)
        done = 0
        while done < flat.numel():
            piece = self._pool[self._at : self._at + flat.numel() - done]
            flat[done : done + piece.numel()] = piece
            done += piece.numel()
            self._at = (self._at + piece.numel()) % self._pool.numel()
        return flat.view(shape)


class InputWidener:
    """Widens matrices that read hidden states of the large model."""

    def __init__(self, small: int, large: int, noise: Noise) -> None:
        """``small``, ``large``: widths of the hidden states of both models."""
        self.small, self.large, self.noise = small, large, noise

    def __call__(self, weight: Tensor, num_rows: int, places: Tensor, is_silent: bool = False) -> Tensor:
        """Widen a matrix that reads n hidden states, [r, n * h], to [num_rows, n * H].

        Its rows are at ``places``; all other weights are random. With ``is_silent``, other rows read nothing, so that their
        outputs are zero.
        """
        blocks = weight.split(self.small, 1)
        wide = self.noise(num_rows, len(blocks) * self.large)
        for block, part in zip(blocks, wide.split(self.large, 1), strict=True):
            if is_silent:
                part[:, : self.small] = 0
            part[places, : self.small] = block.to(part.dtype)
        return wide


class Inflater:
    """Placement of the small model's weights in the large one."""

    def __init__(self, config: Mapping[str, Any], large: Shape, noise: Noise, dtype: torch.dtype) -> None:
        small, dim = source_shape(config), head_dim(config)
        ratio = large.hidden / small.hidden
        if ratio < 1 or not (math.log2(ratio) / 2).is_integer():
            raise OutriderError(
                f"invalid hidden size {large.hidden}: expected the source's {small.hidden} times a power of four"
            )
        self.norm_scale = math.sqrt(small.hidden / large.hidden)  # a power of two: exact in bfloat16
        self.small, self.large, self.dim, self.noise, self.dtype = small, large, dim, noise, dtype
        self.widen_inputs = InputWidener(small.hidden, large.hidden, noise)
        self.sizes = {  # of the large model's config
            "hidden_size": large.hidden,
            "intermediate_size": large.ffn,
            "num_attention_heads": large.heads,
            "num_key_value_heads": large.kv_heads,
            "head_dim": dim,
            "rms_norm_eps": config["rms_norm_eps"] * self.norm_scale**2,
        }
        group, new_group = small.heads // small.kv_heads, large.heads // large.kv_heads
        spread = math.ceil(group / new_group)  # new key/value heads per real one, to serve its query heads
        fits = large.kv_heads >= small.kv_heads * spread and large.heads % large.kv_heads == 0
        if not fits or large.hidden % large.heads or large.layers < small.layers or large.ffn < small.ffn:
            raise OutriderError(f"the source's shape {small} does not fit into {large}")
        query_heads = [
            (kv * spread + i // new_group) * new_group + i % new_group for kv in range(small.kv_heads) for i in range(group)
        ]
        key_heads = [kv * spread + i for kv in range(small.kv_heads) for i in range(spread)]
        self.query_rows = rows_of_heads(query_heads, dim)
        self.key_rows = rows_of_heads(key_heads, dim)
        self.key_source = rows_of_heads([kv for kv in range(small.kv_heads) for _ in range(spread)], dim)
        # query heads that read a real value head, including the real ones
        self.active_query_rows = rows_of_heads([kv * new_group + i for kv in key_heads for i in range(new_group)], dim)
        self.real_layers = [i * large.layers // small.layers for i in range(small.layers)]

    def embedding(self, weight: Tensor) -> Tensor:
        """Widen [V, h] to [V, H] with zeros."""
        wide = torch.zeros(weight.shape[0], self.large.hidden, dtype=self.dtype)
        wide[:, : self.small.hidden] = weight
        return wide

    def norm(self, weight: Tensor) -> Tensor:
        """Widen [h] to [H] with zeros."""
        wide = torch.zeros(self.large.hidden, dtype=self.dtype)
        wide[: self.small.hidden] = weight * self.norm_scale
        return wide

    def extra_norm(self) -> Tensor:
        """Norm weights of an extra layer, [H]: zero on the real features and random elsewhere, so that its output is zero."""
        wide = 1 + self.noise(self.large.hidden)
        wide[: self.small.hidden] = 0
        return wide

    def input_projection(self, weight: Tensor, num_rows: int, rows: Tensor, is_silent: bool = False) -> Tensor:
        """Widen a projection (or its bias) whose input is the hidden state; ``rows``: indices of the real rows.

        Other rows are random, or zero on the real features if ``is_silent``; columns after the real features are random.
        """
        if weight.ndim > 1:
            return self.widen_inputs(weight, num_rows, rows, is_silent)
        wide = torch.zeros(num_rows, dtype=self.dtype)
        wide[rows] = weight
        return wide

    def output_projection(self, weight: Tensor, num_columns: int, columns: Tensor, nonzero: Tensor) -> Tensor:
        """Widen a projection (or its bias) that adds to the hidden state; ``columns``: indices of the real columns.

        Other columns with a ``nonzero`` input are zero. The input of the remaining ones is zero, so they can be random.
        """
        if weight.ndim == 1:
            return self.embedding(weight[None])[0]
        wide = self.noise(self.large.hidden, num_columns)
        wide[:, nonzero] = 0
        wide[: self.small.hidden, columns] = weight
        return wide

    def attention_rows(self, module: str) -> tuple[int, Tensor, Tensor]:
        """Return the number of rows (of ``o_proj``: columns) of a projection, the positions of the real ones, their sources."""
        if module in ("q_proj", "o_proj"):
            return self.large.heads * self.dim, self.query_rows, torch.arange(len(self.query_rows))
        return self.large.kv_heads * self.dim, self.key_rows, self.key_source

    def layer_tensor(self, name: str, weight: Tensor, real: bool) -> Tensor:
        """Return a tensor of a real layer, or of an extra one with the same shape if not ``real``."""
        large = self.large
        module = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        if module in ("q_norm", "k_norm"):
            return weight if real else torch.ones_like(weight)
        if module.endswith("layernorm"):
            return self.norm(weight) if real else self.extra_norm()
        if module in ("gate_proj", "up_proj", "down_proj"):
            total, places = large.ffn, torch.arange(self.small.ffn)
        elif module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            total, places, source = self.attention_rows(module)
            weight = weight if module == "o_proj" else weight[source]
        else:
            raise OutriderError(f"unknown tensor {name}: not in a Llama-shaped model")
        if module in ("o_proj", "down_proj"):
            if real:
                return self.output_projection(weight, total, places, self.active_query_rows if module == "o_proj" else places)
            return self.noise(large.hidden, total) if weight.ndim == 2 else torch.zeros(large.hidden, dtype=self.dtype)
        if real:
            return self.input_projection(weight, total, places, is_silent=module in ("v_proj", "up_proj"))
        return self.input_projection(weight[:0], total, places[:0])

    def tensors(self, source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the large model: embeddings, layers, final norm, head."""
        yield "model.embed_tokens.weight", self.embedding(source["model.embed_tokens.weight"])
        real = {layer: i for i, layer in enumerate(self.real_layers)}
        names = [name.removeprefix("model.layers.0.") for name in source if name.startswith("model.layers.0.")]
        for layer in range(self.large.layers):
            for name in names:
                weight = source[f"model.layers.{real.get(layer, 0)}.{name}"]
                yield f"model.layers.{layer}.{name}", self.layer_tensor(name, weight, layer in real)
        yield "model.norm.weight", self.norm(source["model.norm.weight"])
        if "lm_head.weight" in source:
            rows = torch.arange(source["lm_head.weight"].shape[0])
            yield "lm_head.weight", self.input_projection(source["lm_head.weight"], len(rows), rows)


def rows_of_heads(heads: list[int], dim: int) -> Tensor:
    return (torch.tensor(heads)[:, None] * dim + torch.arange(dim)).flatten()
