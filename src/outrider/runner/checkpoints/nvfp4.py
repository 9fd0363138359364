"""NVFP4: 4-bit floats (E2M1), 16 inputs share a scale in 8 bits (E4M3), and the whole weight a float32 number.

Two layouts are read. In both, the first of two inputs is in the low bits of a byte, and ``weight_scale`` is float8 [outputs,
inputs / 16]. compressed-tensors: ``weight_packed``; scales are divided by ``weight_global_scale`` [1]. ModelOpt: ``weight``;
scales are multiplied by ``weight_scale_2``. A value is the code's number times that quotient or product in float32, as in both
libraries.
"""

from __future__ import annotations

import torch

from outrider.runner.checkpoints.weight import LayerTensors, QuantizedWeight, unpack_pairs
from outrider.types import OutriderError

GROUP = 16
DIVISOR, FACTOR = "weight_global_scale", "weight_scale_2"
GROWTH = 6 / 4.5  # scales are float32 in memory


def read(layer: LayerTensors, codes: str, whole: str) -> QuantizedWeight:
    """Return the weight of a linear layer. Raises ``OutriderError``, naming the tensor.

    ``codes``: the last part of the name of the tensor with the codes; ``whole``: that of the whole weight's number.
    """
    raw = layer.get(codes, (torch.uint8,), [layer.outputs, layer.inputs // 2])
    scales = layer.scales("weight_scale", (torch.float8_e4m3fn,), [layer.outputs, layer.inputs // GROUP])
    number = layer.scales(whole, (torch.float32,), [1], [])
    scales = scales / number if whole == DIVISOR else scales * number
    halves = scales / 2  # "float4" has twice the numbers of E2M1
    if not scales.is_meta and not (torch.isfinite(scales).all() and torch.equal(halves * 2, scales)):
        raise OutriderError(f"{layer.name}.weight_scale and {whole} give scales that float32 cannot hold")
    return QuantizedWeight(unpack_pairs(raw), 4, halves, None, GROUP, kind="float4")
