"""Load a causal language model: a local folder, a hub id, or a loaded model."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    Cache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import ModelOutput

from outrider.errors import errors_as, first_line
from outrider.files import expanded, not_a_model_folder, object_in
from outrider.hub import fetch_configs, fetch_weights, is_cached_only, refuse_missing
from outrider.runner import attention, gguf, recurrence
from outrider.runner.checkpoint_files import EXPERTS, check_config_file, check_sizes, check_weight_files, is_finite
from outrider.runner.checkpoints import modelopt
from outrider.runner.checkpoints.formats import loader_options, quantization_of
from outrider.runner.checkpoints.stored import without_quantization
from outrider.runner.checkpoints.weight import Format
from outrider.types import OutriderError, dtype_name
from outrider.weight_files import on_this_machine

logger = logging.getLogger(__name__)

# The cache's name for a ``forward`` that takes any argument; transformers 5.24 added the property of the old name.
ANY_CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
LAYER_INDEX = r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\."  # layer index in a tensor's name
# Names that quantisers give to a layer's numbers beside its codes.
SCALES = re.compile(r"weight_scale(_inv|_2)?|input_scale|weight_packed|qweight|qzeros|scales|absmax|SCB")


def load_model(
    source: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    trust_remote_code: bool = False,
    reader: Format | None = None,
) -> PreTrainedModel:
    """Return the model in eval mode.

    ``config``: that of ``load_config``; ``reader``: of a quantised checkpoint, whose layers then hold what the files store
    (``checkpoints.stored``). Raises ``OutriderError``, in one line, for broken files and weights that do not match the config.
    """
    fetch_weights(source)
    check_weight_files(source)
    file = gguf.find(source)
    if file is not None:
        model = _load_gguf(file, config, dtype, device)
        read_generation_config(model, expanded(source))
        return model
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    options["local_files_only"] = is_cached_only(source)
    options |= loader_options(reader, quantization_of(config), device)
    if reader is not None:
        config = without_quantization(config)
    try:
        with quiet():
            loaded: Any = auto_class(config).from_pretrained(
                source, config=config, **options, ignore_mismatched_sizes=True, output_loading_info=True
            )
        model, info = loaded
    except OutriderError:
        raise
    except Exception as error:  # broken files raise many kinds of exceptions
        raise OutriderError(f"cannot load {source}: {reason(error)}") from error
    # transformers fills missing tensors with random numbers and drops unexpected ones.
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise OutriderError(
            f"the weights in {source} do not match its config: {name} is {list(found)}, expected {list(wanted)}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise OutriderError(f"{source} lacks {len(missing)} of the model's tensors, the first {missing[0]}")
    spare = layers_beyond(info["unexpected_keys"], text_config(config))
    if spare:
        count = num_layers(text_config(config))
        raise OutriderError(
            f"the weights in {source} do not match its config: {spare[0]} belongs to no layer, expected {count} layers"
        )
    if reader is None:
        _refuse_dropped(source, model, sorted(info["unexpected_keys"]), quantization_of(config) is not None)
    if "device_map" not in options:
        model.to(device)
    return model


def _refuse_dropped(source: str | Path, model: PreTrainedModel, unexpected: Sequence[str], is_quantised: bool) -> None:
    """Raise ``OutriderError`` if a tensor that the model has no place for belongs to one of its layers."""
    layers = {name.rpartition(".")[0] for name in model.state_dict()}
    for name in unexpected:
        layer, _, kind = name.rpartition(".")
        if layer in layers and kind == "bias":
            raise OutriderError(f"the weights in {source} do not match its config: {name} belongs to a layer without a bias")
        if layer in layers and not is_quantised and SCALES.fullmatch(kind):
            raise OutriderError(
                f"{source} is quantised ({name}), but its config.json has no quantization_config: choose a checkpoint whose"
                " config states its format"
            )


def _load_gguf(file: Path, config: PreTrainedConfig, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """Load the model of a GGUF file. Raises ``OutriderError`` if its tensors do not match the config."""
    config.__dict__.pop("quantization_config", None)
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    gguf.load_weights(model, file, dtype, device)
    return model.eval().to(device)


def read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Replace a model's generation config by that of its folder, if there is one."""
    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except OSError as error:  # transformers ignores it, too, when it loads a checkpoint
            logger.debug("%s has no readable generation config: %s", folder, error)


