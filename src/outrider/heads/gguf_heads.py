"""Heads in GGUF files, as llama.cpp writes them: EAGLE-3, DFlash, DFlash 2, DSpark, and Gemma 4's assistants.

They are read as the folders that they were converted from: a config and tensors, in the layouts of ``eagle_formats``,
``block_formats`` and ``assistant``. llama.cpp changes names, the order of EAGLE-3's queries and keys, and ``d2t``, which holds
ids in its files instead of offsets. Quantised tensors are read as float32, with the values of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.runner import gguf
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
UNUSED = (gguf.FACTORS, "masked_embd_centroids.weight", "masked_embd_ordering")  # the first is part of the config
NAME = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(\.weight|\.bias)?")


def names(path: Path) -> list[str]:
    """Return the names of a head's tensors in the layout of its folder, and of a model's tensors those in the file.

    Raises ``OutriderError`` for an unknown tensor of a head.
    """
    file = gguf.GgufFile.open(path)
    return list(_names(file).values()) if file.is_head else list(file.tensors)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config that a head's header states. Raises ``OutriderError`` for an entry that is not supported."""
    file = _opened(path)
    config: dict[str, Any] = file.config().to_dict()
    config.pop("attention_bias", None)  # the tensors say it
    config["mask_token_id"] = file.entry("tokenizer.ggml.mask_token_id")
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return a head's tensors, under ``torch.device("meta")`` without their values. Raises ``OutriderError``."""
    file = _opened(path)
    found = _names(file)
    file.refuse_unsupported_types(name for name in found if name != MAPPING)
    if torch.get_default_device().type == "meta":
        return {own: _header(file, name) for name, own in found.items()}
    restore = gguf.restorer(file.config(), file)
    return {own: _values(file, name, restore) for name, own in found.items()}


def _opened(path: Path) -> gguf.GgufFile:
    file = gguf.GgufFile.open(path)
    if not file.is_head:
        raise OutriderError(f"{path} is a model of architecture {file.architecture}, not a head")
    return file


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


def _values(file: gguf.GgufFile, name: str, restore: Callable[[Any, str], Any]) -> Tensor:
    """Return a tensor's values in the layout of a folder."""
    tensor = file.tensors[name]
    if name != MAPPING:
        return gguf.rows_of(restore, tensor)
    ids = torch.from_numpy(tensor.data.astype(np.int64))
    return ids - torch.arange(len(ids))


def _header(file: gguf.GgufFile, name: str) -> Tensor:
    """Return a tensor without its values."""
    tensor = file.tensors[name]
    dtype = torch.long if name == MAPPING else gguf.PLAIN.get(tensor.tensor_type.name, torch.float32)
    return torch.empty(tensor.shape.tolist()[::-1], dtype=dtype, device="meta")
