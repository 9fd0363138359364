"""Packed weights for the CPU kernels: 16 bits as in the checkpoint.

Arithmetic is float32, except for bfloat16 weights on CPUs that multiply them faster (AMX, AVX-512 BF16): there inputs are
rounded to bfloat16, sums are float32, and a dozen rows cost as much as one.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.runner import huge_pages, kernels


def apply(x: Tensor, packed: Tensor, scales: Tensor | None, bias: Tensor | None, outputs: int) -> Tensor:
    """Applies a packed weight to x [..., inputs] -> [..., outputs]."""
    out: Tensor
    if scales is None:
        out = torch.ops.outrider.linear(x, packed, bias, outputs)
    else:
        out = torch.ops.outrider.linear_scaled(x, packed, scales, bias, outputs)
    return out


class PackedLinear(nn.Module):
    """Linear layer with a weight packed for ``outrider::linear``; sums and output are float32."""

    packed: Tensor
    scales: Tensor | None  # if the weight consists of codes (see quantized.py)
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach()
        self.register_buffer("packed", kernels.pack_weight(weight, kernels.suits_pairs(weight)), persistent=False)
        self.register_buffer("scales", None, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Empty tensor with dtype and device, which some models read from their layers."""
        return torch.empty(0, dtype=torch.float32, device=self.packed.device)

    def forward(self, x: Tensor) -> Tensor:
        return apply(x, self.packed, self.scales, self.bias, self.out_features)


class PackedEmbedding(nn.Module):
    """Embedding that reads rows from the packed weight of its tied output head, so that the table is stored once."""

    packed: Tensor

    def __init__(self, head: PackedLinear, original: nn.Embedding) -> None:
        super().__init__()
        self.register_buffer("packed", head.packed, persistent=False)
        self.num_embeddings, self.embedding_dim, self.padding_idx = head.out_features, head.in_features, original.padding_idx
        scale = getattr(original, "embed_scale", None)  # of transformers' ...ScaledWordEmbedding, in the table's dtype
        self._scale = None if scale is None else float(torch.as_tensor(scale).to(head.packed.dtype))

    @property
    def weight(self) -> Tensor:
        """NaN in the table's shape [V, H], one number in memory: models read dtype, shape, or a row that text does not use."""
        return torch.full((), torch.nan, device=self.packed.device).expand(self.num_embeddings, self.embedding_dim)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows: Tensor = torch.ops.outrider.embed(
            token_ids, self.packed
        )  # one operation: inductor would inline and repeat it per use
        return rows if self._scale is None else rows * self._scale


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight [outputs, inputs] of a linear layer or an embedding, packed or not."""
    packed = getattr(module, "packed", None)
    if packed is None:
        weight: Any = module.weight
        return weight  # type: ignore[no-any-return]
    return kernels.unpack_weight(packed, int(getattr(module, "out_features", None) or module.num_embeddings))  # type: ignore[arg-type]


class FusedLinears(nn.Module):
    """Layers with the same input, computed in one operation: one stream of weights instead of several short ones.

    A ``FusedSlice`` replaces each layer. The first one called computes all; a slice called with another tensor than its
    siblings computes again, so fusion can cost time but never gives a wrong result.
    """

    packed: Tensor
    scales: Tensor | None
    bias: Tensor | None

    def __init__(self, layers: list[PackedLinear]) -> None:
        super().__init__()
        biases = [layer.bias for layer in layers]
        bias = None
        if any(b is not None for b in biases):
            zeros = [torch.zeros(layer.out_features) for layer in layers]
            bias = torch.cat([z if b is None else b for b, z in zip(biases, zeros, strict=True)])
        shape = (sum(layer.packed.shape[0] for layer in layers), *layers[0].packed.shape[1:])
        packed = huge_pages.empty(shape, layers[0].packed.dtype)
        self.register_buffer("packed", torch.cat([layer.packed for layer in layers], out=packed), persistent=False)
        self.register_buffer("scales", None, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.out_features = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output of layer ``index`` for x [..., inputs]."""
        if self._input is not x or self._parts[index] is None:
            out = apply(x, self.packed, self.scales, self.bias, sum(self.out_features))
            self._input, self._parts = x, list(out.split(self.out_features, -1))
        part, self._parts[index] = self._parts[index], None
        if not any(kept is not None for kept in self._parts):
            self._input = None
        assert part is not None
        return part


class FusedSlice(nn.Module):
    """One layer of a ``FusedLinears``, replacing the original."""

    def __init__(self, group: FusedLinears, index: int, in_features: int) -> None:
        super().__init__()
        self._group = [group]  # in a list: the group is registered with the parent, once
        self.index, self.in_features, self.out_features = index, in_features, group.out_features[index]

    @property
    def weight(self) -> Tensor:
        """Empty tensor with dtype and device, which some models read from their layers."""
        return torch.empty(0, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self._group[0].part(self.index, x)


PRODUCTS = re.compile(r"\blinear\(.*\bself\.(\w+)\.weight\b|\bself\.(\w+)\.weight @")  # in the code of a forward pass
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))  # transformers' names


