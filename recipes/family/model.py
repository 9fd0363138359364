"""Building the two Llamas and running them layer by layer. The modelling code is transformers' own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from .config import Preset, Shape


def build(shape: Shape, preset: Preset, seed: int) -> LlamaForCausalLM:
    """A fresh model; residual branches start at zero, which suits short runs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=preset.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        intermediate_size=shape.intermediate,
        max_position_embeddings=preset.max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def load(folder: Path) -> LlamaForCausalLM:
    """An exported model, in float32 for measuring."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile each layer in place: one graph a shape serves all depths, exits and skipped layers."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def hidden_states(model: LlamaForCausalLM, ids: Tensor, skipped: Collection[int] = ()) -> list[Tensor]:
    """Hidden states after each layer, before the final norm: L tensors [B, S, H]; skipped layers repeat."""
    base = model.model
    hidden = base.embed_tokens(ids)  # [B, S, H]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rope = base.rotary_emb(hidden, positions)
    states = []
    for index, layer in enumerate(base.layers):
        if index not in skipped:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
        states.append(hidden)
    return states


def logits(model: LlamaForCausalLM, hidden: Tensor) -> Tensor:
    """The model's own final norm and head on any layer's hidden state: [B, S, H] -> [B, S, V]."""
    out: Tensor = model.lm_head(model.model.norm(hidden))
    return out


def token_loss(model: LlamaForCausalLM, hidden: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of hidden states [B, S, H] against labels [B, S]."""
    return functional.cross_entropy(logits(model, hidden).flatten(0, 1).float(), labels.flatten())


def autocast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where a small matrix product is really faster in it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - start)
        return min(times)

    return torch.bfloat16 if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else torch.float32


def drop_rates(layers: int, max_drop: float, progress: float) -> list[float]:
    """Layer dropout that grows exponentially with depth and with time (LayerSkip, eqs. 2 and 3)."""
    over_time = math.exp(progress * math.log(2)) - 1
    span = max(layers - 1, 1)
    return [over_time * (math.exp(depth * math.log(2) / span) - 1) * max_drop for depth in range(layers)]


def exit_weights(layers: int, scale: float) -> list[float]:
    """Loss weight of each exit, growing with depth; the last is the model itself (LayerSkip, eq. 6)."""
    early = [scale * depth * (depth + 1) / 2 for depth in range(layers - 1)]
    return [*early, layers - 1 + scale * sum(range(layers - 1))]


Compiled = Callable[..., Any]
