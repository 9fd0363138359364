"""AWQ checkpoints (Lin et al. 2023, as AutoAWQ stores them, version ``gemm``): 4 bits, groups of inputs.

``qweight`` int32 [inputs, outputs / 8] holds eight consecutive outputs of an input in a word, in the order 0, 2, 4, 6, 1, 3, 5,
7; ``qzeros`` int32 [groups, outputs / 8] likewise; ``scales`` [groups, outputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.runner.checkpoints.weight import FLOATS, Format, LayerTensors, QuantizedWeight, unpack_words
from outrider.types import OutriderError

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of outputs 0 to 7 in a word


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
        return QuantizedWeight(_codes(words).T.contiguous(), 4, scales.T.contiguous(), _codes(zeros).T.int(), group)


def _codes(words: Tensor) -> Tensor:
    """Return codes uint8 [rows, n * 8] of words [rows, n]."""
    codes: Tensor = unpack_words(words, 4).unflatten(1, (-1, 8))
    return codes[:, :, list(PLACES)].flatten(1)
