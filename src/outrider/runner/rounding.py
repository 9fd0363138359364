"""The option ``weights``: refuse, before weights are read, what cannot be rounded to 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from outrider import native
from outrider.runner.linear import share_of_linear
from outrider.runner.survey import without_weights
from outrider.types import OutriderError

LEAST = 0.8  # share of the weights that must be rounded for the option to have its effect


def refuse_rounding(weights: str, device: torch.device, config: PreTrainedConfig, model_class: Any) -> None:
    """Raise ``OutriderError``, in one line, unless a model of this config can have its weights in 8 or 4 bits.

    ``model_class``: None for code that comes with the model, which only the loaded model shows.
    """
    if device.type != "cpu":
        raise OutriderError(f"weights={weights} needs device cpu, got {device}: leave out weights or choose the CPU")
    quantized: Any = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = (quantized if isinstance(quantized, dict) else vars(quantized)).get("quant_method")
        raise OutriderError(f"weights={weights} needs a checkpoint in 16 or 32 bits, got one quantised by {method}")
    if not native.load():
        raise OutriderError(f"weights={weights} needs Outrider's CPU kernels, which cannot be built: install g++")
    if model_class is None:
        return
    share = share_of_linear(without_weights(config, model_class))
    if share < LEAST:
        raise OutriderError(
            f"weights={weights} rounds linear layers, which hold {share:.0%} of the weights of this {config.model_type} model"
            f" (expected at least {LEAST:.0%}; experts in one tensor are not supported): leave out weights"
        )
