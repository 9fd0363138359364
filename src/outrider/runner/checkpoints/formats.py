"""Choose how a quantised checkpoint runs: with Outrider's own weights, with transformers' quantiser, or not at all.

The choice depends on the config only and is made before weights are read or downloaded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from outrider import native
from outrider.errors import first_line
from outrider.runner.checkpoints.compressed_tensors import CompressedTensors
from outrider.runner.checkpoints.float4 import Mxfp4
from outrider.runner.checkpoints.fp8 import Fp8
from outrider.runner.checkpoints.gptq import AutoRound, Awq, Gptq
from outrider.runner.checkpoints.modelopt import ModelOpt
from outrider.runner.checkpoints.stored import StoredConfig
from outrider.runner.checkpoints.weight import Format
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

FORMATS: dict[str, type[Format]] = {
    "gptq": Gptq,
    "auto-round": AutoRound,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "mxfp4": Mxfp4,
    "modelopt": ModelOpt,
}
INSTEAD = "choose a checkpoint in 16 bits, GPTQ, AWQ, compressed-tensors, ModelOpt or FP8"


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantisation that a config states; None for a checkpoint in 16 or 32 bits."""
    found: Any = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    of_mlx = getattr(config, "quantization", None)  # with and without a quantization_config
    if isinstance(of_mlx, Mapping) and "bits" in of_mlx and not (isinstance(found, Mapping) and "quant_method" in found):
        return {**of_mlx, "quant_method": "MLX"}
    if found is None:
        return None
    if not isinstance(found, Mapping):
        found = found.to_dict() if hasattr(found, "to_dict") else {"quant_method": None}
    return dict(found)


def method_of(quantization: Mapping[str, Any]) -> str:
    """Return the name of a quantisation, such as ``"gptq"``."""
    method = quantization.get("quant_method")
    return str(getattr(method, "value", method)) if method is not None else "an unnamed method"


def choose(source: str, quantization: Mapping[str, Any], device: torch.device) -> Format | None:
    """Return the reader of a quantised checkpoint; None where transformers' own quantiser loads it.

    Raises ``OutriderError``, in one line, if neither can run it on this device.
    """
    method = method_of(quantization)
    reads = FORMATS.get(method) if native.serves(device) else None
    problem = None
    if reads is not None:
        try:
            return reads(quantization)
        except OutriderError as error:
            problem = f"{error} is not read"
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise OutriderError(
                f"cannot read the quantization_config of {source}: a value has the wrong type ({first_line(error)})"
            ) from error
    if method == "mxfp4" and device.type == "cpu" and problem is None:
        return None  # transformers converts these to bfloat16 exactly, without further libraries
    own = _why_not_transformers(quantization, _device_map(device))
    if own is None and problem is None:
        return None
    where = "this CPU" if device.type == "cpu" else str(device)
    runs_on_cpu = device.type != "cpu" and method in FORMATS
    instead = "choose a checkpoint in 16 bits, or device=cpu" if runs_on_cpu else INSTEAD
    raise OutriderError(f"{source} is quantised by {method}, which {where} cannot run: {problem or own}; {instead}")


def loader_options(reader: Format | None, quantization: Mapping[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for a quantised checkpoint."""
    if reader is not None:
        return {"quantization_config": StoredConfig(reader)}
    if quantization is None:
        return {}
    if method_of(quantization) == "mxfp4" and device.type == "cpu":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    device_map = _device_map(device)
    return {} if device_map is None else {"device_map": device_map}


def _device_map(device: torch.device) -> dict[str, str] | None:
    """Return the map by which quantisers choose kernels, and without which some of them choose the device.

    None if there is no choice: some quantisers refuse any map with a CPU.
    """
    has_choice = device.type != "cpu" or torch.cuda.is_available()
    return {"": str(device)} if has_choice and find_spec("accelerate") is not None else None


def _why_not_transformers(quantization: Mapping[str, Any], device_map: dict[str, str] | None) -> str | None:
    """Return why transformers' quantiser cannot load such a checkpoint on this machine; None if it can."""
    try:
        with warnings.catch_warnings(action="ignore"):
            quantizer = AutoHfQuantizer.from_config(dict(quantization), pre_quantized=True)
            quantizer.validate_environment(device_map=device_map, weights_only=True)
    except ValueError as error:
        return "the format is unknown" if "Unknown quantization type" in str(error) else first_line(error)
    except Exception as error:  # missing or old libraries raise many kinds of exceptions
        logger.debug("no quantiser for %s", quantization, exc_info=True)
        return first_line(error)
    return None
