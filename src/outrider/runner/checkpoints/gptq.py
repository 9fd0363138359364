"""GPTQ and AWQ checkpoints: integers in groups of inputs, each group with a scale and a zero.

GPTQ (Frantar et al. 2022, as AutoGPTQ and GPTQModel store them), 4 or 8 bits: ``qweight`` int32 [inputs * bits / 32, outputs]
holds consecutive inputs of an output in a word; ``qzeros`` int32 [groups, outputs * bits / 32] consecutive outputs; ``scales``
[groups, outputs]; ``g_idx`` [inputs] names the group of each input, which is not in order where inputs were quantised by
activation (``desc_act``). Version 1 stores zeros minus one, version 2 (``gptq_v2``) as they are. AutoRound
(Cheng et al. 2023) writes version 1, too.

AWQ (Lin et al. 2023, as AutoAWQ stores them, version ``gemm``), 4 bits: ``qweight`` int32 [inputs, outputs / 8] holds eight
consecutive outputs of an input in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7; ``qzeros`` int32 [groups, outputs / 8] likewise;
``scales`` [groups, outputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.runner.checkpoints.weight import FLOATS, Format, LayerTensors, QuantizedWeight, unpack_words
from outrider.types import OutriderError

ONES = {4: 0x11111111, 8: 0x01010101}  # one in each code of a word
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of outputs 0 to 7 in a word


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


class AutoRound(Gptq):
    """Reads the layers of an AutoRound checkpoint without zeros that is packed as GPTQ's version 1, as most are."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        packing, kind = config.get("packing_format") or config.get("backend"), config.get("data_type", "int")
        if str(packing).split(":")[:2] not in (["auto_round", "auto_gptq"], ["auto_round", "gptq"]):
            raise OutriderError(f"AutoRound in the packing {packing}")
        if kind != "int" or config.get("sym") is False:
            raise OutriderError(f"AutoRound with the data type {kind} and sym={config.get('sym')}")
        super().__init__({name: config.get(name) for name in ("bits", "group_size")})


class Awq(Format):
    """Reads the layers of an AWQ checkpoint."""

    marks = ("qweight",)
    keys = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.group_size = config.get("group_size", config.get("q_group_size"))
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        bits = config.get("bits", config.get("w_bit"))
        if version != "gemm":
            raise OutriderError(f"AWQ in the version {version}")
        if bits != 4:
            raise OutriderError(f"AWQ with {bits} bits instead of 4")

    def read(self, layer: LayerTensors) -> QuantizedWeight:
        words = layer.get("qweight", (torch.int32,), [layer.inputs, layer.outputs // 8])
        groups = layer.rows("scales")
        group = layer.group(groups, self.group_size)
        scales = layer.scales("scales", FLOATS, [groups, layer.outputs])
        zeros = layer.get("qzeros", (torch.int32,), [groups, layer.outputs // 8])
        return QuantizedWeight(_awq_codes(words).T.contiguous(), 4, scales.T.contiguous(), _awq_codes(zeros).T.int(), group)


def _awq_codes(words: Tensor) -> Tensor:
    """Return codes uint8 [rows, n * 8] of words [rows, n]."""
    codes: Tensor = unpack_words(words, 4).unflatten(1, (-1, 8))
    return codes[:, :, list(AWQ_PLACES)].flatten(1)
