"""Tiny block drafters under the published names, and a reference implementation on plain tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB, HIDDEN, HEAD_DIM, HEADS, KV_HEADS, INNER, MASK = 61, 32, 8, 4, 2, 48, 60
TARGET_LAYERS = (0, 2, 3)  # of a target with 5 layers: hidden states 1, 3 and 4
LAYER_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "attention_bias": False,
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
}


def block_target(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": 5, "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": 0}
    keys = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(**({key: LAYER_CONFIG[key] for key in (*keys, "max_position_embeddings")} | shape | changes))
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def head_tensors(seed: int = 3, bias: bool = False) -> dict[str, Tensor]:
    """Return random small tensors with the names and shapes of z-lab's published heads."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return 0.25 * torch.randn(rows, columns, generator=generator)

    def norm(size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator)

    tensors = {
        "fc.weight": matrix(HIDDEN, len(TARGET_LAYERS) * HIDDEN),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
    }
    for layer in range(2):
        rows = {"q": (HEADS * HEAD_DIM, HIDDEN), "k": (KV_HEADS * HEAD_DIM, HIDDEN), "v": (KV_HEADS * HEAD_DIM, HIDDEN)}
        for name, size in (rows | {"o": (HIDDEN, HEADS * HEAD_DIM)}).items():
            tensors[f"layers.{layer}.self_attn.{name}_proj.weight"] = matrix(*size)
            if bias:
                tensors[f"layers.{layer}.self_attn.{name}_proj.bias"] = torch.randn(size[0], generator=generator)
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.{layer}.self_attn.{name}.weight"] = norm(HEAD_DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"layers.{layer}.{name}.weight"] = norm(HIDDEN)
        for name, size in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
            tensors[f"layers.{layer}.mlp.{name}_proj.weight"] = matrix(*size)
    return tensors


def markov_tensors(rank: int = 5, vocab: int = VOCAB, seed: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "markov_head.markov_w1.weight": torch.randn(VOCAB, rank, generator=generator),
        "markov_head.markov_w2.weight": torch.randn(vocab, rank, generator=generator),
        "confidence_head.proj.weight": torch.randn(1, HIDDEN + rank, generator=generator),
        "confidence_head.proj.bias": torch.zeros(1),
    }


TAPS, GROUP, RANK, CANDIDATES = 3, 8, 6, 5


def second_tensors(seed: int = 11) -> dict[str, Tensor]:
    """Return the tensors added by z-lab's DFlash 2."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.4 * torch.randn(*shape, generator=generator)

    tensors = {
        "candidate_selector.hidden_projection.weight": normal(RANK, HIDDEN),
        "candidate_selector.predecessor_codebook": 3 * normal(VOCAB, RANK),
        "candidate_selector.successor_codebook": 3 * normal(VOCAB, RANK),
    }
    for layer in range(2):
        for name in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{layer}.{name}.base_kernel"] = 0.5 + normal(2, TAPS, HIDDEN)
            tensors[f"layers.{layer}.{name}.kernel_projection.weight"] = normal(2 * TAPS * HIDDEN // GROUP, HIDDEN)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def native_config(block_size: int = 8, **changes: Any) -> dict[str, Any]:
    """Return the config of z-lab's DFlash."""
    inner = {"mask_token_id": MASK, "target_layer_ids": list(TARGET_LAYERS)}
    own = {"architectures": ["DFlashDraftModel"], "block_size": block_size, "dflash_config": inner, "num_target_layers": 5}
    return LAYER_CONFIG | own | changes


def second_config(**changes: Any) -> dict[str, Any]:
    """Return the config of z-lab's DFlash 2, whose block size is in the inner config."""
    inner = {"mask_token_id": MASK, "target_layer_ids": list(TARGET_LAYERS), "block_size": 8, "conv_kernel_size": TAPS}
    inner |= {"conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CANDIDATES}
    own = {"architectures": ["DFlash2DraftModel"], "is_causal": False, "num_target_layers": 5}
    return LAYER_CONFIG | own | {"dflash_config": inner | changes}


def dspark_config(block_size: int = 7, **changes: Any) -> dict[str, Any]:
    """Return the config of DeepSeek's DSpark."""
    own = {"architectures": ["Qwen3DSparkModel"], "block_size": block_size, "mask_token_id": MASK, "markov_rank": 5}
    more = {"target_layer_ids": list(TARGET_LAYERS), "markov_head_type": "vanilla", "enable_confidence_head": True}
    return LAYER_CONFIG | own | more | changes


def speculators_config(kind: str = "dflash", block_size: int = 8, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "draft_vocab_size": VOCAB,
        "block_size": block_size,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in TARGET_LAYERS],
        "sample_from_anchor": kind == "dspark",
        "transformer_layer_config": LAYER_CONFIG,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target", "architectures": []}},
    } | changes


