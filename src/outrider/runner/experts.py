"""Mixture-of-experts layers on the CPU kernels: packed experts, and routers whose choice depends on a token alone.

transformers keeps the experts of a layer in two tensors, and computes them and their routers with torch's kernels, whose last
bits depend on the number of rows. Here a token's bits, and so the experts chosen for it, are the same in every pass.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

from outrider.runner import blocks, kernels
from outrider.runner.checkpoints.float4 import StoredExperts
from outrider.runner.linear import PackedLinear, activation_of

CLAMPED = {"alpha": 1.702, "limit": 7.0}  # attributes of gpt-oss's experts, which "swish_clamped" computes
# In the source of ``forward``: the weight as it is, or converted.
OWN_PRODUCT = re.compile(r"\blinear\(.*, self\.weight(\.(float\(\)|(to|type)\([\w.]+\)))?[,)]")


class ExpertLinears(PackedLinear):
    """The same linear layer of all experts: a packed weight [experts * outputs, inputs]; ``PackedExperts`` computes it."""


class PackedExperts(nn.Module):
    """The experts of one layer, for ``outrider::experts``."""

    def __init__(
        self, up: ExpertLinears, down: ExpertLinears, num_experts: int, activation: str, has_gate: bool = True
    ) -> None:
        """``up``: [experts * 2 N, H], each expert's gate before its up projection; without gates [experts * N, H].
        ``down``: [experts * H, N].
        """
        super().__init__()
        self.up, self.down, self.num_experts, self.activation, self.has_gate = up, down, num_experts, activation, has_gate

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Map x [..., H] to [..., H]; ``chosen`` int64 and ``shares``, [T, k] each, are the router's experts and weights."""
        up, down, k = self.up, self.down, chosen.shape[-1]
        out: Tensor = torch.ops.outrider.experts(
            x.reshape(-1, x.shape[-1]),
            *(up.packed, down.packed, up.bias, down.bias),
            *(chosen.reshape(-1, k), shares.reshape(-1, k)),
            *(self.num_experts, self.activation, self.has_gate, blocks.activation_bits()),
        )
        return out.reshape(x.shape)


def weight_names(module: nn.Module) -> tuple[str, str]:
    """Return the names of the weights of a layer's experts; the first has the gate's rows, too, if there is one."""
    return ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"), "down_proj"


def sizes_of(module: nn.Module) -> tuple[int, int, int] | None:
    """Return experts, inputs and N of a module that ``PackedExperts`` can replace; None for other modules."""
    if isinstance(module, StoredExperts):
        return module.sizes
    up, down = (getattr(module, name, None) for name in weight_names(module))
    if not (isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.dim() == 3 and _activation(module)):
        return None
    is_turned: Any = module.is_transposed
    inputs, inner = (down.shape[2], down.shape[1]) if is_turned else (down.shape[1], down.shape[2])
    is_aligned = inputs % kernels.PANEL == 0 and inner % kernels.PANEL == 0  # experts begin with a panel
    return (len(up), inputs, inner) if is_aligned else None


def _activation(module: Any) -> str | None:
    """Return the C++ name of the activation of experts that transformers' integration of experts computes."""
    if isinstance(module, StoredExperts):
        return "swish_clamped"
    is_common = hasattr(module, "has_gate") and hasattr(type(module).forward, "__wrapped__")  # by the interface
    if not is_common or module.has_post_expert_norm or module._is_expert_parallel:
        return None
    if not module.has_gate or type(module)._apply_gate is moe._default_apply_gate:
        return activation_of(module.act_fn)
    is_clamped = type(module).__name__ == "GptOssExperts" and all(getattr(module, key) == CLAMPED[key] for key in CLAMPED)
    return "swish_clamped" if is_clamped else None


