"""Heads in GGUF files, as llama.cpp writes them: EAGLE-3, DFlash, DFlash 2, DSpark, and Gemma 4's assistants.

They are read as the folders that they were converted from: a config and tensors, in the layouts of ``eagle_formats``,
``block_formats`` and ``assistant``. llama.cpp changes names, the order of EAGLE-3's queries and keys, and ``d2t``, which holds
ids in its files instead of offsets. Quantised tensors are read as float32, with the values of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.runner import gguf
from outrider.runner.gguf.architecture import FACTORS, Architecture, Entry, Tensors, Values
from outrider.runner.gguf.configs import layer_types_of, required
from outrider.runner.gguf.configs_gemma import gemma4
from outrider.types import OutriderError

MAPPING = "d2t"
PARTS = {  # the file's names, without the number of a layer and the ending -> names in a head's folder
    "fc": "fc",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    MAPPING: MAPPING,
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OWN_PARTS = {  # the same by architecture
    "eagle3": {"enc.output_norm": "input_norm", "attn_norm_2": "hidden_norm"},
    "dflash": {
        "enc.output_norm": "hidden_norm",
        "markov_w1": "markov_head.markov_w1",
        "markov_w2": "markov_head.markov_w2",
        "conf_proj": "confidence_head.proj",
        "selector_predecessor": "candidate_selector.predecessor_codebook",
        "selector_successor": "candidate_selector.successor_codebook",
        "selector_hidden": "candidate_selector.hidden_projection",
        "attn_conv_base": "attention_conv.base_kernel",
        "attn_conv_proj": "attention_conv.kernel_projection",
        "ffn_conv_base": "mlp_conv.base_kernel",
        "ffn_conv_proj": "mlp_conv.kernel_projection",
    },
    "gemma4-assistant": {
        "token_embd": "model.embed_tokens",
        "nextn.pre_projection": "pre_projection",
        "nextn.post_projection": "post_projection",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "layer_output_scale": "layer_scalar",
    },
}
UNUSED = (FACTORS, "masked_embd_centroids.weight", "masked_embd_ordering")  # the first is part of the config
NAME = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(\.weight|\.bias)?")
SAME_IN_DFLASH = (  # entries that have the names of the config's keys
    "block_size",
    "sample_from_anchor",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)
# llama.cpp stores Llama 3's scaled rotary positions as divisors of the frequencies. All Llama 3 models were scaled with these.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def eagle3(entry: Entry, tensors: Tensors, values: Values) -> None:
    """Read an EAGLE-3 head."""
    values |= {
        "eagle_aux_hidden_state_layer_ids": required(entry, "target_layers"),
        "target_hidden_size": required(entry, "target_hidden_size"),
        "norm_before_residual": bool(entry("norm_before_residual")),
    }
    _add_llama3_scaling(tensors, values)


def dflash(entry: Entry, tensors: Tensors, values: Values) -> None:
    """Read a block drafter: DFlash, DFlash 2 or DSpark."""
    rotated = entry("rope.dimension_count")
    if rotated not in (None, values["head_dim"]):
        raise ValueError(f"rotary positions of {rotated} of {values['head_dim']} features, expected all")
    kinds = layer_types_of(entry, values, full_attention_every=1)
    values |= {
        "aux_hidden_state_layer_ids": required(entry, "target_layers"),
        "layer_types": kinds,
        "sliding_window": entry("attention.sliding_window"),
        "use_sliding_window": "sliding_attention" in kinds,
        "is_causal": entry("attention.causal"),
        "output_multiplier": entry("logit_scale"),
        "input_embedding_scale": entry("embedding_scale"),
    }
    values |= {name: entry(name) for name in SAME_IN_DFLASH}
    _add_llama3_scaling(tensors, values)


def gemma4_assistant(entry: Entry, tensors: Tensors, values: Values) -> None:
    """Read one of Gemma 4's assistants. llama.cpp leaves out ordered embeddings: logits are those of all tokens."""
    gemma4(entry, tensors, values)
    values["sliding_window"] = required(entry, "attention.sliding_window")
    none = {"attention_k_eq_v": False, "vocab_size_per_layer_input": 0}  # its layers have neither keys nor inputs of their own
    text = {name: value for name, value in (values | none).items() if value is not None}
    values.clear()
    values |= {
        "text_config": text,
        "backbone_hidden_size": required(entry, "embedding_length_out"),
    }