def layers_beyond(keys: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """Return the unexpected tensors that belong to layers after the config's last layer.

    Such a layer may also be a draft head, which has norms and a projection that decoder layers lack.
    """
    found = [(key, layer[1]) for key in sorted(keys) if (layer := re.search(LAYER_INDEX, key)) is not None]
    heads = {layer for key, layer in found if re.search(r"\.(eh_proj|enorm|hnorm)\.", key)}
    return [key for key, layer in found if int(layer) >= num_layers(config) and layer not in heads]


def prepare_for_passes(model: PreTrainedModel, by_request: bool) -> PreTrainedModel:
    """Switch a surveyed model to Outrider's attention and remove its image and audio encoders, in place.

    ``by_request``: it keeps its own attention. Raises ``OutriderError`` for a model without a language model head, or with
    layers that Outrider cannot run.
    """
    refuse_shared_scales(model)
    if model.get_output_embeddings() is None:
        raise OutriderError(f"{type(model).__name__} has no language model head: load it with AutoModelForCausalLM")
    if not by_request:
        model.set_attn_implementation(attention.NAME)
    drop_towers(model)
    drop_losses(model)
    recurrence.bind(model)
    model.eval().requires_grad_(False)
    return model


def drop_towers(model: PreTrainedModel) -> None:
    """Remove image and audio encoders from a multimodal model, in place, to free their memory."""
    text = decoder_of(model)
    inside = {id(module) for module in text.modules()}
    for parent in (model, model.base_model):
        for name, child in list(parent.named_children()):
            beside = id(child) not in inside and all(text is not module for module in child.modules())
            if beside and isinstance(child, PreTrainedModel):
                setattr(parent, name, NoTower())


def drop_losses(model: PreTrainedModel) -> None:
    """Let a mixture of experts compute no loss over its routers, in place: some checkpoints keep the setting of training."""
    if getattr(text_config(model), "output_router_logits", False):
        text_config(model).output_router_logits = False


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the language model below the output head."""
    found = model.get_decoder()  # of some classes an output head that is called decoder
    return found if isinstance(found, PreTrainedModel) else model.base_model


class NoTower(nn.Module):
    """Placeholder for an image or audio encoder."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise OutriderError("image and audio inputs are not supported: Outrider runs only the text part of a multimodal model")


def refuse_encoders(config: PreTrainedConfig) -> None:
    """Raise ``OutriderError`` for bidirectional models, which transformers also lists as causal language models."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise OutriderError(f"unsupported model: {kind} is an encoder-decoder model; expected a decoder-only language model")
    # Full dumps of older configs state it for every model; GPT-NeoX's set it wrongly.
    is_declared = "is_decoder" in getattr(type(config), "__dataclass_fields__", {}) and not kind.startswith("gpt_neox")
    if is_declared and not config.is_decoder:
        raise OutriderError(
            f"unsupported model: {kind} with is_decoder=False is bidirectional; expected a decoder-only language model"
        )


def check_device(device: torch.device) -> None:
    """Raise ``OutriderError`` for a device that this machine lacks, and for one that the passes do not run on."""
    with errors_as(f"device {device} is not available", Exception):  # each kind of device raises its own
        torch.empty(0, device=device)
    if device.type not in ("cpu", "cuda"):
        raise OutriderError(f"device {device} is not supported: expected cpu, cuda or a numbered GPU such as cuda:1")


def refuse_conversion(model: PreTrainedModel, dtype: Any, device: Any) -> None:
    """Raise ``OutriderError`` for a dtype or device, if not "auto", that differs from a loaded model's own, which it keeps.

    Also for a model on several devices, because its cache is on one.
    """
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        raise OutriderError(
            f"the loaded model is spread over {', '.join(sorted(devices))}: expected one device; load it without device_map"
        )
    if dtype not in ("auto", dtype_name(model.dtype)):
        raise OutriderError(
            f"invalid dtype {dtype!r} for a loaded model in {dtype_name(model.dtype)}: omit it, or load the model with it"
        )
    wanted = model.device if device == "auto" else torch.device(device)
    if wanted not in (model.device, torch.device(model.device.type)):  # "cuda" is any GPU
        raise OutriderError(f"invalid device {device!r} for a loaded model on {model.device}: omit it, or move the model there")


def refuse_shared_scales(model: PreTrainedModel) -> None:
    """Raise ``OutriderError`` for layers that quantise a whole pass with one scale: their output would depend on the drafts."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise OutriderError(
                f"{name} is quantised by torch.ao's quantize_dynamic, which has one scale for all tokens of a pass, so outputs"
                " would depend on drafts; use torchao's quantize_, which has one scale per token"
            )


