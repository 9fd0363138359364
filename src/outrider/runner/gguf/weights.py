"""Load the tensors of a GGUF file into a model. Quantised tensors keep their values, in blocks.

Tensors are read one after another, so that loading takes little more memory than the file's size.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from outrider import native
from outrider.memory import require_memory
from outrider.runner.config import torch_dtype
from outrider.runner.experts import PackedExperts, pack_experts, sizes_of, weight_names
from outrider.runner.gguf import codes
from outrider.runner.gguf.architecture import FACTORS, Array
from outrider.runner.gguf.file import PLAIN, FileTensor, GgufFile, close_cached_files, tensors_by_parameter
from outrider.runner.linear import JoinedLinear, PackedEmbedding, PackedLinear, is_plain_embedding
from outrider.types import OutriderError, dtype_name

logger = logging.getLogger(__name__)


def load_weights(model: PreTrainedModel, path: Path, dtype: torch.dtype | str, device: torch.device) -> None:
    """Load the weights of a file into a model on the meta device, in place.

    With ``dtype="auto"`` on a CPU with Outrider's kernels, quantised linear layers and embeddings become packed ones with the
    values of the file, and the other tensors keep their type. Otherwise tensors are converted to ``dtype``, "auto" being
    bfloat16 for a quantised file, else the file's own type; those that transformers keeps in float32 become float32.

    Raises ``OutriderError`` for tensors that do not match the model, and for weights that exceed the memory.
    """
    file = GgufFile.open(path)
    close_cached_files()
    names = file.names(model)
    keeps = dtype == "auto" and native.serves(device)
    if file.is_quantized and not keeps:
        to = torch_dtype(dtype) or torch.bfloat16
        why = "dtype was specified" if dtype != "auto" else "quantised weights need a CPU with Outrider's kernels"
        logger.warning("the weights of %s are dequantised to %s: %s", path, dtype_name(to), why)
    else:
        to = torch_dtype(dtype) or file.plain_dtype
    require_memory(file.num_bytes(None if keeps else to), f"the weights in {path} take", "choose a smaller model")
    _fill_buffers(model, file)
    read, places = partial(read_tensor, converter_undo(model.config, file)), _places(model, set(names.values()))
    parts = tensors_by_parameter(names)
    in_blocks = {each: same for each, same in parts.items() if keeps and _stays_in_blocks(model, file, each, same)}
    exact = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(to)]  # of parameters that stay in float32
    for parameter, same in parts.items():
        if parameter in in_blocks:
            continue
        module, order = model.get_submodule(parameter.rpartition(".")[0]), file.record.row_order(parameter, model.config)
        values = join_parts([read(file.tensors[name]) for name in same], module, order)
        if not keeps:
            values = values.to(torch.float32 if any(re.search(pattern, parameter) for pattern in exact) else to)
        loaded = nn.Parameter(values, requires_grad=False)
        for place in places[parameter]:
            _set(model, place, loaded)
    _load_blocks(model, file, in_blocks, places, read)  # after the biases, which the packed layers copy


def _stays_in_blocks(model: PreTrainedModel, file: GgufFile, parameter: str, names: list[str]) -> bool:
    """Return whether a packed layer can hold the blocks of the tensors of these names, which are a parameter."""
    module = model.get_submodule(parameter.rpartition(".")[0])
    is_expert = sizes_of(module) is not None and parameter.endswith("_proj")
    if not (is_expert or type(module) is nn.Linear or is_plain_embedding(module)) or file.record.is_decoded(names[0]):
        return False
    return all(file.tensors[name].tensor_type.name in codes.FORMATS for name in names)


def _load_blocks(
    model: PreTrainedModel,
    file: GgufFile,
    parts: Mapping[str, list[str]],
    places: Mapping[str, list[str]],
    read: Callable[..., Tensor],
) -> None:
    """Replace layers by packed ones. ``parts``: the names of each parameter's tensors. Raises ``OutriderError``."""
    packed: dict[str, Tensor] = {}
    for parameter, names in parts.items():
        layer, order = parameter.rpartition(".")[0], file.record.row_order(parameter, model.config)
        if len({file.tensors[name].tensor_type for name in names}) == 1:
            packed[parameter] = _packed(file, names, read, order)
            continue
        assert getattr(model.get_submodule(layer), "bias", None) is None
        _set(model, layer, _joined(file, names, read, order))
    for parameter in packed:  # when both weights of a layer's experts are packed
        for place in places[parameter]:
            _set_packed(model, place.rpartition(".")[0], parameter, packed)
    _set_orders(model, file, {name: parameter for parameter in packed for name in parts[parameter]})


