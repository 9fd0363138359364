"""Weights in the form that the CPU kernels read: 16 bit as in the checkpoint, packed once, float32 arithmetic."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.runner import kernels


class PackedLinear(nn.Module):
    """A linear layer whose weight stands packed for ``outrider::linear``; the arithmetic and the output are float32."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", kernels.pack_weight(weight.detach()), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Nothing but a dtype and a device, which some models ask of their layers."""
        return torch.empty(0, dtype=torch.float32, device=self.packed.device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.outrider.linear(x, self.packed, self.bias, self.out_features)
        return out


def pack_model(model: PreTrainedModel) -> None:
    """Replaces every plain linear layer by a packed one and makes all other arithmetic float32, in place.

    Embeddings keep their 16-bit table. Quantised or otherwise special linear layers are left as they are.
    """
    packed: dict[int, PackedLinear] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            weight = module.weight
        elif type(module) is Conv1D:
            weight = module.weight.T
        else:
            continue
        if id(module) not in packed:
            packed[id(module)] = PackedLinear(weight, module.bias)
            if id(module.weight) not in embeddings:
                module.weight = None  # frees the original before the next is packed
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, packed[id(module)])
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
            module.register_forward_hook(_to_float32)
        elif not isinstance(module, PackedLinear):
            for key, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, key, nn.Parameter(parameter.detach().float(), requires_grad=False))
            for key, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, key, buffer.float())


def _to_float32(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float()


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules that shares every tensor: the runner may change its layers, the user's model stays as it is."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)
