"""Packed weights for the CPU kernels: 16 bits as in the checkpoint, or 8 or 4 bits in blocks (see blocks.py).

Arithmetic is float32, except for bfloat16 weights on CPUs that multiply them faster (AMX, AVX-512 BF16): there inputs are
rounded to bfloat16, sums are float32, and a dozen rows cost as much as one. Inputs of weights in blocks are rounded to 8 bits
on CPUs with AVX-512 VNNI.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from outrider.memory import return_freed_memory
from outrider.runner import blocks, huge_pages, kernels
from outrider.runner.checkpoints.weight import QuantizedWeight


class PackedLinear(nn.Module):
    """Linear layer with a weight packed for ``outrider::linear``; sums and output are float32."""

    packed: Tensor
    bias: Tensor | None
    order: Tensor | None

    def __init__(self, packed: Tensor, shape: Sequence[int], bias: Tensor | None = None, order: Tensor | None = None) -> None:
        """``shape``: outputs and inputs, unpadded. ``order`` int64 [inputs]: the input of each column, None if in order."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @classmethod
    def of(cls, weight: Tensor | QuantizedWeight, bias: Tensor | None, bits: int | None = None) -> Self:
        """Pack a weight. ``bits``: 8 or 4; None: in its own dtype. Codes of a checkpoint keep exactly their values."""
        if isinstance(weight, QuantizedWeight):
            zeros = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros
            packed = blocks.pack_codes(
                weight.codes, weight.bits, weight.scales, group=weight.group, zeros=zeros, kind=weight.kind
            )
            return cls(packed, weight.codes.shape, bias, weight.order)
        weight = weight.detach()
        in_pairs = kernels.can_use_bfloat16_products(weight)
        return cls(blocks.pack(weight, bits) if bits else kernels.pack_weight(weight, in_pairs), weight.shape, bias)

    @property
    def weight(self) -> Tensor:
        """Empty tensor with dtype and device, which some models read from their layers."""
        return torch.empty(0, dtype=torch.float32, device=self.packed.device)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        x = x if self.order is None else x.index_select(-1, self.order)
        out: Tensor = torch.ops.outrider.linear(x, self.packed, self.bias, self.out_features, blocks.activation_bits())
        return out


