"""MTP heads on disk in three checkpoint layouts, in the target's folder or in a separate one; for GGUF see mtp_gguf.py.

A head is recognised by its tensors, because configs still mention a head that a quantiser has dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.heads import assistant, gguf_heads, mtp_gguf
from outrider.heads.assistant import AssistantHead
from outrider.heads.checkpoint import (
    MTP,
    HeadFiles,
    TargetSizes,
    find_folder,
    kinds_of,
    read_config,
    read_folder,
    tensor_names,
    write_folder,
)
from outrider.heads.mtp import LayerTemplate, MtpHead, built_head
from outrider.runner import ModelRunner, gguf, loading
from outrider.types import OutriderError
from outrider.weight_files import weight_bytes

IGNORED = (r"rotary_emb\.",)
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # tensors of experts, by transformers' names
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True)
class Layout:
    """Names of a head's tensors in one family of checkpoints."""

    pattern: str  # regular expression of the name prefix
    prefix: str  # prefix of the first head; {n}: the target's number of layers
    parts: Mapping[str, str]  # the head's module -> its name after the prefix; "" is the decoder layer's
    hidden_first: bool = False  # whether the feature's columns of fc come before the embedding's
    count: str = "num_nextn_predict_layers"  # config key of the number of heads


QWEN = {"fc": "fc", "embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
DEEPSEEK = {"fc": "eh_proj", "embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
# vLLM and SGLang zero the embedding at position 0 of MiMo's head; the model's own code (modeling_mimo.py) does not.
MIMO = {"fc": "input_proj", "embed_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "norm": "final_layernorm"}
OWN = {"embed_tokens": "embed_tokens", "lm_head": "lm_head"}
LAYOUTS = {
    "qwen": Layout(r"mtp\.", "mtp.", QWEN | OWN | {"layers.0": "layers.0"}, count="mtp_num_hidden_layers"),
    "deepseek": Layout(
        r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.",
        "model.layers.{n}.",
        DEEPSEEK | OWN | {"lm_head": "shared_head.head", "layers.0": ""},
    ),
    "mimo": Layout(r"(?:model\.)?mtp_layers\.0\.", "model.mtp_layers.0.", MIMO | OWN | {"layers.0": ""}, hidden_first=True),
}


def load(source: str | Path, target: ModelRunner) -> MtpHead:
    """Read a head for this target, in float32. Raises ``OutriderError`` naming the tensor that is missing or does not fit."""
    folder = find_folder(source)
    layout, prefix = _found_layout(folder, target.num_layers, str(source))
    files = HeadFiles.of(source, folder, prefix)
    found = files.tensors = {
        own: tensor
        for name, tensor in files.tensors.items()
        if (own := _own_name(layout, name.removeprefix(prefix))) is not None
    }
    template = _template(folder, files.config, target)
    head = built_head(files, template, template.layer_for(any(".experts." in name for name in found)), target)

    def named(name: str) -> str:
        return prefix + _stored_name(layout, name)

    _stack_experts(found, head.state_dict(), named, source)
    if layout.hidden_first and "fc.weight" in found:
        found["fc.weight"] = _swapped(found["fc.weight"])
    return files.fill(head, IGNORED, named)


def load_any(folder: Path, target: ModelRunner) -> MtpHead | AssistantHead:
    """Read an MTP head or one of Gemma 4's assistants. Raises ``OutriderError`` if it does not fit the target."""
    file = gguf.find(folder)
    if file is not None and not gguf_heads.is_head(file):
        return mtp_gguf.load(file, target)
    return (assistant.load if assistant.is_assistant(folder) else load)(folder, target)


def head_bytes(folder: Path, target: TargetSizes) -> int | None:
    """Return the bytes of the head in a folder, recognised by tensor names; None without one. Only headers are read.

    Raises ``OutriderError`` for a head that lacks ``fc``, has another width than the target, or is quantised.
    """
    file = gguf.find(folder)
    if file is not None and not gguf_heads.is_head(file):
        return mtp_gguf.head_bytes(file, target)
    if MTP not in kinds_of(folder):
        return None
    if assistant.is_assistant(folder):
        assistant.check_files(folder, target)
        return weight_bytes(folder)
    layout, prefix = _found_layout(folder, target.num_layers, str(folder))
    with torch.device("meta"):
        files = HeadFiles("the head", folder, *read_folder(folder, prefix))
        num_bytes = sum(tensor.nbytes for tensor in files.tensors.values())  # before conversion, which widens FP8
        files.convert_fp8()
    name, wanted = f"{prefix}{layout.parts['fc']}.weight", (target.hidden_size, 2 * target.hidden_size)
    if name not in files.tensors:
        raise OutriderError(f"{folder} lacks tensors of the head, the first {name}")
    files.refuse_quantised()
    if files.tensors[name].shape != wanted:
        raise OutriderError(f"{name} has shape {list(files.tensors[name].shape)}, expected {list(wanted)} for this target")
    return num_bytes


def _found_layout(folder: Path, num_layers: int, source: str) -> tuple[Layout, str]:
    """Return the layout of the head in a folder, and the prefix of its tensors' names."""
    names = list(tensor_names(folder))
    for layout in LAYOUTS.values():
        starts = [start for name in names if (start := re.match(layout.pattern, name)) is not None]
        beyond = [start for start in starts if not start.groups() or int(start[1]) >= num_layers]
        if beyond:
            return layout, min(beyond, key=lambda start: int(start[1]) if start.groups() else 0)[0]
    if read_config(folder).get("model_type") in ASSISTANTS:
        raise OutriderError(f"{source} is one of Gemma 4's assistants: training and conversion are not supported")
    wanted = [each.prefix.format(n=num_layers) + each.parts["fc"] + ".weight" for each in LAYOUTS.values()]
    raise OutriderError(
        f"{source} holds no MTP head: none of {', '.join(wanted)} is there; give a folder with the head as the method's draft, "
        "or train one"
    )


def _own_name(layout: Layout, name: str) -> str | None:
    """Return the head's name of a tensor without its prefix; None for modules of further depths."""
    for own, part in layout.parts.items():
        if part and name.startswith(f"{part}."):
            return own + name.removeprefix(part)
    return f"layers.0.{name}" if layout.parts["layers.0"] == "" else None if name.startswith("layers.") else name


def _stored_name(layout: Layout, name: str) -> str:
    """Return a tensor's name in the layout, without its prefix; of a foreign tensor its own."""
    own = next((own for own in layout.parts if name.startswith(f"{own}.")), None)
    if own is None:
        return name
    return f"{layout.parts[own]}{name.removeprefix(own)}".removeprefix(".")


def _template(folder: Path, config: Mapping[str, Any], target: ModelRunner) -> LayerTemplate:
    """Return the model that provides the head's parts: the target, or the one described by the config of the head's folder."""
    own = target.model.config
    kinds = (own.model_type, loading.text_config(own).model_type)
    if config.get("model_type") in kinds:
        return LayerTemplate.of(own, type(target.model), target.cache.shape)
    described = loading.load_config(folder.parent if folder.is_file() else folder)
    return LayerTemplate.of(described, loading.model_class(described))


def _stack_experts(
    tensors: dict[str, Tensor], wanted: Mapping[str, Tensor], named: Callable[[str], str], source: object
) -> None:
    """Join the matrices of single experts to transformers' stacks of them, in place."""
    for name, there in wanted.items():
        stem, _, stack = name.rpartition(".experts.")
        if not stem or stack not in STACKS or name in tensors:
            continue
        each = [[f"{stem}.experts.{expert}.{part}.weight" for part in STACKS[stack]] for expert in range(len(there))]
        try:
            tensors[name] = torch.stack([torch.cat([tensors.pop(part) for part in parts]) for parts in each])
        except KeyError as missing:
            raise OutriderError(f"{source} lacks tensors of the head, the first {named(missing.args[0])}") from missing
        except RuntimeError as error:
            raise OutriderError(f"{source}: the experts of {named(stem + '.experts')} have different shapes") from error


def export(head: MtpHead, folder: Path, layout: str = "qwen", acceptance: list[float] | None = None) -> None:
    """Write a head with the config of the model whose layer it has.

    ``acceptance``: measured acceptance of the first, second, ... sibling, which determines tree shapes.
    """
    names = LAYOUTS[layout]
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        stem, _, stack = name.rpartition(".experts.")
        if not stem or stack not in STACKS:
            tensors[name] = tensor
            continue
        for expert, rows in enumerate(tensor):
            for part, matrix in zip(STACKS[stack], rows.chunk(len(STACKS[stack])), strict=True):
                tensors[f"{stem}.experts.{expert}.{part}.weight"] = matrix
    if names.hidden_first:
        tensors["fc.weight"] = _swapped(tensors["fc.weight"])
    prefix = names.prefix.format(n=head.hidden_states[0])
    config = json.loads(head.model_config.to_json_string(use_diff=False))
    config.get("text_config", config)[names.count] = 1
    tensors = {prefix + _stored_name(names, name): tensor for name, tensor in tensors.items()}
    write_folder(folder, config, tensors, acceptance_by_rank=acceptance)


def _swapped(weight: Tensor) -> Tensor:
    """Swap the two halves of the inputs of fc [H, 2H]."""
    return torch.cat(weight.chunk(2, -1)[::-1], -1)
