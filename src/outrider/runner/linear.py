"""Packed weights for the CPU kernels: 16 bits as in the checkpoint, or 8 or 4 bits in blocks (see blocks.py).

Arithmetic is float32, except for bfloat16 weights on CPUs that multiply them faster (AMX, AVX-512 BF16): there inputs are
rounded to bfloat16, sums are float32, and a dozen rows cost as much as one. Inputs of weights in blocks are rounded to 8 bits
on CPUs with AVX-512 VNNI.
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
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.pytorch_utils import Conv1D

from outrider.runner import blocks, huge_pages, kernels
from outrider.runner.checkpoints.stored import StoredLinear
from outrider.runner.checkpoints.weight import QuantizedWeight
from outrider.types import OutriderError

SMALL = 64  # layers with fewer inputs or outputs, such as routers and gates, keep 8 bits where others have 4


class PackedLinear(nn.Module):
    """Linear layer with a weight packed for ``outrider::linear`` or ``linear_blocks``; sums and output are float32."""

    packed: Tensor
    scales: Tensor | None  # if the weight is quantised (see quantized.py)
    bias: Tensor | None
    order: Tensor | None

    def __init__(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, bits: int | None = None, packed: Tensor | None = None
    ) -> None:
        """``bits``: 8 or 4; None: the weight's own dtype. ``packed``: the packed weight; of ``weight`` only the shape is read.

        Integer codes go into blocks with exactly their values. ``order`` int64 [inputs] is the input of each column, None where
        they are in order.
        """
        super().__init__()
        order = None
        if isinstance(weight, QuantizedWeight):
            self.out_features, self.in_features = weight.codes.shape
            zeros = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros
            packed = blocks.pack_codes(weight.codes, weight.bits, weight.scales, group=weight.group, zeros=zeros)
            order = weight.order
        else:
            self.out_features, self.in_features = weight.shape
            if packed is None:
                weight = weight.detach()
                packed = blocks.pack(weight, bits) if bits else kernels.pack_weight(weight, kernels.suits_pairs(weight))
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", None, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Empty tensor with dtype and device, which some models read from their layers."""
        return torch.empty(0, dtype=torch.float32, device=self.packed.device)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        x = x if self.order is None else x.index_select(-1, self.order)
        out: Tensor
        if blocks.is_blocks(self.packed):
            out = torch.ops.outrider.linear_blocks(x, self.packed, self.bias, self.out_features, blocks.activation_bits())
        elif self.scales is None:
            out = torch.ops.outrider.linear(x, self.packed, self.bias, self.out_features)
        else:
            out = torch.ops.outrider.linear_scaled(x, self.packed, self.scales, self.bias, self.out_features)
        return out


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
        rows: Tensor  # from one operation: inductor would inline and repeat several per use
        if blocks.is_blocks(self.packed):
            rows = torch.ops.outrider.embed_blocks(token_ids, self.packed, self.embedding_dim)
        else:
            rows = torch.ops.outrider.embed(token_ids, self.packed)
        return rows if self.embed_scale is None else rows * self.embed_scale


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight [outputs, inputs] of a linear layer or an embedding, packed or not."""
    packed = getattr(module, "packed", None)
    if packed is None:
        weight: Any = module.weight
        return weight  # type: ignore[no-any-return]
    is_embedding = isinstance(module, PackedEmbedding)
    outputs: Any = module.num_embeddings if is_embedding else module.out_features
    inputs: Any = module.embedding_dim if is_embedding else module.in_features
    values = blocks.unpack(packed, outputs, inputs) if blocks.is_blocks(packed) else kernels.unpack_weight(packed, outputs)
    order: Any = getattr(module, "order", None)
    return values if order is None else torch.empty_like(values).index_copy_(1, order, values)


class FusedLinears(PackedLinear):
    """Layers with the same input as one layer: one stream of weights instead of several short ones.

    A ``FusedSlice`` replaces each layer. The first one called computes all; a slice called with another tensor than its
    siblings computes again, so fusion can cost time but never gives a wrong result.
    """

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
        super().__init__(torch.empty(sum(sizes), layers[0].in_features, device="meta"), bias, packed=packed)
        self.sizes, self.order = sizes, layers[0].order
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output of layer ``index`` for x [..., inputs]."""
        if self._input is not x or self._parts[index] is None:
            self._input, self._parts = x, list(self.forward(x).split(self.sizes, -1))
        part, self._parts[index] = self._parts[index], None
        if not any(kept is not None for kept in self._parts):
            self._input = None
        assert part is not None
        return part


class FusedSlice(nn.Module):
    """One layer of a ``FusedLinears``, replacing the original."""

    def __init__(self, group: FusedLinears, index: int) -> None:
        super().__init__()
        self._group = [group]  # in a list: the group is registered with the parent, once
        self.index, self.in_features, self.out_features = index, group.in_features, group.sizes[index]

    @property
    def weight(self) -> Tensor:
        """Empty tensor with dtype and device, which some models read from their layers."""
        return torch.empty(0, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self._group[0].part(self.index, x)


class Activation(nn.Module):
    """SiLU or GELU of a model as ``outrider::activate``, whose results do not depend on the other rows of a pass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.outrider.activate(x, self.name)
        return out


ACTIVATIONS = {nn.SiLU: "silu", SiLUActivation: "silu", GELUActivation: "gelu", GELUTanh: "gelu_tanh"}  # of ``Activation``


def _activation(module: nn.Module) -> str | None:
    """Return the name by which ``outrider::activate`` knows an activation; None for other modules."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return ACTIVATIONS.get(type(module))


PRODUCTS = re.compile(r"\blinear\(.*\bself\.(\w+)\.weight\b|\bself\.(\w+)\.weight @")  # in the source of ``forward``
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))  # transformers' names


