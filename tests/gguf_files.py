"""GGUF files of tiny models, written with the gguf package, and models with the values stored in the files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from architectures.tiny import randomised
from gguf import GGMLQuantizationType as Kind
from tiny_folder import CHAT_TEMPLATE, make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
}
CONFIGS: Mapping[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaConfig(**SHAPE | {"head_dim": 64, "rope_theta": 5e5} | more),
    "qwen2": lambda **more: Qwen2Config(**SHAPE | {"rope_theta": 2e4} | more),
    "qwen3": lambda **more: Qwen3Config(**SHAPE | {"head_dim": 64, "rope_theta": 1e6} | more),
}
# Offsets of the float16 scales in the bytes of a block, and their size for weights of usual magnitude.
SCALES = {
    Kind.Q2_K: {80: 6e-3, 82: 5e-3},
    Kind.Q3_K: {108: 9e-4},
    Kind.Q4_K: {0: 2.5e-4, 2: 1.5e-3},
    Kind.Q5_K: {0: 1.2e-4, 2: 1.5e-3},
    Kind.Q6_K: {208: 3e-5},
}


def mixed(name: str) -> Kind:
    """Return the type of a tensor as in Q4_K_M files: 6 bits for sensitive ones, 4 bits for the others."""
    return Kind.Q6_K if any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.weight")) else Kind.Q4_K


def make_model(architecture: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a random float32 model whose greedy tokens vary."""
    torch.manual_seed(seed)
    return randomised(AutoModelForCausalLM.from_config(CONFIGS[architecture](**config), dtype=torch.float32), std=0.8)


def write(
    path: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], Kind],
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    without: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Write a model, each matrix in the type given by ``kind_of`` its name. Returns a copy with the values of the file.

    K types have random codes, because the package cannot quantise to them. ``change`` adds entries or tensors before writing.
    """
    config, architecture = model.config, model.config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    add_tokenizer(writer)
    if change is not None:
        change(writer)
    exact = copy.deepcopy(model)
    values = exact.state_dict()
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    rng = np.random.default_rng(0)
    for own, weight in model.state_dict().items():
        base, _, suffix = own.rpartition(".")
        name = f"{names.get_name(base)}.{suffix}"
        if (own == "lm_head.weight" and config.tie_word_embeddings) or name in without:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(base.rpartition(".")[2])
        turned = heads if architecture == "llama" else None
        array = weight.numpy()
        if array.ndim < 2:
            writer.add_tensor(name, array)
            continue
        kind = kind_of(name)
        if turned:  # llama.cpp interleaves the two halves of a head
            array = array.reshape(turned, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        data = random_codes(array.shape, kind, rng) if kind in SCALES else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        decoded = gguf.quants.dequantize(data, kind).astype(np.float32)
        if turned:
            decoded = decoded.reshape(turned, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        values[own].copy_(torch.from_numpy(decoded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def random_codes(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Return bytes of random codes with scales of usual size."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // weights, size), dtype=np.uint8)
    for at, largest in SCALES[kind].items():
        raw[..., at : at + 2] = rng.uniform(0.5, 1, (*raw.shape[:2], 1)).astype(np.float16).view(np.uint8)
        half = raw[..., at : at + 2].copy().view(np.float16) * np.float16(largest * 16 / shape[1] ** 0.5)
        raw[..., at : at + 2] = half.astype(np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add the tokenizer of ``tiny_folder``."""
    tokenizer = make_tokenizer()
    told = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == tokenizer.eos_token else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in told["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
