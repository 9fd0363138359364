"""Describe how a llama.cpp architecture's GGUF files differ from the transformers model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")  # a layer's tensor: number of the layer, name in it
FACTORS = "rope_freqs.weight"  # Llama 3's divisors of rotary frequencies: a tensor instead of config entries
EXPERT_TENSOR = re.compile(r"(blk\.\d+\.ffn_)(gate|up|down)_exps\.(weight|bias)")
Array = np.ndarray[Any, Any]
Values = dict[str, Any]  # arguments of a config class of transformers
Entry = Callable[[str], Any]  # name without the architecture -> its value, or None
Tensors = Mapping[str, Any]  # ``file.FileTensor`` by name


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    model_type: str  # transformers' name
    complete: Callable[[Entry, Tensors, Values], None] | None = None  # (entries, tensors, values): adds values
    ignored: str = "(?!)"  # pattern of entries that do not affect text and that ``complete`` does not read; none by default
    flags: Mapping[str, str] = field(default_factory=dict)  # values that say whether the file has a tensor -> its name
    config_tensors: tuple[str, ...] = ()  # tensors that belong to the config
    router: int | None = None  # llama.cpp's code of what routers do with their scores, if the model does only that
    theta: float | None = None  # base of rotary positions that files may leave out; None: the config class's
    scalings: tuple[str, ...] = ("linear", "yarn")  # the supported kinds of scaled rotary positions
    entries: Mapping[str, str] = field(default_factory=dict)  # values that the file must state -> the names of their entries
    # Values that files may leave out -> (name of the entry, value if it is missing or 0).
    defaults: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)  # values that llama.cpp's code fixes
    none_if_missing: tuple[str, ...] = ()  # values that are None, not the config class's default, where the file has none
    # Values of a config, also of one beside the file, whose effect is in the file's tensors.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Name of the llama.cpp architecture whose tensor conversion transformers knows how to undo; default: this one, or none if
    # ``restore`` is given.
    changes_like: str = ""
    # Tensors that are parameters of the model one after another: A.weight becomes A.0.weight, A.1.weight ...
    stacked: tuple[str, ...] = ()
    layer_entries: tuple[str, ...] = ()  # entries with a number for each layer that are tensors: NAME becomes blk.0.NAME ...
    is_unused: Callable[[str, Any], bool] = lambda *_: False  # (tensor, config): the model does without it
    # Patterns of tensors that transformers does not map -> names. These and the next patterns are of names in a layer, or of
    # tensors that are in no layer.
    renamed: Mapping[str, str] = field(default_factory=dict)
    has_gates: bool = True  # experts have a gate projection
    # Pattern of tensors that come in pairs and form one parameter, its upper and its lower rows; experts do anyway.
    joined: str = "(?!)"
    # (parameter, config) -> order of a pair's rows, if it is another: row i of the parameter is row order[i] of the pair
    row_order: Callable[[str, Any], Array | None] = lambda *_: None
    # Pattern of tensors that are dequantised, because ``restore`` moves columns, which blocks do not allow.
    decoded: str = "(?!)"
    shape_of: Callable[[str, Any], list[int] | None] = lambda *_: None  # (tensor, config): its shape, if not the parameter's
    restore: Callable[[Array, str, Any], Array] | None = None  # (rows, tensor, config): undoes further changes
    input_order: Callable[[str, Any], Array | None] = lambda *_: None  # (tensor, config): the input of each column
    variant: Callable[[Entry, Tensors], Architecture | None] = lambda *_: None  # another record for some files

    def own_name(self, name: str, known: Mapping[str, str]) -> str:
        """Return the model's name of a tensor, "" for an unknown tensor. ``known``: the names that transformers maps."""
        block = BLOCK.fullmatch(name)
        for pattern, own in self.renamed.items():
            if found := re.fullmatch(pattern, name_in_layer(name)):
                return f"model.layers.{block[1]}.{found.expand(own)}" if block else f"model.{found.expand(own)}"
        expert = EXPERT_TENSOR.fullmatch(name)
        if expert and f"{expert[1]}down_exps" in known:  # the only one of them that transformers maps
            wide, ending = "gate_up" if self.has_gates else "up", "_bias" if expert[3] == "bias" else ""
            part = "down" if expert[2] == "down" else wide
            return f"{known[f'{expert[1]}down_exps'].removesuffix('down_proj')}{part}_proj{ending}"
        return known.get(name) or known.get(name.removesuffix(".weight")) or ""  # a buffer's name has no such ending

    def is_half(self, name: str) -> bool:
        """Return whether a parameter consists of two tensors of which this is one."""
        expert = EXPERT_TENSOR.fullmatch(name)
        return bool(expert and expert[2] != "down" and self.has_gates) or bool(re.fullmatch(self.joined, name_in_layer(name)))

    def is_decoded(self, name: str) -> bool:
        """Return whether a tensor's values are read even if the model could hold its blocks."""
        return re.fullmatch(self.decoded, name_in_layer(name)) is not None


def name_in_layer(name: str) -> str:
    """Return the name of a layer's tensor without the layer; other names as they are."""
    block = BLOCK.fullmatch(name)
    return block[2] if block else name