def fuse_siblings(model: PreTrainedModel) -> None:
    """Fuse packed layers that transformers' models apply to one input, in place."""
    # Keeping references to the layers would keep their memory.
    for parent in [module for module in model.modules() if not isinstance(module, PackedLinear)]:
        for names in SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if not all(isinstance(layer, PackedLinear) and layer.out_features % kernels.PANEL == 0 for layer in layers):
                continue
            if len({_kind(layer.packed) for layer in layers}) > 1:  # type: ignore[union-attr]
                continue  # small siblings keep more bits, and blocks of a checkpoint may differ in form
            if not all(_is_same(layer.order, layers[0].order) for layer in layers):  # type: ignore[union-attr]
                continue
            group = FusedLinears(layers)  # type: ignore[arg-type]
            parent.add_module("fused_" + "_".join(names), group)
            for index, name in enumerate(names):
                setattr(parent, name, FusedSlice(group, index))
            del layers
            _return_freed_memory()


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

    torch's kernels, on other devices and for stacked experts and attention sinks, add in an order that depends on the number of
    rows. See ``ModelRunner.is_row_invariant`` for recurrent layers and a model's own attention.
    """
    return is_packed(model) and not any("experts" in name or "sinks" in name for name, _ in model.named_parameters())


def is_in_blocks(model: nn.Module) -> bool:
    """Return whether the model's layers have weights in 8 or 4 bits, in blocks."""
    return any(blocks.is_blocks(layer.packed) for layer in packed_layers(model))


def arithmetic(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's products, or, for weights in blocks, of its attention."""
    layers = packed_layers(model)
    if layers:
        if is_in_blocks(model):
            return torch.bfloat16 if kernels.prefers_pairs() else torch.float32
        return torch.bfloat16 if any(kernels.in_groups(layer.packed) for layer in layers) else torch.float32
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def is_plain(model: nn.Module) -> bool:
    """Return whether the weights are unquantised and on one device."""
    if getattr(model, "is_quantized", False) or getattr(model, "hf_device_map", None) is not None:
        return False
    return all(type(parameter.data) is Tensor for parameter in model.parameters())


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
    kept = _multiplied(model)
    head = model.get_output_embeddings() if bits else None
    embeddings = {id(module.weight): (name, module) for name, module in model.named_modules() if is_plain_embedding(module)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, StoredLinear):
            model.set_submodule(name, _stored(module, bits, module is head))
            del module
            _return_freed_memory()
            continue
        if activation := _activation(module):
            model.set_submodule(name, Activation(activation))
            continue
        if type(module) not in (nn.Linear, Conv1D) or id(module) in kept:
            continue
        if id(module) not in packed:
            weight = module.weight if type(module) is nn.Linear else module.weight.T
            layer = packed[id(module)] = PackedLinear(weight, module.bias, bits and layer_bits(weight, bits, module is head))
            del weight
            tied = embeddings.pop(id(module.weight), None)
            if tied is not None:
                model.set_submodule(tied[0], PackedEmbedding(layer.packed, tied[1]))
            module.weight = None  # free the original before packing the next
            _return_freed_memory()
        model.set_submodule(name, packed[id(module)])
    if bits:
        _pack_input_embedding(model, embeddings)
    packed.clear()  # fusing frees memory incrementally
    embeddings.clear()
    fuse_siblings(model)
    _make_the_rest_float32(model)


def _stored(module: StoredLinear, bits: int | None, is_head: bool) -> PackedLinear:
    """Pack a layer of a quantised checkpoint, see ``pack_model``."""
    weight = module.read()
    if bits is None or isinstance(weight, QuantizedWeight):
        try:
            return PackedLinear(weight, module.bias)
        except OutriderError as error:  # values that blocks cannot hold
            raise OutriderError(f"{module.name}: {error}") from error
    return PackedLinear(weight, module.bias, layer_bits(weight, bits, is_head))


def layer_bits(weight: Tensor, bits: int, is_head: bool) -> int:
    """Return the bits of one layer in a model of 8 or 4: heads distinguish similar tokens, and small layers are sensitive."""
    return 8 if is_head or min(weight.shape) < SMALL else bits


def share_of_linear(model: PreTrainedModel) -> float:
    """Return the share of the language model's weights that ``pack_model`` rounds to 8 or 4 bits; works on the meta device."""
    parts = [part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None]
    every = {id(parameter): parameter.numel() for part in parts for parameter in part.parameters()}
    kept, table = _multiplied(model), model.get_input_embeddings()
    rounded = {
        id(module.weight)
        for part in parts
        for module in part.modules()
        if (type(module) in (nn.Linear, Conv1D) and id(module) not in kept) or (module is table and is_plain_embedding(module))
    }
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
    try:
        code = inspect.getsource(forward)
    except (OSError, TypeError):  # no source file; the self-check of the loaded model finds errors
        return ()
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


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps the holes left by packing, more than half the model's size."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


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