def refuse_custom_code(source: str | Path, error: BaseException) -> None:
    """Raise ``OutriderError`` if a loader failed because it may not run a model's own code."""
    if "custom code" in str(error):
        advice = "read it, then pass trust_remote_code=True to run it"
        raise OutriderError(f"{source} is a model with its own code in its folder or repository: {advice}") from error


def has_own_code(folder: Path) -> bool:
    """Return whether the config or the tokenizer of a folder names Python code, which needs ``trust_remote_code``."""
    return any("auto_map" in object_in(folder / name) for name in ("config.json", "tokenizer_config.json"))


def load_config(source: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the model's config. Raises ``OutriderError`` if it is missing or not a language model's."""
    path, file = Path(source), gguf.find(source)
    refuse_missing(source)
    fetch_configs(source)
    folder = on_this_machine(source)
    if folder is not None and (folder / "config.json").exists():
        check_config_file(folder / "config.json")
    elif path.is_dir() and file is None:
        raise OutriderError(not_a_model_folder(source))
    try:
        with quiet():
            config: PreTrainedConfig = (
                AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=is_cached_only(source))
                if file is None
                else gguf.load_config(source, file)
            )
    except OutriderError:
        raise
    except Exception as error:  # invalid configs raise many kinds of exceptions
        refuse_custom_code(source, error)
        raise OutriderError(f"cannot read the config of {source}: {reason(error)}") from error
    if folder is not None and quantization_of(config) is None and (stated := modelopt.quantization_file_of(folder)) is not None:
        config.quantization_config = stated
    if not trust_remote_code and model_class(config) is None:
        raise OutriderError(f"{source} is a {config.model_type} model, not a causal language model")
    text = text_config(config)
    if not isinstance(text, PreTrainedConfig):
        raise OutriderError(f"the config of {source} has a text_config, which {config.model_type} models do not have")
    if folder is not None:
        _drop_default_ends(config, folder / "config.json")
    check_sizes(str(source), vars(text), text.attribute_map)
    refuse_encoders(config)
    return config


def _drop_default_ends(config: PreTrainedConfig, file: Path) -> None:
    """Remove the end-of-text ids that the classes of a config and of its text config set, unless its file states them."""
    if not file.is_file():  # a GGUF file without a config: its header states them
        return
    stated, text = object_in(file), text_config(config)
    is_inside = any("eos_token_id" in part for part in stated.values() if isinstance(part, dict))
    if "eos_token_id" not in stated and not (text is config and is_inside):
        vars(config)["eos_token_id"] = None  # some classes refuse None
    if text is not config and not is_inside:
        vars(text)["eos_token_id"] = None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' log messages and warnings while loading: Outrider raises its own errors for what matters."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class for this config: multimodal models are loaded whole, for their text part."""
    is_multimodal = type(config) in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM


def model_class(config: PreTrainedConfig) -> Any:
    """Return the model class of this config; None for remote code, and if there is no language model class."""
    mapping = auto_class(config)._model_mapping
    found = mapping.get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found


def pass_arguments(model: PreTrainedModel, past: Cache, positions: Tensor, by_request: bool) -> dict[str, Any]:
    """Return the keyword arguments with which ``forward`` takes the cache and the positions [1, T], without a padding mask.

    ``by_request``: the model creates its own masks, which are correct for a single request.
    """
    names = _parameters(type(model).forward)
    name = cache_argument(model)
    takes_no_positions = name == "cache" and "position_ids" not in names
    if name == "cache_params" or (takes_no_positions and (model._is_stateful or "attention_mask" not in names)):
        # only recurrent layers, which would apply the mask
        return {"position_ids": positions, name: past, "use_cache": True}
    if by_request:
        return {name: past, "use_cache": True, **({"position_ids": positions} if "position_ids" in names else {})}
    # Every model passes a 4-D mask on unchanged, and Outrider's attention ignores it.
    mask = positions.new_ones((1, 1, 1, 1), dtype=torch.bool)
    return {"position_ids": positions, name: past, "attention_mask": mask, "use_cache": True}


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument of ``forward`` that takes the cache: transformers 5.24 renamed it to ``cache``."""
    names = _parameters(type(model).forward)
    return next((name for name in ("past_key_values", "cache", "cache_params") if name in names), ANY_CACHE)


def keeps_logits(model: PreTrainedModel) -> bool:
    """Return whether ``forward`` can compute the logits of selected tokens only."""
    return "logits_to_keep" in _parameters(type(model).forward)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters. Cached, because every eager pass reads them."""
    return frozenset(inspect.signature(function).parameters)


def reason(error: Exception) -> str:
    """Return a loader's error message in one line, without exception names."""
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):  # the cause has the field's error
        return first_line(error.__cause__)
    is_key = isinstance(error, KeyError) and " " not in str(error)
    return f"unknown value {error}" if is_key else first_line(error)


