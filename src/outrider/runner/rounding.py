"""Decide, before weights are read, whether a model can run in 8 or 4 bits: rounded (``weights``) or quantised in its files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from outrider import native
from outrider.runner import gguf
from outrider.runner.checkpoints.formats import choose, method_of, quantization_of
from outrider.runner.checkpoints.weight import Format
from outrider.runner.packing import share_of_linear
from outrider.runner.survey import without_weights
from outrider.types import OutriderError

MIN_SHARE = 0.8  # minimum share of the weights that rounding must affect


def refuse_rounding(
    weights: str, device: torch.device, config: PreTrainedConfig, model_class: Any, reader: Format | None = None
) -> None:
    """Raise ``OutriderError``, in one line, unless the weights of this config's model can be rounded to 8 or 4 bits.

    ``model_class``: None for remote code, which is checked after loading. ``reader``: of a quantised checkpoint.
    """
    if device.type != "cpu":
        raise OutriderError(f"weights={weights} needs device=cpu, got {device}: omit weights=..., or choose the CPU")
    quantized = quantization_of(config)
    if quantized is not None and (reader is None or reader.has_codes):
        raise OutriderError(
            f"weights={weights} needs a checkpoint in 16 or 32 bits or FP8, got one quantised by {method_of(quantized)}:"
            " omit weights=..."
        )
    if not native.load():
        raise OutriderError(f"weights={weights} needs Outrider's CPU kernels, which cannot be built: a warning says why")
    if model_class is None:
        return
    problem = _mostly_other(config, model_class)
    if problem is not None:
        raise OutriderError(f"weights={weights} rounds linear layers, {problem}: omit weights=...")


def choose_reader(source: str, config: PreTrainedConfig, model_class: Any, device: torch.device) -> Format | None:
    """Return the reader of a quantised checkpoint; None if it is not quantised or transformers' quantiser loads it.

    Raises ``OutriderError``, in one line, for a checkpoint that cannot run on this device.
    """
    quantized = quantization_of(config)
    if quantized is None or gguf.find(source) is not None:
        return None
    reader = choose(source, quantized, device)
    if reader is not None and model_class is not None:
        problem = _mostly_other(config, model_class)
        if problem is not None:
            method = method_of(quantized)
            raise OutriderError(
                f"weights quantised by {method} are read in linear layers, {problem}: choose a checkpoint in 16 bits"
            )
    return reader


def _mostly_other(config: PreTrainedConfig, model_class: Any) -> str | None:
    """Return why rounding would affect too few of a model's weights; None if it affects most."""
    share = share_of_linear(without_weights(config, model_class))
    if share >= MIN_SHARE:
        return None
    return (
        f"which hold {share:.0%} of the weights of this {config.model_type} model"
        f" (expected at least {MIN_SHARE:.0%}; some forms of experts are not supported)"
    )
