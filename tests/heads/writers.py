"""Tiny heads in the published formats (EAGLE, SpecForge, speculators, Medusa, vLLM), written with torch only.

Nothing here uses Outrider: names, shapes and configs follow the formats' descriptions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, FFN, HEADS, KV_HEADS, DIM = 32, 48, 4, 2, 8


def randn(*shape: int, scale: float = 0.4) -> Tensor:
    return torch.randn(*shape) * scale / max(shape[-1], 1) ** 0.5 * 2


def norm(size: int) -> Tensor:
    return 1 + 0.2 * torch.randn(size)


def set_config(folder: Path, **change: Any) -> None:
    """Change the config of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def layer_tensors(prefix: str, inputs: int = HIDDEN) -> dict[str, Tensor]:
    """Return the tensors of a decoder layer without norms; attention has ``inputs`` input features."""
    return {
        f"{prefix}.self_attn.q_proj.weight": randn(HEADS * DIM, inputs),
        f"{prefix}.self_attn.k_proj.weight": randn(KV_HEADS * DIM, inputs),
        f"{prefix}.self_attn.v_proj.weight": randn(KV_HEADS * DIM, inputs),
        f"{prefix}.self_attn.o_proj.weight": randn(HIDDEN, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": randn(FFN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": randn(FFN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": randn(HIDDEN, FFN),
        f"{prefix}.post_attention_layernorm.weight": norm(HIDDEN),
    }


def layer_config(vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 128,
        "vocab_size": vocab,
        "hidden_act": "silu",
    }


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def write_eagle1(
    folder: Path, vocab: int, *, bias: bool = True, seed: int = 0, layers: int = 1, qkv_bias: bool = False
) -> dict[str, Tensor]:
    """Write yuhuili/EAGLE-*: pytorch_model.bin, fc over cat(embedding, feature), no input norm in layer 0, no output head.

    ``qkv_bias``: as in EAGLE-Qwen2-7B-Instruct, whose config has model type qwen2.
    """
    torch.manual_seed(seed)
    tensors = {"embed_tokens.weight": torch.randn(vocab, HIDDEN), "fc.weight": randn(HIDDEN, 2 * HIDDEN)}
    if bias:
        tensors["fc.bias"] = 0.1 * torch.randn(HIDDEN)
    for index in range(layers):
        tensors |= layer_tensors(f"layers.{index}")
        for name, size in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True) if qkv_bias else ():
            tensors[f"layers.{index}.self_attn.{name}_proj.bias"] = 0.3 * torch.randn(size * DIM)
        if index:
            tensors[f"layers.{index}.input_layernorm.weight"] = norm(HIDDEN)
    config = layer_config(vocab) | {"architectures": ["LlamaForCausalLM"], "bias": bias, "num_hidden_layers": layers}
    if qkv_bias:
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "qkv_bias": True}
    save(folder, config, tensors, "pytorch_model.bin")
    return tensors


def eagle3_tensors(vocab: int, draft_vocab: int, prefix: str) -> dict[str, Tensor]:
    chosen = torch.randperm(vocab)[:draft_vocab].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[chosen] = True
    return {
        "fc.weight": randn(HIDDEN, 3 * HIDDEN),
        **layer_tensors(prefix, 2 * HIDDEN),
        f"{prefix}.hidden_norm.weight": norm(HIDDEN),
        f"{prefix}.input_layernorm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": randn(draft_vocab, HIDDEN, scale=3.0),
        "d2t": chosen - torch.arange(draft_vocab),
        "t2d": known,
    }


def write_eagle3(
    folder: Path, vocab: int, draft_vocab: int, *, seed: int = 0, config: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """Write the format of SafeAILab and SpecForge: midlayer, d2t as offsets, the embedding from the target."""
    torch.manual_seed(seed)
    tensors = eagle3_tensors(vocab, draft_vocab, "midlayer")
    base = layer_config(vocab) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    save(folder, base | (config or {}), tensors)
    return tensors


def write_speculators(
    folder: Path, vocab: int, draft_vocab: int, *, seed: int = 0, extra: str = "", norm_output: bool = False
) -> dict[str, Tensor]:
    """Write RedHatAI/*-speculator.eagle3: layers.0, embedding, layer ids at the top level, norm_before_residual by default."""
    torch.manual_seed(seed)
    tensors = eagle3_tensors(vocab, draft_vocab, "layers.0") | {"embed_tokens.weight": torch.randn(vocab, HIDDEN)}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_output": norm_output,
        "transformer_layer_config": layer_config(vocab),
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": {"name_or_path": "x"}},
    }
    if extra == "norm_before_fc":
        tensors["input_norm.weight"] = norm(3 * HIDDEN)
        config[extra] = True
    if extra == "fc_norm":
        tensors |= {f"fc_norm.{index}.weight": norm(HIDDEN) for index in range(3)}
        config[extra] = True
    save(folder, config, tensors)
    return tensors


def write_medusa(folder: Path, vocab: int, num_heads: int, *, layers: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Write FasterDecoding/medusa-*: medusa_lm_head.pt, and a config without sizes, whose number of heads may be wrong."""
    torch.manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = randn(HIDDEN, HIDDEN)
            tensors[f"{head}.{layer}.linear.bias"] = 0.1 * torch.randn(HIDDEN)
        tensors[f"{head}.{layers}.weight"] = randn(vocab, HIDDEN, scale=3.0)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    save(folder, config, tensors, "medusa_lm_head.pt")
    return tensors


def write_vllm_medusa(folder: Path, vocab: int, num_heads: int, *, map_to: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Write vLLM's Medusa: blocks and lm_heads, optionally over a part of the vocabulary (token_map)."""
    torch.manual_seed(seed)
    size = map_to or vocab
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        tensors[f"blocks.{head}.layers.0.weight"] = randn(HIDDEN, HIDDEN)
        tensors[f"lm_heads.{head}.weight"] = randn(size, HIDDEN, scale=3.0)
    if map_to:
        tensors["token_map"] = torch.randperm(vocab)[:map_to].sort().values
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": vocab,
        "truncated_vocab_size": size,
        "medusa_fc_bias": False,
    }
    save(folder, config, tensors)
    return tensors