def text_config(model_or_config: Any) -> PreTrainedConfig:
    """Return the config of the language model, also inside a multimodal one."""
    config = getattr(model_or_config, "config", model_or_config)
    return config.get_text_config(decoder=True)


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence of a text config's model, None without a limit. Whisper and MPT have other names for it.

    Users add YaRN (Peng et al. 2023) to a config and leave its maximum as it was.
    """
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    stated = next((int(found) for name in names if (found := getattr(config, name, None))), None)
    rope = getattr(config, "rope_parameters", None) or {}
    before, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if stated is None or rope.get("rope_type") != "yarn" or not before or not factor:
        return stated
    return max(stated, int(before * factor))


def check_weights(model: PreTrainedModel, name: str) -> None:
    """Raise ``OutriderError`` for the first tensor with NaN or infinity."""
    for key, tensor in model.named_parameters():
        if not is_finite(tensor):
            raise OutriderError(f"{name}: the weights of {key} contain NaN or infinity")


def num_layers(config: PreTrainedConfig) -> int:
    """Return the number of decoder layers of a text config, without encoder layers."""
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def num_experts(config: PreTrainedConfig) -> int | None:
    """Return the number of experts per layer of a mixture; None for other models."""
    return next((count for name in EXPERTS if (count := getattr(config, name, None))), None)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers, whatever its name. Raises ``OutriderError`` if there is none."""
    found = find_decoder_layers(model)
    if found is None:
        raise OutriderError(f"{type(model).__name__} has no list of {num_layers(text_config(model))} decoder layers")
    return found


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of decoder layers; None if there is none."""
    count = num_layers(text_config(model))
    stacks = [each for each in decoder_of(model).modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    return stacks[0] if stacks else None