class JoinedLinear(nn.Module):
    """One linear layer whose rows are those of several packed ones, because they are of different types."""

    order: Tensor | None

    def __init__(self, parts: Sequence[PackedLinear], order: Tensor | None) -> None:
        """``order`` int64 [outputs]: the row of all parts together that is each output; None if they are in order."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)
        self.register_buffer("order", order, persistent=False)

    @property
    def weight(self) -> Tensor:
        """Empty tensor with dtype and device, which some models read from their layers."""
        return torch.empty(0, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        out = torch.cat([part(x) for part in self.parts], -1)
        return out if self.order is None else out.index_select(-1, self.order)


class PackedEmbedding(nn.Module):
    """Embedding that reads rows of a packed weight: its tied output head's, or its own in 8 bits."""

    packed: Tensor

    def __init__(self, packed: Tensor, original: nn.Embedding) -> None:
        super().__init__()
        self.register_buffer("packed", packed, persistent=False)
        self.num_embeddings, self.embedding_dim = original.weight.shape
        self.padding_idx = original.padding_idx
        # From transformers' ...ScaledWordEmbedding, in the table's dtype.
        scale = getattr(original, "scalar_embed_scale", getattr(original, "embed_scale", None))
        self.embed_scale = None if scale is None else float(torch.as_tensor(scale).to(original.weight.dtype))

    @property
    def weight(self) -> Tensor:
        """NaN expanded to the table's shape [V, H]: models read its dtype, its shape, or the padding row."""
        return torch.full((), torch.nan, device=self.packed.device).expand(self.num_embeddings, self.embedding_dim)

    def forward(self, token_ids: Tensor) -> Tensor:
        # One operation: inductor would inline and repeat several per use.
        rows: Tensor = torch.ops.outrider.embed(token_ids, self.packed, self.embedding_dim)
        return rows if self.embed_scale is None else rows * self.embed_scale


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight [outputs, inputs] of a linear layer or an embedding, packed or not."""
    if isinstance(module, JoinedLinear):
        rows = torch.cat([weight_of(part) for part in module.parts])
        return rows if module.order is None else rows[module.order]
    packed = getattr(module, "packed", None)
    if packed is None:
        weight: Any = module.weight
        return weight
    return _unpacked(module, packed, _num_outputs(module))


def weight_slices(module: nn.Module, num_rows: int) -> Iterator[Tensor]:
    """Yield the rows of ``weight_of``, ``num_rows`` at a time: only these of a packed weight are unpacked.

    ``num_rows``: a multiple of ``kernels.PANEL``.
    """
    packed = getattr(module, "packed", None)
    if packed is None:
        yield from weight_of(module).detach().split(num_rows)
        return
    for index, part in enumerate(packed.split(num_rows // kernels.PANEL)):
        yield _unpacked(module, part, _num_outputs(module) - index * num_rows)


def _num_outputs(module: Any) -> int:
    return int(module.num_embeddings if isinstance(module, PackedEmbedding) else module.out_features)


def _unpacked(module: Any, packed: Tensor, outputs: int) -> Tensor:
    """Return the values [outputs, inputs] of panels of a module's packed weight.

    ``outputs``: the number of outputs without padding; may exceed those of the panels.
    """
    inputs = module.embedding_dim if isinstance(module, PackedEmbedding) else module.in_features
    values = blocks.unpack(packed, outputs, inputs) if blocks.is_blocks(packed) else kernels.unpack_weight(packed, outputs)
    order: Any = getattr(module, "order", None)
    return values if order is None else torch.empty_like(values).index_copy_(1, order, values)


class Fused(nn.Module):
    """Layers with the same input as one layer: one stream of weights instead of several short ones.

    A ``FusedSlice`` replaces each layer. The first one called computes all; a slice called with another tensor than its
    siblings computes again, so fusion can cost time but never gives a wrong result.
    """

    in_features: int
    weight: Tensor
    sizes: list[int]  # outputs of each layer
    _input: Tensor | None = None
    _parts: list[Tensor | None]

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output of layer ``index`` for x [..., inputs]."""
        if self._input is not x or self._parts[index] is None:
            self._input, self._parts = x, list(self(x).split(self.sizes, -1))
        part, self._parts[index] = self._parts[index], None
        if not any(kept is not None for kept in self._parts):
            self._input = None
        assert part is not None
        return part


class FusedLinears(Fused, PackedLinear):
    """Packed layers as one."""

    def __init__(self, layers: list[PackedLinear]) -> None:
        """``layers``: with columns in the same order."""
        biases = [layer.bias for layer in layers]
        bias = None
        if any(b is not None for b in biases):
            zeros = [torch.zeros(layer.out_features, device=layer.packed.device) for layer in layers]
            bias = torch.cat([z if b is None else b for b, z in zip(biases, zeros, strict=True)])
        parts = [layer.packed for layer in layers]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        packed = None if parts[0].is_meta else huge_pages.empty(shape, parts[0].dtype)
        packed = torch.cat(parts, out=packed)
        del parts
        sizes = [layer.out_features for layer in layers]
        super().__init__(packed, (sum(sizes), layers[0].in_features), bias, layers[0].order)
        self.sizes = sizes


class FusedPlain(Fused, nn.Linear):
    """torch's layers as one."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        """``layers``: all with a bias or all without."""
        sizes = [layer.out_features for layer in layers]
        super().__init__(layers[0].in_features, sum(sizes), device="meta")
        self.sizes = sizes
        self.weight, self.bias = (
            None if parts[0] is None else nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
            for parts in ([layer.weight for layer in layers], [layer.bias for layer in layers])
        )


class FusedSlice(nn.Module):
    """One layer of a ``Fused``, replacing the original."""

    def __init__(self, group: Fused, index: int) -> None:
        super().__init__()
        self._group = [group]  # in a list: the group is registered with the parent, once
        self.index, self.in_features, self.out_features = index, group.in_features, group.sizes[index]

    @property
    def weight(self) -> Tensor:
        """Empty tensor with dtype and device, which some models read from their layers."""
        return self._group[0].weight.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return self._group[0].part(self.index, x)


class Activation(nn.Module):
    """SiLU or GELU of a model as ``outrider::activate``, whose results do not depend on the other rows of a pass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.outrider.activate(x, self.name)


ACTIVATIONS = {  # of ``Activation``
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
    ReLUSquaredActivation: "relu_squared",
}