class Reference:
    """Reference implementation of the head over one whole sequence, without a cache."""

    def __init__(self, tensors: dict[str, Tensor], model: PreTrainedModel, window: int = 0, causal: bool = False) -> None:
        self.tensors, self.window, self.causal = tensors, window, causal
        self.table, self.output = (m.weight.detach() for m in (model.get_input_embeddings(), model.get_output_embeddings()))

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.tensors[f"{name}.weight"]

    def out(self, features: list[Tensor], token: int, count: int) -> Tensor:
        """Map features [C, H] of each hidden state, the next token and ``count`` mask tokens to outputs [1 + count, H]."""
        context = self.norm(self.linear(torch.cat(features, -1), "fc"), "hidden_norm")
        hidden = self.table[[token] + [MASK] * count]
        total = len(context) + len(hidden)
        place = torch.arange(total)
        rows = place[len(context) :]
        sees = torch.ones(len(rows), total, dtype=torch.bool)
        if self.window:
            sees &= rows[:, None] - place < self.window
        if self.causal:
            sees &= (place <= rows[:, None]) | (place < len(context))
        for layer in range(2):
            name = f"layers.{layer}"
            normed = before = self.norm(hidden, f"{name}.input_layernorm")
            normed = self.convolved(normed, before, f"{name}.attention_conv", 0)
            both = torch.cat((context, normed))
            query = self.norm(
                self.linear(normed, f"{name}.self_attn.q_proj").view(-1, HEADS, HEAD_DIM), f"{name}.self_attn.q_norm"
            )
            key = self.norm(self.linear(both, f"{name}.self_attn.k_proj").view(total, -1, HEAD_DIM), f"{name}.self_attn.k_norm")
            value = self.linear(both, f"{name}.self_attn.v_proj").view(total, -1, HEAD_DIM)
            query, key = turned(query, rows), turned(key, place)
            outs = []
            for head in range(HEADS):
                kv = head * KV_HEADS // HEADS
                scores = query[:, head] @ key[:, kv].T * HEAD_DIM**-0.5
                outs.append(scores.masked_fill(~sees, float("-inf")).softmax(-1) @ value[:, kv])
            attended = self.linear(torch.cat(outs, -1), f"{name}.self_attn.o_proj")
            hidden = hidden + self.convolved(attended, before, f"{name}.attention_conv", 1)
            normed = before = self.norm(hidden, f"{name}.post_attention_layernorm")
            normed = self.convolved(normed, before, f"{name}.mlp_conv", 0)
            gated = silu(self.linear(normed, f"{name}.mlp.gate_proj")) * self.linear(normed, f"{name}.mlp.up_proj")
            hidden = hidden + self.convolved(self.linear(gated, f"{name}.mlp.down_proj"), before, f"{name}.mlp_conv", 1)
        return self.norm(hidden, "norm")

    def convolved(self, values: Tensor, source: Tensor, name: str, side: int) -> Tensor:
        """Apply DFlash 2's convolution to [T, H], coefficient by coefficient; identity for other heads."""
        if f"{name}.base_kernel" not in self.tensors:
            return values
        base, groups = self.tensors[f"{name}.base_kernel"][side], HIDDEN // GROUP
        own = self.linear(source, f"{name}.kernel_projection").view(-1, 2, TAPS, groups)[:, side]
        out = torch.zeros_like(values)
        for row in range(len(values)):
            for tap in range(min(TAPS, row + 1)):
                for channel in range(HIDDEN):
                    out[row, channel] += (base[tap, channel] + own[row, tap, channel // GROUP]) * values[row - tap, channel]
        return out

    def selected(self, out: Tensor, token: int) -> dict[int, float]:
        """Return DFlash 2's scores of the candidates after a token, for the output [H]."""
        table = {name: self.tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")}
        logits, gate = self.logits(out), self.linear(out, "candidate_selector.hidden_projection")
        best = logits.argsort(descending=True)[:CANDIDATES].tolist()
        return {
            each: float(logits[each] + (table["predecessor"][token] * gate * table["successor"][each]).sum()) for each in best
        }

    def logits(self, out: Tensor) -> Tensor:
        return out @ self.output.T

    def bias(self, token: int) -> Tensor:
        return self.tensors["markov_head.markov_w2.weight"] @ self.tensors["markov_head.markov_w1.weight"][token]


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary position embedding to [T, heads, D], pairing the two halves."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