def pack_experts(module: Any, bits: int | None, given: Mapping[str, Tensor] | None = None) -> PackedExperts:
    """Pack experts for which ``sizes_of`` returns sizes, and free the originals.

    ``given``: weights that are packed already, by the names of the originals.
    """
    activation, sizes = _activation(module), sizes_of(module)
    assert activation is not None and sizes is not None
    num_experts, inputs, inner = sizes
    given = module.pack() if isinstance(module, StoredExperts) else given or {}

    def gates_first(tensor: Tensor, name: str) -> Tensor:
        is_mixed = not module.is_concatenated and name == "gate_up_proj"  # rows of gate and up projection alternate
        return (torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1) if is_mixed else tensor).flatten(0, 1)

    def packed(name: str, shape: tuple[int, int]) -> ExpertLinears:
        bias = getattr(module, f"{name}_bias", None)
        bias = None if bias is None else gates_first(bias, name)
        if name in given:
            return ExpertLinears(given[name], (num_experts * shape[0], shape[1]), bias)
        weight = getattr(module, name).detach()
        layer = ExpertLinears.of(gates_first(weight.transpose(1, 2) if module.is_transposed else weight, name), bias, bits)
        setattr(module, name, None)
        return layer

    wide, narrow = weight_names(module)
    up, down = packed(wide, ((1 + module.has_gate) * inner, inputs)), packed(narrow, (inputs, inner))
    return PackedExperts(up, down, num_experts, activation, module.has_gate)


class _OwnProduct(TorchFunctionMode):
    """Computes ``functional.linear`` with a module's own weight by ``outrider::linear``."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._packed, self._shape = module.packed_weight, module.weight.shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.linear or len(args) < 2 or args[1].shape != self._shape:
            return func(*args, **kwargs)
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return torch.ops.outrider.linear(args[0].float(), self._packed, bias, self._shape[0], 32)


def make_invariant(module: nn.Module) -> None:
    """Make a module whose own code multiplies its weight, such as a router, compute each row alike in every pass, in place.

    Its class becomes a subclass: models read other attributes of their routers.
    """
    own: Any = type(module)
    weight = module.weight
    assert isinstance(weight, Tensor)
    module.register_buffer("packed_weight", kernels.pack_weight(weight.detach().float(), in_pairs=False), persistent=False)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _OwnProduct(self):
            return own.forward(self, *args, **kwargs)

    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})


def multiplies_own_weight(module: nn.Module) -> bool:
    """Return whether the module, not a linear layer, multiplies a weight [outputs, inputs] with ``functional.linear``."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear) or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return False
    is_unique = [each.shape for each in module.parameters()].count(weight.shape) == 1  # ``_OwnProduct`` recognises shapes
    return is_unique and OWN_PRODUCT.search(source_of(type(module).forward) or "") is not None


def has_sigmoids(model: nn.Module) -> bool:
    """Return whether routers or shared experts of a model with packed experts may call torch's sigmoid.

    In eager passes, its last bit depends on the number of rows.
    """
    modules = list(model.modules())
    if not any(isinstance(module, PackedExperts) for module in modules):
        return False
    names = {type(module).__module__ for module in modules}
    in_use = tuple({type(module) for module in modules})
    return any(_calls_sigmoid(sys.modules[name], in_use) for name in names if not name.startswith(("torch.", "outrider.")))


def _calls_sigmoid(code: ModuleType, in_use: tuple[type, ...]) -> bool:
    """Return whether a Python module may call a sigmoid, outside of classes of layers that the model does not use."""
    source = source_of(code)
    if source is None:
        return True
    for kind in vars(code).values():
        is_own = isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == code.__name__
        if is_own and not any(issubclass(each, kind) for each in in_use):  # such as experts that were packed
            source = source.replace(source_of(kind) or "", "")
    return "sigmoid(" in source


@cache
def source_of(code: Any) -> str | None:
    """Return the source text of a function or a Python module; None if there is none, as of code typed into a prompt."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return None


# x [T, H]: sum over j of shares [T, k] * down(inner(up(x))) of expert chosen [T, k], in x's dtype, where ``inner`` is the
# activation, or its product with the other half of the outputs if there is a gate. Inputs are rounded as by linear.
kernels.define(
    "experts(Tensor x, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor chosen, Tensor shares,"
    " int num_experts, str activation, bool has_gate, int activation_bits)",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