def activation_of(module: object) -> str | None:
    """Return the name by which ``outrider::activate`` knows an activation; None for other modules and functions."""
    if module is nn.functional.silu:  # LFM2's experts hold the function
        return "silu"
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return ACTIVATIONS.get(type(module))


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))  # transformers' names


def fuse_siblings(model: nn.Module) -> None:
    """Fuse layers, packed or torch's, that transformers' models apply to one input, in place."""
    # Keeping references to the layers would keep their memory.
    for parent in [module for module in model.modules() if not isinstance(module, PackedLinear)]:
        for names in SIBLINGS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if not _can_fuse(layers):
                continue
            group = FusedLinears(layers) if isinstance(layers[0], PackedLinear) else FusedPlain(layers)
            parent.add_module("fused_" + "_".join(names), group)
            for index, name in enumerate(names):
                setattr(parent, name, FusedSlice(group, index))
            del layers
            return_freed_memory()


def _can_fuse(layers: list[Any]) -> bool:
    """Return whether layers, None for missing ones, can be one: all packed or all torch's, with weights of one kind."""
    if all(type(layer) is nn.Linear for layer in layers):
        return len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}) == 1
    if not all(isinstance(layer, PackedLinear) and layer.out_features % kernels.PANEL == 0 for layer in layers):
        return False
    # small siblings keep more bits, and blocks of a checkpoint may differ in form
    is_one_kind = len({_kind(layer.packed) for layer in layers}) == 1
    return is_one_kind and all(_is_same(layer.order, layers[0].order) for layer in layers)


def fuse_on_gpu(model: PreTrainedModel) -> None:
    """Fuse torch's layers of a model on a GPU, in place. If the user keeps the model, its weights are in memory twice."""
    if model.device.type == "cuda" and is_plain(model):
        fuse_siblings(model)


def _is_same(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))


def _kind(packed: Tensor) -> tuple[Any, ...]:
    """Return what layers must have in common to be fused."""
    has_form = blocks.is_blocks(packed) and not packed.is_meta  # forms of rounded weights differ in size as well
    return packed.dtype, packed.shape[1:], blocks.form_of(packed) if has_form else None


def packed_layers(model: nn.Module) -> list[PackedLinear]:
    """Return the model's layers that run on the CPU kernels."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def is_packed(model: nn.Module) -> bool:
    """Return whether the model's layers run on the CPU kernels."""
    return bool(packed_layers(model))


def has_row_invariant_layers(model: nn.Module) -> bool:
    """Return whether a row of every layer has the same bits whatever the other rows are: all layers run on the CPU kernels.

    torch's kernels, on other devices, for experts that are not packed and for weights that a model's own code multiplies, add
    in an order that depends on the number of rows. See ``ModelRunner.is_row_invariant`` for recurrent layers and a model's own
    attention.
    """
    if not is_packed(model) or any(type(module) in (nn.Linear, Conv1D) for module in model.modules()):
        return False
    return not any("experts" in name for name, _ in model.named_parameters())


def is_in_blocks(model: nn.Module) -> bool:
    """Return whether the model's layers have weights in 8 or 4 bits, in blocks."""
    return any(blocks.is_blocks(layer.packed) for layer in packed_layers(model))


def arithmetic(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's products, or, for weights in blocks, of its attention."""
    layers = packed_layers(model)
    if layers:
        if is_in_blocks(model):
            return torch.bfloat16 if kernels.has_fast_bfloat16() else torch.float32
        return torch.bfloat16 if any(kernels.is_interleaved(layer.packed) for layer in layers) else torch.float32
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def is_plain(model: nn.Module) -> bool:
    """Return whether the weights are unquantised and on one device."""
    if getattr(model, "is_quantized", False) or getattr(model, "hf_device_map", None) is not None:
        return False
    return all(type(parameter.data) is Tensor for parameter in model.parameters())


def is_plain_embedding(module: nn.Module) -> bool:
    """Return whether ``PackedEmbedding`` is equivalent to the module."""
    return type(module) is nn.Embedding or (
        isinstance(module, nn.Embedding) and type(module).__name__.endswith("ScaledWordEmbedding")
    )


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules that shares all memory, so that the runner does not change the user's model."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:  # a new object, because requires_grad belongs to the object
            shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copy.deepcopy(model, shared)