def fuse_siblings(model: PreTrainedModel) -> None:
    """Fuse packed layers that transformers' models apply to one input, in place."""
    # Keeping references to the layers would keep their memory.
    for parent in [module for module in model.modules() if not isinstance(module, PackedLinear)]:
        for names in SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if not all(isinstance(layer, PackedLinear) and layer.out_features % kernels.PANEL == 0 for layer in layers):
                continue
            group = FusedLinears(layers)  # type: ignore[arg-type]
            parent.add_module("fused_" + "_".join(names), group)
            for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
                setattr(parent, name, FusedSlice(group, index, layer.in_features))  # type: ignore[union-attr]
            del layers, layer
            _return_freed_memory()


def packed_layers(model: nn.Module) -> list[PackedLinear | FusedLinears]:
    """Return the model's layers that run on the CPU kernels."""
    return [module for module in model.modules() if isinstance(module, (PackedLinear, FusedLinears))]


def is_packed(model: nn.Module) -> bool:
    """Return whether the model's layers run on the CPU kernels."""
    return bool(packed_layers(model))


def arithmetic(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's products."""
    layers = packed_layers(model)
    if layers:
        return torch.bfloat16 if any(kernels.in_groups(layer.packed) for layer in layers) else torch.float32
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def is_plain(model: nn.Module) -> bool:
    """Whether the weights are plain numbers in one place: neither quantised, by whatever library, nor spread over devices."""
    if getattr(model, "is_quantized", False) or getattr(model, "hf_device_map", None) is not None:
        return False
    return all(type(parameter.data) is Tensor for parameter in model.parameters())


def pack_model(model: PreTrainedModel) -> None:
    """Replaces every plain linear layer by a packed one and makes all other arithmetic float32, in place.

    Embeddings keep their 16-bit table, or read the packed one of a head tied to them. Quantised or otherwise special linear
    layers are left as they are, and so are those whose weight the model multiplies by itself.
    """
    packed: dict[int, PackedLinear] = {}
    kept = {id(layer) for parent in model.modules() for layer in _multiplied_by(parent)}
    embeddings = {id(module.weight): (name, module) for name, module in model.named_modules() if _is_plain_embedding(module)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) not in (nn.Linear, Conv1D) or id(module) in kept:
            continue
        if id(module) not in packed:
            weight = module.weight if type(module) is nn.Linear else module.weight.T
            layer = packed[id(module)] = PackedLinear(weight, module.bias)
            del weight
            tied = embeddings.pop(id(module.weight), None)
            if tied is not None:
                _replace(model, tied[0], PackedEmbedding(layer, tied[1]))
            module.weight = None  # free the original before packing the next
            _return_freed_memory()
        _replace(model, name, packed[id(module)])
    packed.clear()  # fusing frees memory incrementally
    embeddings.clear()
    fuse_siblings(model)
    _make_the_rest_float32(model)


def _multiplied_by(module: nn.Module) -> list[nn.Module]:
    """Layers of a module whose weight its code takes for a product of its own, as some routers do."""
    layers = (getattr(module, name, None) for name in _names_multiplied(type(module).forward))
    return [layer for layer in layers if isinstance(layer, nn.Module)]


@cache
def _names_multiplied(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        code = inspect.getsource(forward)
    except (OSError, TypeError):  # not of a file; the check of a loaded model sees what then goes wrong
        return ()
    return tuple(first or second for first, second in PRODUCTS.findall(code))


def _make_the_rest_float32(model: PreTrainedModel) -> None:
    for module in model.modules():
        if not isinstance(module, (PackedLinear, PackedEmbedding, FusedLinears)):
            _make_float32(module)


def _make_float32(module: nn.Module) -> None:
    """Convert everything except packed layers to float32. An embedding keeps its table; its rows are converted."""
    if isinstance(module, nn.Embedding):
        module.weight.requires_grad_(False)
        module.register_forward_hook(_to_float32)
        return
    for key, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(parameter.detach().float(), requires_grad=False))
    for key, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_floating_point():
            setattr(module, key, buffer.float())


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps the holes left by packing, more than half the model's size."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _is_plain_embedding(module: nn.Module) -> bool:
    """Return whether ``PackedEmbedding`` is equivalent to the module."""
    return type(module) is nn.Embedding or (
        isinstance(module, nn.Embedding) and type(module).__name__.endswith("ScaledWordEmbedding")
    )


def _replace(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _to_float32(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float()


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules that shares all memory, so that the runner does not change the user's model."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:  # a new object, because requires_grad belongs to the object
            shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copy.deepcopy(model, shared)
