"""4-bit floats (E2M1): MXFP4 and NVFP4.

MXFP4 (OCP Microscaling, version 1.0): 32 inputs share a scale that is a power of two. compressed-tensors' linear layers:
``weight_packed`` uint8 [outputs, inputs / 2], the first of two inputs in the low bits; ``weight_scale`` uint8 [outputs, inputs
/ 32], exponents + 127. gpt-oss's experts: ``gate_up_proj_blocks`` uint8 [experts, outputs, inputs / 32, 16],
``gate_up_proj_scales`` [experts, outputs, inputs / 32], and the same for ``down_proj``.

NVFP4: 16 inputs share a scale in 8 bits (E4M3), and the whole weight a float32 number. The first of two inputs is in the low
bits of a byte, and ``weight_scale`` is float8 [outputs, inputs / 16]. compressed-tensors: ``weight_packed``; scales are divided
by ``weight_global_scale`` [1]. ModelOpt: ``weight``; scales are multiplied by ``weight_scale_2``. A value is the code's number
times that quotient or product in float32, as in both libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.runner import blocks
from outrider.runner.checkpoints.weight import Format, LayerTensors, QuantizedWeight, unpack_pairs
from outrider.types import OutriderError

WEIGHTS = ("gate_up_proj", "down_proj")
GROUP, NV_GROUP = 32, 16  # inputs that share a scale
NV_DIVISOR, NV_FACTOR = "weight_global_scale", "weight_scale_2"
NV_GROWTH = 6 / 4.5  # scales are float32 in memory


def read_mxfp4(layer: LayerTensors) -> QuantizedWeight:
    """Return the weight of a linear layer. Raises ``OutriderError``, naming the tensor."""
    packed = layer.get("weight_packed", (torch.uint8,), [layer.outputs, layer.inputs // 2])
    exponents = layer.get("weight_scale", (torch.uint8,), [layer.outputs, layer.inputs // GROUP])
    scales = blocks.float4_scales(exponents, f"{layer.name}.weight_scale")
    return QuantizedWeight(unpack_pairs(packed), 4, scales, None, GROUP, kind="float4")


def read_nvfp4(layer: LayerTensors, codes: str, whole: str) -> QuantizedWeight:
    """Return the weight of a linear layer. Raises ``OutriderError``, naming the tensor.

    ``codes``: the last part of the name of the tensor with the codes; ``whole``: that of the whole weight's number.
    """
    raw = layer.get(codes, (torch.uint8,), [layer.outputs, layer.inputs // 2])
    scales = layer.scales("weight_scale", (torch.float8_e4m3fn,), [layer.outputs, layer.inputs // NV_GROUP])
    number = layer.scales(whole, (torch.float32,), [1], [])
    scales = scales / number if whole == NV_DIVISOR else scales * number
    halves = scales / 2  # "float4" has twice the numbers of E2M1
    if not scales.is_meta and not (torch.isfinite(scales).all() and torch.equal(halves * 2, scales)):
        raise OutriderError(f"{layer.name}.weight_scale and {whole} give scales that float32 cannot hold")
    return QuantizedWeight(unpack_pairs(raw), 4, halves, None, NV_GROUP, kind="float4")


class Mxfp4(Format):
    """Format of gpt-oss: experts in MXFP4, everything else in bfloat16."""

    marks = ("weight_scale",)
    keys = ()

    def read(self, layer: LayerTensors) -> QuantizedWeight | Tensor:
        raise OutriderError(f"{layer.name} is quantised, where this format has only experts quantised")


class StoredExperts(nn.Module):
    """gpt-oss's experts with the tensors that the files store, until they are packed. Buffers and biases have their names."""

    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter
    has_gate, is_transposed, is_concatenated = True, False, False  # as transformers describes experts

    def __init__(self, name: str, module: Any, found: Mapping[str, Tensor]) -> None:
        """``module``: transformers', on the meta device, called ``name``; ``found``: the files' tensors, by name.

        Raises ``OutriderError``, naming the tensor, for one that is missing or of another dtype or shape.
        """
        super().__init__()
        self.name = name
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in found.items() if key.startswith(f"{name}.")}
        stored = LayerTensors(name, 0, 0, own)
        for key in WEIGHTS:
            experts, inputs, outputs = getattr(module, key).shape
            for part, shape in ((f"{key}_blocks", [inputs // GROUP, GROUP // 2]), (f"{key}_scales", [inputs // GROUP])):
                self.register_buffer(part, stored.get(part, (torch.uint8,), [experts, outputs, *shape]))
            setattr(self, f"{key}_bias", getattr(module, f"{key}_bias"))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the number of experts, their inputs and the outputs of their gates."""
        experts, outputs, groups, _ = self.get_buffer("gate_up_proj_blocks").shape
        return experts, groups * GROUP, outputs // 2

    def pack(self) -> dict[str, Tensor]:
        """Return the packed weights [experts * outputs, inputs], each expert's gate before its up projection.

        Frees the stored tensors. Raises ``OutriderError``, naming the tensor, for scales that are NaN or too large.
        """
        packed = {}
        for key in WEIGHTS:
            stored = [self.get_buffer(f"{key}_{part}") for part in ("blocks", "scales")]
            for part in ("blocks", "scales"):
                setattr(self, f"{key}_{part}", None)
            if key == "gate_up_proj":  # rows of gate and up projection alternate in the files
                stored = [torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1) for tensor in stored]
            raw, exponents = (tensor.flatten(0, 1) for tensor in stored)
            codes = unpack_pairs(raw)
            del stored, raw
            scales = blocks.float4_scales(exponents, f"{self.name}.{key}_scales")
            packed[key] = blocks.pack_codes(codes.flatten(1), 4, scales, group=GROUP, kind="float4")
        return packed


def stored_experts(name: str, module: nn.Module, found: Mapping[str, Tensor]) -> StoredExperts | None:
    """Return the replacement for a module whose experts the files store in MXFP4; None for others. See ``StoredExperts``."""
    is_stored = any(f"{name}.{key}_{part}" in found for key in WEIGHTS for part in ("blocks", "scales"))
    return StoredExperts(name, module, found) if is_stored and type(module).__name__ == "GptOssExperts" else None
