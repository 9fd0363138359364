"""Disk cache of packed weights: a checkpoint rounded to 8 or 4 bits is stored once and memory-mapped at later starts.

The checkpoint's weights are then not read. A file is used only while all of these are unchanged: the checkpoint's folder, its
weight files (names, sizes, times) and the text of its config.json, the form of the weights, the requested dtype, the code of
the runner and of ``native``, the versions of torch and transformers, and whether the CPU multiplies bfloat16 faster than
float32. ``disk_cache`` checks the file's owner and mode first.

``torch.save`` writes the tensors at multiples of 64 bytes, which the kernels need, so that they can be mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider import disk_cache
from outrider.errors import first_line, is_out_of_memory
from outrider.files import expanded
from outrider.memory import free_memory
from outrider.runner import disk_keys, experts, huge_pages, kernels, linear, loading, packing
from outrider.runner.survey import without_weights
from outrider.types import OutriderError
from outrider.weight_files import on_this_machine, weight_files

logger = logging.getLogger(__name__)

KIND, SUFFIX = "weights", ".packed"
# Modules that a file holds whole, because their structure depends on the checkpoint's tensors. ``torch.load`` makes no others.
MODULES = (
    *(linear.PackedLinear, linear.JoinedLinear, linear.PackedEmbedding, linear.FusedLinears, linear.FusedSlice),
    *(experts.ExpertLinears, experts.PackedExperts, nn.ModuleList),
)
# Not by ``safe_globals`` around each load: when one thread leaves it, loads of others fail.
torch.serialization.add_safe_globals(list(MODULES))


@dataclass(frozen=True)
class PackedFile:
    """The file of one checkpoint's packed weights in the cache folder."""

    source: Path  # the checkpoint's folder or GGUF file
    key: str
    family: str  # the part of the key that stays the same when the checkpoint's files change

    @classmethod
    def of(cls, source: str | Path, form: int | str, dtype: Any) -> PackedFile | None:
        """Return the file for a folder, a GGUF file or a hub id whose files are on this machine; None for other sources.

        ``form``: how the weights are rounded: the bits of a target's, or a text for a draft's, whose head is rounded as well.
        ``dtype``: the dtype as which the checkpoint is loaded before rounding.
        """
        files, folder = weight_files(source), on_this_machine(source) or expanded(source)
        if not files:
            return None
        place = folder.resolve()
        if place.parent.name == "snapshots" and place.parents[1].name.startswith("models--"):
            place = place.parents[1]  # the repository of the download cache, whose commits follow one another
        family = disk_keys.key(str(place), form, str(dtype))
        config = folder / "config.json"  # a GGUF file has none
        try:
            stats, text = disk_keys.state_of(files), config.read_text() if config.is_file() else None
        except OSError:  # a file was deleted in the meantime
            return None
        content = disk_keys.key(disk_keys.own_code(), stats, text, kernels.has_fast_bfloat16())
        return cls(folder, f"{family}-{content}", family)

    def load(self, config: PreTrainedConfig, model_class: Any, by_request: bool) -> PreTrainedModel | None:
        """Return the packed model; None if the cache has no file, or, with a warning, if the file does not fit the model."""
        path = disk_cache.find(KIND, self.key, SUFFIX)
        if path is None:
            return None
        try:
            stored = torch.load(path, mmap=True, weights_only=True)
            model = loading.prepare_for_passes(without_weights(config, model_class, stored["dtype"]), by_request)
            for name, module in stored["modules"].items():
                parent, _, own = name.rpartition(".")
                model.get_submodule(parent).add_module(own, module)
            packing.pack_model(model)  # the rest
            _fill(model, stored["tensors"], path.stat().st_size)
        except Exception as error:  # for example, a file of other code
            if is_out_of_memory(error):  # the file is good, and may be the only way to run the model
                raise
            logger.warning("%s does not fit the model (%s): rebuilding it", path, first_line(error))
            disk_cache.discard(KIND, self.key, SUFFIX)
            return None
        loading.read_generation_config(model, self.source)
        logger.info("packed weights read from %s", path)
        return model

    def save(self, model: PreTrainedModel) -> None:
        """Store a packed model and delete files of earlier states of its checkpoint; log a warning if that fails."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in _tensors(model)}
        modules = {name: each for name, each in model.named_modules(remove_duplicate=False) if type(each) in MODULES[:-1]}
        stored = {"dtype": model.config.dtype, "modules": modules, "tensors": tensors}
        try:
            path = disk_cache.write(KIND, self.key, SUFFIX, lambda file: _write(stored, file))
        except OutriderError as error:
            logger.warning("%s; the weights are quantised again at the next start", error)
            return
        disk_cache.discard(KIND, self.family, SUFFIX, keep=path)
        logger.info("packed weights stored as %s", path)


def _write(stored: dict[str, Any], file: BinaryIO) -> None:
    """Write with ``torch.save``. Raises ``OSError``, also where torch raises its own error in place of the file's."""
    try:
        torch.save(stored, file)
    except RuntimeError as error:
        raise OSError(first_line(error.__context__ or error)) from error


def _fill(model: PreTrainedModel, stored: dict[str, Tensor], num_bytes: int) -> None:
    """Fill a model on the meta device, in place. Raises ``OutriderError`` if the file lacks one of its tensors.

    The file may have more: some modules create tensors in their first pass. Its shapes and dtypes are those to run with: of a
    GGUF file they may differ from those of the config.
    """
    missing = next((name for name, _ in _tensors(model) if name not in stored), None)
    if missing is not None:
        raise OutriderError(f"its tensor {missing} is missing")
    free = free_memory()
    in_memory = free is not None and 2 * num_bytes < free  # huge pages are faster than a mapped file
    found: dict[int, Tensor] = {}
    for name, tensor in _tensors(model):
        part = stored[name]
        held = huge_pages.empty(part.shape, part.dtype).copy_(part) if in_memory else part
        found[id(tensor)] = nn.Parameter(held, requires_grad=False) if isinstance(tensor, nn.Parameter) else held
    for module in model.modules():
        for store in _stores(module):
            for key, value in store.items():
                if isinstance(value, Tensor):
                    store[key] = found[id(value)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and other tensors that modules hold, each once, with their names."""
    seen = set()
    for name, module in model.named_modules():
        for store in _stores(module):
            for key, value in store.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{name}.{key}", value


def _stores(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, vars(module)
