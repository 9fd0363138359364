"""Replace a model's layers with those of the CPU kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.memory import return_freed_memory
from outrider.runner import blocks
from outrider.runner.checkpoints.stored import StoredLinear
from outrider.runner.checkpoints.weight import QuantizedWeight
from outrider.runner.experts import make_invariant, multiplies_own_weight, pack_experts, sizes_of, source_of
from outrider.runner.linear import (
    Activation,
    PackedEmbedding,
    PackedLinear,
    activation_of,
    fuse_siblings,
    is_plain_embedding,
)
from outrider.runner.loading import decoder_of
from outrider.types import OutriderError

SMALL = 64  # layers with fewer inputs or outputs, such as routers and gates, keep 8 bits where others have 4
PRODUCTS = re.compile(r"\blinear\(.*\bself\.(\w+)\.weight\b|\bself\.(\w+)\.weight @")  # in the source of ``forward``


def pack_model(model: PreTrainedModel, bits: int | None = None) -> None:
    """Replace plain linear layers and activations with those of our kernels, convert other arithmetic to float32, in place.

    ``bits``: 8 or 4 for weights in blocks, or None for the checkpoint's own dtype; the head, the input embedding and small
    layers have at least 8. Other embeddings keep their table, or read the packed one of a head tied to them. Layers that hold
    quantised weights of a checkpoint keep their values; with ``bits``, floating-point ones are rounded. Not changed: linear
    layers quantised by another library or otherwise special, and those whose weight the model's own code multiplies. Each
    original is freed before the next layer is packed.

    Raises ``OutriderError`` for invalid values in a quantised checkpoint.
    """
    packed: dict[int, PackedLinear] = {}
    _pack_experts(model, bits)
    multiplied = _multiplied(model)
    head = model.get_output_embeddings() if bits else None
    embeddings = {id(module.weight): (name, module) for name, module in model.named_modules() if is_plain_embedding(module)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, StoredLinear):
            model.set_submodule(name, _stored(module, bits, module is head))
            del module
            return_freed_memory()
            continue
        if multiplies_own_weight(module):
            make_invariant(module)
        elif activation := activation_of(module):
            model.set_submodule(name, Activation(activation))
        if type(module) not in (nn.Linear, Conv1D) or id(module) in multiplied:
            continue
        if id(module) not in packed:
            weight = module.weight if type(module) is nn.Linear else module.weight.T
            width = bits and layer_bits(weight.shape, bits, module is head)
            layer = packed[id(module)] = PackedLinear.of(weight, module.bias, width)
            del weight
            tied = embeddings.pop(id(module.weight), None)
            if tied is not None:
                model.set_submodule(tied[0], PackedEmbedding(layer.packed, tied[1]))
            module.weight = None  # free the original before packing the next
            return_freed_memory()
        model.set_submodule(name, packed[id(module)])
    if bits:
        _pack_input_embedding(model, embeddings)
    packed.clear()  # fusing frees memory incrementally
    embeddings.clear()
    fuse_siblings(model)
    _make_the_rest_float32(model)


def _pack_experts(model: nn.Module, bits: int | None) -> None:
    """Replace experts that transformers keeps in two tensors, in place."""
    for name, module in list(model.named_modules()):
        if sizes := sizes_of(module):
            model.set_submodule(name, pack_experts(module, bits and layer_bits(sizes[1:], bits, is_head=False)))
            return_freed_memory()


def _stored(module: StoredLinear, bits: int | None, is_head: bool) -> PackedLinear:
    """Pack a layer of a quantised checkpoint, see ``pack_model``."""
    weight = module.read()
    if bits is None or isinstance(weight, QuantizedWeight):
        try:
            return PackedLinear.of(weight, module.bias)
        except OutriderError as error:  # values that blocks cannot hold
            raise OutriderError(f"{module.name}: {error}") from error
    return PackedLinear.of(weight, module.bias, layer_bits(weight.shape, bits, is_head))


def layer_bits(shape: Sequence[int], bits: int, is_head: bool) -> int:
    """Return the bits of one layer in a model of 8 or 4: heads distinguish similar tokens, and small layers are sensitive."""
    return 8 if is_head or min(shape) < SMALL else bits


def share_of_linear(model: PreTrainedModel) -> float:
    """Return the share of the language model's weights that ``pack_model`` rounds to 8 or 4 bits; works on the meta device."""
    parts = [part for part in (decoder_of(model), model.get_output_embeddings()) if part is not None]
    every = {id(parameter): parameter.numel() for part in parts for parameter in part.parameters()}
    multiplied, table = _multiplied(model), model.get_input_embeddings()
    rounded = {
        id(module.weight)
        for part in parts
        for module in part.modules()
        if (type(module) in (nn.Linear, Conv1D) and id(module) not in multiplied)
        or (module is table and is_plain_embedding(module))
    }
    experts = [module for part in parts for module in part.modules() if sizes_of(module)]
    rounded |= {id(parameter) for module in experts for parameter in module.parameters()}
    return float(sum(count for key, count in every.items() if key in rounded) / max(1, sum(every.values())))


def _pack_input_embedding(model: PreTrainedModel, embeddings: dict[int, tuple[str, nn.Embedding]]) -> None:
    """Round the input embedding's table to 8 bits, if the model's input embedding is among these modules."""
    for name, module in embeddings.values():
        if module is model.get_input_embeddings():
            model.set_submodule(name, PackedEmbedding(blocks.pack(module.weight.detach(), 8), module))


def _multiplied(model: nn.Module) -> set[int]:
    """Return the ids of layers whose weight another module's own code multiplies, as some routers do."""
    return {id(getattr(parent, name, None)) for parent in model.modules() for name in _names_multiplied(type(parent).forward)}


@cache
def _names_multiplied(forward: Callable[..., Any]) -> tuple[str, ...]:
    code = source_of(forward) or ""  # without a source file the self-check of the loaded model finds errors
    return tuple(first or second for first, second in PRODUCTS.findall(code))


def _make_the_rest_float32(model: PreTrainedModel) -> None:
    """Convert everything except packed layers to float32. An embedding keeps its table; its rows are converted."""
    for module in model.modules():
        if isinstance(module, (PackedLinear, PackedEmbedding)):
            continue
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
            module.register_forward_hook(lambda _module, _args, output: output.float())
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, nn.Parameter(parameter.detach().float(), requires_grad=False))
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, key, buffer.float())
