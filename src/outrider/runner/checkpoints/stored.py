"""Load quantised checkpoints: linear layers hold the stored tensors until they are packed.

transformers reads the files and maps tensor names as for any checkpoint; before that, layers with quantised tensors in the
files (not in the config) are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import str_to_torch_dtype
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from outrider.errors import errors_as
from outrider.runner.checkpoints import float4
from outrider.runner.checkpoints.weight import FLOATS, Format, LayerTensors, QuantizedWeight
from outrider.types import OutriderError, dtype_name

METHOD = "outrider"
DTYPES = str_to_torch_dtype | {"F8_E8M0": torch.float8_e8m0fnu}


class StoredLinear(nn.Module):
    """Linear layer that holds its weight as the checkpoint stores it. Computing with it decodes the weight each time.

    ``name``: the layer's in the checkpoint.
    """

    bias: nn.Parameter | None

    def __init__(self, reader: Format, layer: LayerTensors, bias: Tensor | None) -> None:
        """``layer``: tensors on the meta device. ``bias``: empty, in the checkpoint's dtype."""
        super().__init__()
        self.out_features, self.in_features = layer.outputs, layer.inputs
        self.name, self._reader = layer.name, reader
        for key, tensor in layer.tensors.items():
            self.register_buffer(key, tensor)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def read(self) -> QuantizedWeight | Tensor:
        """Return the weight. Raises ``OutriderError``, naming the tensor, for invalid values."""
        return self._reader.read(LayerTensors(self.name, self.out_features, self.in_features, dict(self.named_buffers())))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.read()
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.float()
        return nn.functional.linear(x.float(), values, None if self.bias is None else self.bias.float()).to(x.dtype)


class StoredConfig(QuantizationConfigMixin):
    """Replaces the checkpoint's quantisation config for transformers' loader."""

    def __init__(self, reader: Format) -> None:
        self.reader, self.quant_method = reader, METHOD  # type: ignore[assignment]


@register_quantizer(METHOD)
class StoredQuantizer(HfQuantizer):
    """Called by transformers' loader between building a model on the meta device and reading its weights."""

    quantization_config: StoredConfig

    def preprocess_model(
        self, model: PreTrainedModel, dtype: Any = None, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        replace_layers(model, self.quantization_config.reader, checkpoint_files or ())

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> None:
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]  # other code sees a model in 16 bits

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the config without quantisation."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        part.__dict__.pop("quantization_config", None)
    return config


def headers(files: Sequence[str]) -> dict[str, Tensor]:
    """Return the dtypes and shapes of all tensors in safetensors files, on the meta device. Raises ``OutriderError``."""
    found: dict[str, Tensor] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise OutriderError(f"{file} is not a safetensors file: quantised weights are read from safetensors only")
        with errors_as(f"cannot read {file}", SafetensorError, OSError), safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                part = opened.get_slice(name)
                if part.get_dtype() in DTYPES:  # other dtypes are unsupported and count as missing
                    found[name] = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")
    return found


def replace_layers(model: PreTrainedModel, reader: Format, files: Sequence[str]) -> None:
    """Replace linear layers that the files store quantised by ``StoredLinear`` ones, in place; the model is on the meta device.

    Raises ``OutriderError``, naming the tensor, for one that is missing or of another dtype or shape than the format's, and for
    quantised tensors that belong to no linear layer of the model.
    """
    found = headers(files)
    stems = {name.removesuffix(f".{mark}") for name in found for mark in reader.marks if name.endswith(f".{mark}")}
    modules, placed = dict(model.named_modules()), _name_finder(model)
    for stem in sorted(stems | _unmarked(found)):
        place_name, is_merged = placed(stem)
        module = modules.get(place_name)
        if module is None and not is_merged:  # not part of the model, such as draft heads
            continue
        if type(module) not in (nn.Linear, Conv1D):
            raise OutriderError(
                f"{stem} is quantised, and {type(model).__name__} has no separate linear layer for it:"
                " only linear layers may be quantised"
            )
        if module is model.get_output_embeddings() and model.config.get_text_config(decoder=True).tie_word_embeddings:
            raise OutriderError(
                f"{stem} is quantised, and the config ties it to the embedding: set tie_word_embeddings to false"
            )
        weight: Tensor = module.weight  # type: ignore[union-attr]
        outputs, inputs = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
        tensors = {key: found[f"{stem}.{key}"] for key in reader.keys if f"{stem}.{key}" in found}
        layer = LayerTensors(stem, outputs, inputs, tensors)
        if stem not in stems:
            raise OutriderError(
                f"{stem}.weight is {dtype_name(found[f'{stem}.weight'].dtype)}, and the checkpoint lacks its {reader.marks[0]}"
            )
        reader.read(layer)
        bias = found.get(f"{stem}.bias")
        if bias is not None and list(bias.shape) != [outputs]:
            raise OutriderError(f"{stem}.bias is {list(bias.shape)}, expected {[outputs]}")
        if bias is None and module.bias is not None:  # type: ignore[union-attr]
            raise OutriderError(f"the checkpoint lacks {stem}.bias")
        model.set_submodule(place_name, StoredLinear(reader, layer, bias))
    for name, module in modules.items():
        experts = float4.stored_experts(name, module, found)
        if experts is not None:
            model.set_submodule(name, experts)


def _unmarked(found: dict[str, Tensor]) -> set[str]:
    """Return the layers with a quantised weight, whether or not they have scales."""
    return {
        name.removesuffix(".weight")
        for name, tensor in found.items()
        if name.endswith(".weight") and tensor.dtype not in (*FLOATS, torch.float64)
    }


def _name_finder(model: PreTrainedModel) -> Callable[[str], tuple[str, bool]]:
    """Return a function from a layer's name in a checkpoint to its name in the model, and whether it is merged with others.

    By transformers' rules for the model's architecture.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix, known = model.base_model_prefix, model.state_dict()

    def find(stem: str) -> tuple[str, bool]:
        key = f"{stem}.weight"
        if key in known:
            return stem, False
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        return name.removesuffix(".weight"), pattern is not None

    return find