def _joined(file: GgufFile, names: list[str], read: Callable[..., Tensor], order: Array | None) -> JoinedLinear:
    """Return a layer without a bias from the tensors of these names, which are of different types. Raises ``OutriderError``."""
    parts = [PackedLinear(_packed(file, [name], read, None), file.tensors[name].shape) for name in names]
    return JoinedLinear(parts, None if order is None else torch.from_numpy(order))


def _packed(file: GgufFile, names: list[str], read: Callable[..., Tensor], order: Array | None) -> Tensor:
    """Return the packed weight of one parameter, stored in the tensors of these names. Raises ``OutriderError``."""
    tensors = [file.tensors[name] for name in names]
    parts = [read(tensor, in_blocks=True) for tensor in tensors]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, -2)  # of experts the gate comes first
    rows, factors = whole.flatten(0, -2), None
    if any(tensor.factors is not None for tensor in tensors):
        each = [torch.ones(1) if tensor.factors is None else torch.from_numpy(tensor.factors) for tensor in tensors]
        pairs = zip(each, parts, strict=True)
        factors = torch.cat(
            [one.view(-1, *[1] * (part.dim() - 2)).expand(part.shape[:-1]) for one, part in pairs], -1
        ).flatten()
    if order is not None:
        index = torch.from_numpy(order)
        rows, factors = rows[index], None if factors is None else factors[index]
    try:
        return codes.pack(rows, tensors[0].tensor_type.name, factors)
    except OutriderError as error:
        raise OutriderError(f"{file.path}: tensor {names[0]}: {error}") from error


def _set_packed(model: PreTrainedModel, layer: str, parameter: str, packed: Mapping[str, Tensor]) -> None:
    """Replace a layer of the model by a packed one. ``parameter``: the parameter whose packed weight it gets."""
    module = model.get_submodule(layer)
    if isinstance(module, nn.Embedding):
        _set(model, layer, PackedEmbedding(packed[parameter], module))
    elif isinstance(module, nn.Linear):
        _set(model, layer, PackedLinear(packed[parameter], module.weight.shape, module.bias))
    elif not isinstance(module, PackedExperts):  # otherwise both weights are placed already
        given = {name: packed[f"{layer}.{name}"] for name in weight_names(module) if f"{layer}.{name}" in packed}
        _set(model, layer, pack_experts(module, None, given))


def join_parts(parts: list[Tensor], module: Any, order: Array | None = None) -> Tensor:
    """Return a parameter from its tensor or its two halves, in transformers' layout. ``order``: ``Architecture.row_order``."""
    whole = parts[0]
    if len(parts) == 2:
        is_mixed = not getattr(module, "is_concatenated", True)  # rows of gate and up projection alternate
        whole = torch.stack(parts, 2).flatten(1, 2) if is_mixed else torch.cat(parts, -2)
    whole = whole if order is None else whole[torch.from_numpy(order)]
    if isinstance(module, nn.Linear) and whole.dim() > 2:
        return whole.flatten(0, -2)  # of all heads
    return whole.transpose(1, 2).contiguous() if whole.dim() == 3 and getattr(module, "is_transposed", False) else whole


def _set_orders(model: PreTrainedModel, file: GgufFile, packed: Mapping[str, str]) -> None:
    """Tell packed layers the order of their inputs where it is not the model's. ``packed``: the model's names by the file's."""
    for name, parameter in packed.items():
        order = file.record.input_order(name, model.config)
        if order is not None:
            model.get_submodule(parameter.removesuffix(".weight")).order = torch.from_numpy(order)