def _add_llama3_scaling(tensors: Tensors, values: Values) -> None:
    """Add Llama 3's scaling if the file has divisors of frequencies. Raises ``ValueError`` for any other divisors."""
    if FACTORS not in tensors:
        return
    found = torch.from_numpy(tensors[FACTORS].data.copy())
    plain: Values = {"rope_type": "default", "rope_theta": values.pop("rope_theta", 1e4)}
    scaled = plain | LLAMA3 | {"rope_type": "llama3", "factor": float(found.max())}
    sizes = {"head_dim": values["head_dim"], "max_position_embeddings": 1 << 20}
    with torch.device("cpu"):  # also where only headers are read
        before, after = (
            LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(each))).inv_freq for each in (plain, scaled)
        )
    if found.shape != before.shape or not torch.allclose(found, before / after, rtol=1e-4):
        raise ValueError(f"{FACTORS} holds other divisors than Llama 3's")
    values["rope_parameters"] = scaled


HEADS = {  # by llama.cpp's name of the architecture
    "eagle3": Architecture("llama", eagle3, changes_like="llama", ignored="norm_before_fc"),  # a tensor shows it
    "dflash": Architecture("qwen3", dflash, ignored=r"has_confidence_head|rope\.dimension_sections"),
    "gemma4-assistant": Architecture("gemma4_assistant", gemma4_assistant, scalings=()),
}


def is_head(path: Path) -> bool:
    """Return whether a GGUF file is a head. Only the beginning of the file is read."""
    return gguf.architecture_of(path) in HEADS


def names(path: Path) -> list[str]:
    """Return the names of a head's tensors in the layout of its folder, and of a model's tensors those in the file.

    Raises ``OutriderError`` for an unknown tensor of a head.
    """
    return list(_names(opened(path)).values()) if is_head(path) else list(gguf.GgufFile.open(path).tensors)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config that a head's header states. Raises ``OutriderError`` for an entry that is not supported."""
    file = opened(path)
    config: dict[str, Any] = file.config().to_dict()
    config.pop("attention_bias", None)  # the tensors say it
    config["mask_token_id"] = file.entry("tokenizer.ggml.mask_token_id")
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return a head's tensors, under ``torch.device("meta")`` without their values. Raises ``OutriderError``."""
    file = opened(path)
    found = _names(file)
    file.refuse_unsupported_types(name for name in found if name != MAPPING)
    if torch.get_default_device().type == "meta":
        return {own: _header(file, name) for name, own in found.items()}
    undo = gguf.converter_undo(file.config(), file)
    return {own: _values(file, name, undo) for name, own in found.items()}


def opened(path: Path) -> gguf.GgufFile:
    """Open a head. Raises ``OutriderError`` for other files."""
    file = gguf.GgufFile.open(path)
    if file.architecture not in HEADS:
        raise OutriderError(f"{path} is a model of architecture {file.architecture}, not a head")
    return replace(file, head=HEADS[file.architecture])


def _names(file: gguf.GgufFile) -> dict[str, str]:
    """Return the name in a head's folder of each tensor. Raises ``OutriderError`` for one that no such head has."""
    parts, found = PARTS | OWN_PARTS[file.architecture], {}
    for name in file.tensors:
        layer, stem, ending = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        if name in UNUSED:
            continue
        if stem not in parts:
            raise OutriderError(f"{file.path}: tensor {name} is not supported in a head of architecture {file.architecture}")
        own = f"layers.{layer}.{parts[stem]}" if layer else parts[stem]
        found[name] = own if own.endswith(("layer_scalar", "_codebook")) else own + (ending or "")
    return found


def _values(file: gguf.GgufFile, name: str, undo: Callable[[Any, str], Any]) -> Tensor:
    """Return a tensor's values in the layout of a folder."""
    tensor = file.tensors[name]
    if name != MAPPING:
        return gguf.read_tensor(undo, tensor)
    ids = torch.from_numpy(tensor.data.astype(np.int64))
    return ids - torch.arange(len(ids))


def _header(file: gguf.GgufFile, name: str) -> Tensor:
    """Return a tensor without its values."""
    tensor = file.tensors[name]
    dtype = torch.long if name == MAPPING else gguf.PLAIN.get(tensor.tensor_type.name, torch.float32)
    return torch.empty(tensor.shape, dtype=dtype, device="meta")
