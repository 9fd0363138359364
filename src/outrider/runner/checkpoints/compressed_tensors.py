"""Checkpoints of the compressed-tensors library (llm-compressor, vLLM): integers, FP8, MXFP4 and NVFP4.

The format of a layer is recognised by its tensors. ``pack-quantized``: ``weight_packed`` int32 [outputs, inputs * bits / 32]
holds integers + 2^(bits - 1), consecutive inputs in a word; ``weight_zero_point`` int32 [outputs * bits / 32, groups] likewise,
but consecutive outputs; ``weight_g_idx`` [inputs] names the group of each input where that is not in order.
``int-quantized``: ``weight`` int8 [outputs, inputs]. ``float-quantized``: ``weight`` float8. ``mxfp4-pack-quantized`` and
``nvfp4-pack-quantized``: ``weight_packed`` uint8. Activations are not quantised, even if the checkpoint asks for it; weights
keep the file's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.runner.checkpoints import float4, fp8
from outrider.runner.checkpoints.weight import FLOATS, Format, LayerTensors, QuantizedWeight, unpack_words
from outrider.types import OutriderError

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "dense",
    "mixed-precision",
)
BITS = (4, 8)


class CompressedTensors(Format):
    """Reads the layers of a checkpoint of compressed-tensors."""

    marks = ("weight_packed", "weight_scale")
    keys = ("weight", "weight_packed", "weight_scale", float4.NV_DIVISOR, "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        schemes = [scheme for scheme in (config.get("config_groups") or {}).values() if isinstance(scheme, dict)]
        for form in [config.get("format"), *(scheme.get("format") for scheme in schemes)]:
            if form is not None and form not in FORMATS:
                raise OutriderError(f"compressed-tensors in the format {form}")
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise OutriderError("compressed-tensors with sparse weights")
        if (config.get("transform_config") or {}).get("config_groups"):
            raise OutriderError("compressed-tensors with transforms of activations")
        weights = [scheme.get("weights") or {} for scheme in schemes]
        for bits in {each.get("num_bits") for each in weights} - {None, *BITS}:
            raise OutriderError(f"compressed-tensors with {bits} bits")
        self.group_sizes = {size for each in weights if isinstance(size := each.get("group_size"), int)}
        floats = [each.get("num_bits") for each in weights if each.get("type", "int") != "int"]
        self.has_codes = 4 in floats or len(floats) < len(weights)
        is_widened = not weights or any(bits != 4 for bits in floats)
        self.growth = fp8.growth(config) if is_widened else float4.NV_GROWTH if floats else 1.0
        strategies = {each.get("strategy") for each in weights}
        self.strategy = strategies.pop() if len(strategies) == 1 else None  # else seen from the scales' shapes
        self.block = next(filter(None, (fp8.block_of(each.get("block_structure")) for each in weights)), fp8.BLOCK)

    def read(self, layer: LayerTensors) -> QuantizedWeight | Tensor:
        if "weight_packed" in layer.tensors:
            return self._floats(layer) if layer.tensors["weight_packed"].dtype == torch.uint8 else self._packed(layer)
        if "weight" in layer.tensors and layer.tensors["weight"].dtype == torch.int8:
            return self._integers(layer)
        return fp8.read(layer, "weight_scale", self.strategy, self.block)

    def _floats(self, layer: LayerTensors) -> QuantizedWeight:
        if "weight_zero_point" in layer.tensors:
            raise OutriderError(f"{layer.name}.weight_zero_point: zeros of 4-bit floats are not supported")
        scales = layer.tensors.get("weight_scale")
        is_mxfp4 = scales is not None and scales.dtype == torch.uint8
        return float4.read_mxfp4(layer) if is_mxfp4 else float4.read_nvfp4(layer, "weight_packed", float4.NV_DIVISOR)

    def _packed(self, layer: LayerTensors) -> QuantizedWeight:
        bits = next((bits for bits in BITS if layer.columns("weight_packed") == -(-layer.inputs * bits // 32)), None)
        if bits is None:
            width = layer.columns("weight_packed")
            raise OutriderError(
                f"{layer.name}.weight_packed has {width} words for {layer.inputs} inputs, expected codes of 4 or 8 bits"
            )
        words = layer.get("weight_packed", (torch.int32,), [layer.outputs, -(-layer.inputs * bits // 32)])
        if "weight_shape" in layer.tensors:
            shape = layer.get("weight_shape", (torch.int32, torch.int64), [2])
            if not shape.is_meta and shape.tolist() != [layer.outputs, layer.inputs]:
                raise OutriderError(
                    f"{layer.name}.weight_shape says {shape.tolist()}, expected {[layer.outputs, layer.inputs]}"
                )
        scales, group = self._scales(layer)
        order = layer.grouped("weight_g_idx", group)
        codes = unpack_words(words, bits)[:, : layer.inputs]
        zeros = self._zeros(layer, bits, scales.shape[1])
        return QuantizedWeight(codes if order is None else codes[:, order], bits, scales, zeros, group, order)

    def _integers(self, layer: LayerTensors) -> QuantizedWeight:
        codes = layer.get("weight", (torch.int8,), [layer.outputs, layer.inputs])
        scales, group = self._scales(layer)
        return QuantizedWeight(codes.view(torch.uint8) ^ 128, 8, scales, self._zeros(layer, 8, scales.shape[1]), group)

    def _scales(self, layer: LayerTensors) -> tuple[Tensor, int]:
        """Return scales float32 [outputs, groups] and the inputs of a group."""
        groups = layer.columns("weight_scale") or 1
        stated = next((size for size in self.group_sizes if size and size > 0 and -(-layer.inputs // size) == groups), None)
        group = layer.group(groups, stated)
        scales = layer.scales("weight_scale", FLOATS, [layer.outputs, groups], [layer.outputs], [1], [])
        return scales.reshape(-1, groups).expand(layer.outputs, groups), group

    def _zeros(self, layer: LayerTensors, bits: int, groups: int) -> Tensor | None:
        """Return the codes of zero, int32 [outputs, groups]; None where all are the middle code."""
        stored = layer.tensors.get("weight_zero_point")
        if stored is None:
            return None
        if stored.dtype == torch.int32 and (bits < 8 or stored.shape[:1] != (layer.outputs,)):
            words = layer.get("weight_zero_point", (torch.int32,), [-(-layer.outputs * bits // 32), groups])
            return unpack_words(words.T, bits)[:, : layer.outputs].T.int()
        plain = layer.get(
            "weight_zero_point", (torch.int8, torch.int32, torch.int64), [layer.outputs, groups], [layer.outputs], [1], []
        )
        return plain.int().reshape(-1, groups if plain.dim() == 2 else 1).expand(layer.outputs, groups) + (1 << (bits - 1))
