"""Bound the memory that a checkpoint's weights take, before they are downloaded and before they are read."""

from __future__ import annotations

import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from outrider.hub import fetch_weights
from outrider.memory import require_memory
from outrider.runner import gguf
from outrider.runner.checkpoints.formats import method_of, quantization_of
from outrider.runner.checkpoints.stored import headers
from outrider.runner.checkpoints.weight import Format
from outrider.runner.config import RunnerConfig, torch_dtype
from outrider.runner.loading import num_experts, text_config
from outrider.runner.packing import pack_model
from outrider.runner.survey import without_weights
from outrider.types import OutriderError
from outrider.weight_files import weight_bytes, weight_files


def fetch_fitting_weights(
    source: str | Path, config: PreTrainedConfig, model_class: Any, reader: Format | None, options: RunnerConfig
) -> None:
    """Download the weights of a hub id. Raises ``OutriderError``, if possible before that, if they exceed the memory.

    ``model_class``: None for remote code; ``reader``: that of a quantised checkpoint, if there is one.
    """
    growth = growth_of(source, config, model_class, reader, options)
    fetch_weights(source, growth if reader is None else min(growth, 1.0))  # a reader's is only an upper bound
    try:
        needed = bytes_in_memory(source, config, model_class, reader, options)
    except OutriderError:  # broken files are reported when they are loaded
        return
    require_memory(needed, f"the weights in {source} take", "choose a smaller or a quantised checkpoint")


def bytes_in_memory(
    source: str | Path, config: PreTrainedConfig, model_class: Any, reader: Format | None, options: RunnerConfig
) -> int:
    """Return the bytes that the weights in a local folder take while they are loaded, at most. Raises ``OutriderError``."""
    if reader is not None and options.bits is None:  # by the dtype of each tensor
        return reader.num_bytes(headers([str(file) for file in weight_files(source)]).values(), torch_dtype(options.dtype))
    growth = growth_of(source, config, model_class, reader, options)
    return round(growth * weight_bytes(gguf.find(source) or source))  # of a GGUF file without the image encoder beside it


def growth_of(
    source: str | Path, config: PreTrainedConfig, model_class: Any, reader: Format | None, options: RunnerConfig
) -> float:
    """Return an upper bound of the bytes in memory per byte of a checkpoint's files, from the files where they are local.

    Files of 16 or 32 bits are mapped and rounded layer by layer, so only the rounded weights take memory. Not so weights that
    are copied first.
    """
    quantization = quantization_of(config)
    if quantization is not None:
        if options.bits is not None:  # rounded tensor by tensor
            return 1
        if reader is not None:
            return reader.growth
        return 4 if method_of(quantization) == "mxfp4" else 1  # transformers' own quantiser makes 16 bits of 4
    stated = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    stored = _stored_dtype(source) or stated
    loaded = torch_dtype(options.dtype) or stated or stored
    if not isinstance(stored, torch.dtype) or not isinstance(loaded, torch.dtype):
        return 1
    if options.bits is None or model_class is None or loaded != stored or _is_copied(source, config):
        return loaded.itemsize / stored.itemsize
    model = without_weights(config, model_class, stored)
    in_files = sum(each.numel() for each in model.parameters()) * stored.itemsize
    pack_model(model, options.bits)
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers())) / in_files


def _stored_dtype(source: str | Path) -> torch.dtype | None:
    """Return the dtype of most floating-point weights in local safetensors files, which config.json may state wrongly."""
    sizes: Counter[torch.dtype] = Counter()
    with suppress(OutriderError):  # broken files are reported when they are loaded
        for tensor in headers([str(file) for file in weight_files(source) if file.suffix == ".safetensors"]).values():
            sizes[tensor.dtype] += tensor.nbytes * tensor.is_floating_point()
    return max(sizes, key=sizes.__getitem__) if any(sizes.values()) else None


def _is_copied(source: str | Path, config: PreTrainedConfig) -> bool:
    """Return whether weights are copied before they are rounded, although their dtype stays.

    transformers makes one tensor of all experts, and maps files of PyTorch only in the format since 1.6, a zip archive.
    """
    is_mapped = all(file.suffix == ".safetensors" or zipfile.is_zipfile(file) for file in weight_files(source))
    return not is_mapped or bool(num_experts(text_config(config))) or gguf.find(source) is not None
