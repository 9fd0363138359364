"""Reference implementations of heads from the papers, on plain tensors, one sequence at a time and without a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softmax

from .writers import DIM, HEADS, KV_HEADS


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor, positions: Tensor, theta: float = 5000.0) -> Tensor:
    """Apply rotary position embedding to [T, heads, DIM] at positions [T]."""
    frequencies = theta ** (-torch.arange(0, DIM, 2) / DIM)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    half = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
    return x * cos + half * sin


def attention(weights: dict[str, Tensor], prefix: str, x: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
    """Apply attention: [T, inputs] -> [T, H]; ``sees`` is the mask, bool [T, T]."""
    names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
    query, key, value = (x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0) for name in names)
    query = rotate(query.view(-1, HEADS, DIM), positions)
    key = rotate(key.view(-1, KV_HEADS, DIM), positions).repeat_interleave(HEADS // KV_HEADS, 1)
    value = value.view(-1, KV_HEADS, DIM).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("thd,shd->hts", query, key) / DIM**0.5
    mixed = torch.einsum("hts,shd->thd", softmax(scores.masked_fill(~sees, float("-inf")), -1), value)
    return mixed.flatten(1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T


def mlp(weights: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ weights[f"{prefix}.mlp.gate_proj.weight"].T, x @ weights[f"{prefix}.mlp.up_proj.weight"].T
    return (silu(gate) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T


def eagle1(weights: dict[str, Tensor], tokens: Tensor, features: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
    """Map entries (token, preceding feature) to predicted features [T, H], which the target's head reads."""
    x = torch.cat((weights["embed_tokens.weight"][tokens], features), -1) @ weights["fc.weight"].T
    x = x + weights.get("fc.bias", 0.0)
    layer = 0
    while f"layers.{layer}.mlp.up_proj.weight" in weights:
        prefix = f"layers.{layer}"
        norm = weights.get(f"{prefix}.input_layernorm.weight")
        x = x + attention(weights, prefix, x if norm is None else rms_norm(x, norm), positions, sees)
        x = x + mlp(weights, prefix, rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"]))
        layer += 1
    return x


def eagle3_fuse(weights: dict[str, Tensor], low: Tensor, middle: Tensor, high: Tensor) -> Tensor:
    features = [low, middle, high]
    if "fc_norm.0.weight" in weights:
        features = [rms_norm(x, weights[f"fc_norm.{index}.weight"]) for index, x in enumerate(features)]
    joined = torch.cat(features, -1)
    if "input_norm.weight" in weights:
        joined = rms_norm(joined, weights["input_norm.weight"])
    return joined @ weights["fc.weight"].T


def eagle3(
    weights: dict[str, Tensor], embeds: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor, norm_before_residual: bool
) -> Tensor:
    """Map embeddings [T, H] and fused or fed-back features [T, H] to pre-norm outputs [T, H]."""
    prefix = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"
    normed = rms_norm(hidden, weights[f"{prefix}.hidden_norm.weight"])
    x = torch.cat((rms_norm(embeds, weights[f"{prefix}.input_layernorm.weight"]), normed), -1)
    hidden = (normed if norm_before_residual else hidden) + attention(weights, prefix, x, positions, sees)
    return hidden + mlp(weights, prefix, rms_norm(hidden, weights[f"{prefix}.post_attention_layernorm.weight"]))


def eagle3_logits(weights: dict[str, Tensor], out: Tensor, vocab: int) -> Tensor:
    """Return logits [T, V] over the target's vocabulary, very low for tokens outside the draft vocabulary."""
    short = rms_norm(out, weights["norm.weight"]) @ weights["lm_head.weight"].T
    full = torch.full((len(out), vocab), -1e30)
    for draft_id, offset in enumerate(weights["d2t"].tolist()):
        full[:, draft_id + offset] = short[:, draft_id]
    return full


def medusa_logits(weights: dict[str, Tensor], hidden: Tensor, head: int, layers: int = 1) -> Tensor:
    """Return logits [T, V] of one head in the original format."""
    for layer in range(layers):
        linear = hidden @ weights[f"{head}.{layer}.linear.weight"].T + weights[f"{head}.{layer}.linear.bias"]
        hidden = hidden + silu(linear)
    return hidden @ weights[f"{head}.{layers}.weight"].T