def converter_undo(config: PreTrainedConfig, file: GgufFile) -> Callable[[Array, str], Array]:
    """Return what undoes llama.cpp's changes of a tensor's rows, such as the order of those of queries and keys."""
    restore = file.record.restore
    found: Any = TENSOR_PROCESSORS.get(file.record.changes_like or ("" if restore else file.architecture))
    names = ("num_attention_heads", "num_key_value_heads")
    processor = None if found is None else found(config={name: getattr(config, name) for name in names})

    def undo(rows: Array, name: str) -> Array:
        rows = rows if processor is None else processor.process(weights=rows, name=name).weights
        return rows if restore is None else restore(rows, name, config)

    return undo


def _places(model: PreTrainedModel, given: set[str]) -> dict[str, list[str]]:
    """Map each given parameter to the names it fills: its own, and those of tied parameters that are not given."""
    parameters = model.state_dict(keep_vars=True)
    return {
        each: [name for name, same in parameters.items() if name == each or (same is parameters[each] and name not in given)]
        for each in given
    }


def read_tensor(undo: Callable[[Array, str], Array], tensor: FileTensor, in_blocks: bool = False) -> Tensor:
    """Return a tensor's values as a copy that does not keep the file mapped, or the bytes of its blocks, to read once."""
    kind, data = tensor.tensor_type.name, tensor.data
    if kind not in PLAIN and not in_blocks:
        data = import_module("gguf").dequantize(data, tensor.tensor_type)
        if tensor.factors is not None:
            data = data * tensor.factors.reshape(-1, *[1] * (data.ndim - 1))
    if kind == "BF16":  # numpy has no bfloat16: the library returns bytes
        data = data.view(np.uint16)
    if in_blocks:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of torch: the file is mapped for reading only
            return torch.from_numpy(np.ascontiguousarray(undo(data, tensor.name)))
    rows = torch.from_numpy(np.array(undo(data, tensor.name), order="C"))
    return rows.view(torch.bfloat16) if kind == "BF16" else rows


def _set(model: PreTrainedModel, name: str, value: nn.Module | nn.Parameter) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)


def _fill_buffers(model: PreTrainedModel, file: GgufFile) -> None:
    """Compute the buffers of a model on the meta device: rotary frequencies, and factors of embeddings and projections."""
    stored = model.state_dict().keys()
    for name, module in list(model.named_modules()):
        buffers = module.named_buffers(name, recurse=False)
        computed = [own.rpartition(".")[2] for own, buffer in buffers if buffer.is_meta and own not in stored]
        if not computed:
            continue
        if isinstance(module, nn.Embedding):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
            continue
        if hasattr(module, "mup_vector"):  # factors of Falcon H1, which are in the weights
            module.mup_vector = torch.ones(())
            continue
        if not any(own.endswith("inv_freq") for own in computed):
            _init_buffers(model, module, computed)
            continue
        rotary: Any = type(module)(module.config)
        if FACTORS in file.tensors and rotary.rope_type == "default":
            factors = torch.from_numpy(file.tensors[FACTORS].data.copy()).float()
            if factors.shape != rotary.inv_freq.shape:
                raise OutriderError(
                    f"{file.path}: tensor {FACTORS} is {list(factors.shape)}, expected {list(rotary.inv_freq.shape)}"
                )
            rotary.inv_freq = rotary.inv_freq / factors
        _set(model, name, rotary)


def _init_buffers(model: PreTrainedModel, module: nn.Module, names: list[str]) -> None:
    """Let transformers compute a module's buffers. Its parameters are on the meta device, where this changes nothing."""
    for name in names:
        setattr(module, name, torch.full_like(module.get_buffer(name), torch.nan, device="cpu"))
    (module if isinstance(module, PreTrainedModel) else model)._init_weights(module)
    assert not any(module.get_buffer(name).isnan().any() for name in names), type(module)
