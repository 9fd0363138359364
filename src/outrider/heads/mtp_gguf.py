"""MTP heads in GGUF files: the last block of the target's own file, or of a file that llama.cpp wrote with ``--mtp``.

llama.cpp names the tensors as DeepSeek's checkpoints do, under the block after the model's last one, and changes them as it
changes those of the model's layers. Values are those of the file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from outrider.heads.checkpoint import HeadFiles, TargetSizes
from outrider.heads.mtp import LayerTemplate, MtpHead, built_head
from outrider.runner import ModelRunner, gguf
from outrider.runner.loading import decoder_layers, text_config
from outrider.types import OutriderError

PARTS = {  # the file's names -> the head's modules; the other tensors of the block are those of a decoder layer
    "nextn.eh_proj": "fc",
    "nextn.enorm": "embed_norm",
    "nextn.hnorm": "hidden_norm",
    "nextn.shared_head_norm": "norm",
    "nextn.shared_head_head": "lm_head",
    "nextn.embed_tokens": "embed_tokens",
}
HEAD_LAYER = "layers.0."


def is_head(path: Path, target: TargetSizes) -> bool:
    """Return whether a file has a head after the target's layers. Raises ``OutriderError`` for one of another width."""
    name = f"blk.{target.num_layers}.nextn.eh_proj.weight"
    found, wanted = gguf.GgufFile.open(path).tensors.get(name), [target.hidden_size, 2 * target.hidden_size]
    if found is None:
        return False
    if found.shape != wanted:
        raise OutriderError(f"{name} has shape {found.shape}, expected {wanted} for this target")
    return True


def head_bytes(path: Path, target: TargetSizes) -> int | None:
    """Return the bytes of the head in a file; None without one. Raises ``OutriderError`` like ``is_head``."""
    if not is_head(path, target):
        return None
    tensors, prefix = gguf.GgufFile.open(path).tensors, f"blk.{target.num_layers}."
    return sum(tensor.data.nbytes for name, tensor in tensors.items() if name.startswith(prefix))


def load(path: Path, target: ModelRunner) -> MtpHead:
    """Read a head for this target, in float32. Raises ``OutriderError`` naming the tensor that is missing or does not fit."""
    if not is_head(path, target):
        raise OutriderError(
            f"{path} holds no MTP head: it has no tensor blk.{target.num_layers}.nextn.eh_proj.weight; name a file or a folder"
            " with the head as the method's draft, or train one"
        )
    file, config = gguf.GgufFile.open(path), target.model.config
    file.refuse_unsupported()
    kind, wanted = file.record.model_type, text_config(config).model_type
    if kind not in (wanted, config.model_type):
        raise OutriderError(f"{path} is of a {kind} model, but {target.name} is a {wanted} model")
    template = LayerTemplate.of(config, type(target.model), target.cache.shape)
    prefix = f"blk.{target.num_layers}."
    layer = template.layer_for(any(name.startswith(prefix) and "_exps." in name for name in file.tensors))
    names = _names(file, prefix, template, layer)
    files = HeadFiles(path, path, {}, _values(file, names, template, layer))
    head = built_head(files, template, layer, target)
    stored = {f"{own}.weight": f"{prefix}{part}.weight" for part, own in PARTS.items()}
    stored |= {own: name for name, own in names.items()}
    return files.fill(head, named=lambda name: stored.get(name, name))


def _names(file: gguf.GgufFile, prefix: str, template: LayerTemplate, layer: int) -> dict[str, str]:
    """Return the head's name of each tensor of the block. Raises ``OutriderError`` for a tensor that no layer has."""
    known, names = file.known_names(template.model), {}
    for name in file.tensors:
        part = name.removeprefix(prefix)
        stem, _, ending = part.rpartition(".")
        if part == name:
            continue
        if stem in PARTS:
            names[name] = f"{PARTS[stem]}.{ending}"
            continue
        own = file.record.own_name(f"blk.{layer}.{part}", known)
        if not own:
            raise OutriderError(f"{file.path}: unexpected tensor {name} for a {template.model.config.model_type} model")
        names[name] = HEAD_LAYER + own.partition(f"layers.{layer}.")[2]
    return names


def _values(file: gguf.GgufFile, names: dict[str, str], template: LayerTemplate, layer: int) -> dict[str, Tensor]:
    """Return the values of the block's tensors under the head's names."""
    read = partial(gguf.read_tensor, gguf.converter_undo(text_config(template.model), file))
    modules = dict(decoder_layers(template.model)[layer].named_modules(prefix=HEAD_LAYER.removesuffix(".")))
    return {
        own: gguf.join_parts([read(file.tensors[name]) for name in same], modules.get(own.rpartition(".")[0]))
        for own, same in gguf.tensors_by_parameter(names).items()
    }
