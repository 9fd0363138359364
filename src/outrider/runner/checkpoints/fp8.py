"""FP8 checkpoints: weights float8 (E4M3), with a scale for the tensor, for each output, or for each block of 128 x 128.

As Qwen and DeepSeek publish them: ``weight_scale_inv`` [outputs / 128, inputs / 128], which despite its name is multiplied.
Values are kept in bfloat16 where every one of a layer is exact there, as with scales that are powers of two, else in float32,
where bfloat16 and float16 scales are exact and float32 scales round each value once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.runner.checkpoints.weight import FLOATS, Format, LayerTensors, exact_values
from outrider.types import OutriderError

BLOCK = (128, 128)  # outputs and inputs
SCALES = (*FLOATS, torch.float8_e8m0fnu)


class Fp8(Format):
    """Reads the layers of an FP8 checkpoint."""

    marks = ("weight_scale_inv", "weight_scale")
    has_codes = False
    keys = ("weight", "weight_scale_inv", "weight_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.block = block_of(config.get("weight_block_size"))
        self.growth = growth(config)

    def read(self, layer: LayerTensors) -> Tensor:
        key = next((mark for mark in self.marks if mark in layer.tensors), self.marks[0])
        return read(layer, key, None if self.block is None else "block", self.block or BLOCK)


def growth(config: Mapping[str, Any]) -> float:
    """Return the bytes in memory per byte: 4 for scales of 16 bits, 2 for those that the config says are powers of two."""
    return 2.0 if config.get("scale_fmt") == "ue8m0" else 4.0


def block_of(stated: Any) -> tuple[int, int] | None:
    """Return the outputs and inputs that share a scale; None if the config states none. Raises ``OutriderError``."""
    if stated is None:
        return None
    if not isinstance(stated, (list, tuple)) or len(stated) != 2 or not all(isinstance(n, int) and n > 0 for n in stated):
        raise OutriderError(f"FP8 in blocks of {stated}")
    return stated[0], stated[1]


def read(layer: LayerTensors, key: str, strategy: str | None, block: tuple[int, int] = BLOCK) -> Tensor:
    """Return the values [outputs, inputs] of a float8 weight with the scales ``key``.

    Raises ``OutriderError``, naming the tensor.

    ``strategy``: ``"tensor"``, ``"channel"`` or ``"block"``; None for any that the scales' shape fits.
    """
    weight = layer.get("weight", (torch.float8_e4m3fn,), [layer.outputs, layer.inputs])
    blocks = [-(-layer.outputs // block[0]), -(-layer.inputs // block[1])]
    shapes: dict[str | None, list[list[int]]] = {
        "tensor": [[1], [], [1, 1]],
        "channel": [[layer.outputs, 1], [layer.outputs]],
        "block": [blocks],
    }
    scales = layer.scales(key, SCALES, *shapes.get(strategy, [shape for each in shapes.values() for shape in each]))
    if list(scales.shape) == blocks:
        scales = scales.repeat_interleave(block[0], 0)[: layer.outputs].repeat_interleave(block[1], 1)[:, : layer.inputs]
    elif scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    values = weight.float() * scales
    if not values.is_meta and not torch.isfinite(values).all():
        raise OutriderError(f"{layer.name}.weight contains NaN or values beyond float32")
    return exact_values(values)
