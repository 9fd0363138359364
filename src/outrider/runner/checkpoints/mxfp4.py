"""MXFP4 (OCP Microscaling, version 1.0): 4-bit floats (E2M1), 32 inputs share a scale that is a power of two.

Every value is exact in bfloat16. gpt-oss stores experts so; transformers converts those to bfloat16 when it loads them. Linear
layers are read here, as compressed-tensors stores them: ``weight_packed`` uint8 [outputs, inputs / 2], the first of two inputs
in the low bits; ``weight_scale`` uint8 [outputs, inputs / 32], exponents + 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.runner.checkpoints.weight import LayerTensors, exact_values
from outrider.types import OutriderError

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with a minus sign
GROUP = 32


def read(layer: LayerTensors) -> Tensor:
    """Return the values [outputs, inputs] bfloat16. Raises ``OutriderError``, naming the tensor."""
    packed = layer.get("weight_packed", (torch.uint8,), [layer.outputs, layer.inputs // 2])
    exponents = layer.get("weight_scale", (torch.uint8,), [layer.outputs, layer.inputs // GROUP])
    if packed.is_meta:
        return packed.new_empty(layer.outputs, layer.inputs, dtype=torch.bfloat16)
    numbers = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    values = numbers[torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()]
    values = values * exponents.view(torch.float8_e8m0fnu).float().repeat_interleave(GROUP, 1)  # 2^(exponent - 127)
    if not torch.isfinite(values).all():
        raise OutriderError(f"{layer.name}.weight_scale contains NaN or exponents beyond float32")
    return exact_values(values)
