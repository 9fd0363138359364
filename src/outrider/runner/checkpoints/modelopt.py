"""Checkpoints of NVIDIA's ModelOpt: NVFP4 and FP8, which a layer's dtype tells apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.files import read_object
from outrider.runner.checkpoints import float4, fp8
from outrider.runner.checkpoints.weight import Format, LayerTensors, QuantizedWeight
from outrider.types import OutriderError

IN_4_BITS = ("NVFP4", "W4A16_NVFP4")
IN_8_BITS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
FILE = "hf_quant_config.json"  # states the quantisation of checkpoints that were written before config.json did
SEVERAL = "MIXED_PRECISION"  # each layer states its own


class ModelOpt(Format):
    """Reads the layers of a checkpoint of ModelOpt. Activations are not quantised, even if the checkpoint asks for it."""

    marks = ("weight_scale",)
    keys = ("weight", "weight_scale", float4.NV_FACTOR, "pre_quant_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        stated = {config.get("quant_algo")}
        if SEVERAL in stated:
            stated = {layer.get("quant_algo") for layer in config["quantized_layers"].values()}
        for algorithm in stated.difference(IN_4_BITS, IN_8_BITS):
            raise OutriderError(f"ModelOpt with the algorithm {algorithm}")
        self.has_codes = not stated.isdisjoint(IN_4_BITS)
        self.growth = float4.NV_GROWTH if stated.isdisjoint(IN_8_BITS) else fp8.growth(config)

    def read(self, layer: LayerTensors) -> QuantizedWeight | Tensor:
        if "pre_quant_scale" in layer.tensors:
            raise OutriderError(f"{layer.name}.pre_quant_scale changes the layer's inputs, which is not supported")
        if "weight" in layer.tensors and layer.tensors["weight"].dtype == torch.uint8:
            return float4.read_nvfp4(layer, "weight", float4.NV_FACTOR)
        return fp8.read(layer, "weight_scale", None)


def quantization_file_of(folder: Path) -> dict[str, Any] | None:
    """Return the quantisation that ``FILE`` states for a folder's weights; None without one.

    Raises ``OutriderError`` if the file is broken.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    what = f"cannot read the quantisation that {file} states"
    stated = read_object(file, what).get("quantization")
    if not isinstance(stated, dict):
        raise OutriderError(f"{what}: expected an object under quantization, got a {type(stated).__name__}")
    return {"quant_method": "modelopt", **stated} if stated.get("quant_algo") else None
