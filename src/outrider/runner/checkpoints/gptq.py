"""GPTQ checkpoints (Frantar et al. 2022, as AutoGPTQ and GPTQModel store them): 4 or 8 bits, groups of inputs.

``qweight`` int32 [inputs * bits / 32, outputs] holds consecutive inputs of an output in a word; ``qzeros`` int32
[groups, outputs * bits / 32] consecutive outputs; ``scales`` [groups, outputs]; ``g_idx`` [inputs] names the group of each
input, which is not in order where inputs were quantised by activation (``desc_act``). Version 1 stores zeros minus one,
version 2 (``gptq_v2``) as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.runner.checkpoints.weight import FLOATS, Format, LayerTensors, QuantizedWeight, unpack_words
from outrider.types import OutriderError

ONES = {4: 0x11111111, 8: 0x01010101}  # one in each code of a word


class Gptq(Format):
    """Reads the layers of a GPTQ checkpoint."""

    marks = ("qweight",)
    keys = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.group_size = config.get("group_size")
        version = config.get("checkpoint_format") or config.get("format") or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise OutriderError(f"GPTQ in the format {version}")
        bits = config.get("bits")
        if bits not in ONES:
            raise OutriderError(f"GPTQ with {bits} bits")
        self.bits = int(bits)
        self.has_all_zeros = version == "gptq_v2"

    def read(self, layer: LayerTensors) -> QuantizedWeight:
        rows = layer.rows("qweight") * 32
        # Some layers may have more bits than the config says.
        bits = next((bits for bits in ONES if rows == layer.inputs * bits), self.bits)
        words = layer.get("qweight", (torch.int32,), [layer.inputs * bits // 32, layer.outputs])
        groups = layer.rows("scales")
        group = layer.group(groups, self.group_size)
        scales = layer.scales("scales", FLOATS, [groups, layer.outputs])
        zeros = layer.get("qzeros", (torch.int32,), [groups, layer.outputs * bits // 32])
        if not self.has_all_zeros:
            zeros = zeros + ONES[bits]  # on whole words, as they were subtracted
        order = layer.grouped("g_idx", group)
        codes = unpack_words(words.T, bits)
        return QuantizedWeight(
            codes if order is None else codes[:, order],
            bits,
            scales.T.contiguous(),
            unpack_words(zeros, bits).T.int(),
            group,
            order,
        )
