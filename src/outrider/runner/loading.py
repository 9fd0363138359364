"""Load a causal language model: a local folder, a hub id, or a loaded model."""

from __future__ import annotations

import errno
import inspect
import json
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from outrider.memory import weight_files
from outrider.runner import attention, gguf, recurrence
from outrider.runner.checkpoints.formats import loader_options, quantization_of
from outrider.runner.checkpoints.stored import without_quantization
from outrider.runner.checkpoints.weight import Format
from outrider.types import OutriderError, first_line

LAYER = r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\."  # in a tensor's name
MADV_POPULATE_READ = 22  # Linux 5.14 and newer
POPULATE_BYTES = 1 << 28  # of a file, in one call
# Sizes in a config, and the largest that is not a mistake: a model of 10^20 layers would fill the memory.
MOST = dict.fromkeys(
    (
        *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    ),
    2**31 - 1,
) | {"num_hidden_layers": 10_000}


def load_model(
    source: str | Path,
    dtype: torch.dtype | str,
    device: torch.device,
    trust_remote_code: bool = False,
    reader: Format | None = None,
) -> PreTrainedModel:
    """The model, in eval mode. Raises ``OutriderError``, in one line: no such folder or hub id, not a language model, broken
    files, weights that are not the config's.

    ``reader``: of a quantised checkpoint, whose layers then hold what the files store (``checkpoints.stored``).
    """
    config = load_config(source, trust_remote_code)
    check_readable(source)
    file = gguf.find(source)
    if file is not None:
        return _load_gguf(file, config, dtype, device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
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
    # What follows transformers would fill with random numbers, or drop.
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise OutriderError(f"the weights in {source} are not its config's: {name} is {list(found)}, expected {list(wanted)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise OutriderError(f"{source} lacks {len(missing)} tensors of the model, the first {missing[0]}")
    spare = layers_beyond(info["unexpected_keys"], text_config(config))
    if spare:
        count = num_layers(text_config(config))
        raise OutriderError(f"the weights in {source} are not its config's: {spare[0]} is of no layer, expected {count} layers")
    if device.type != "cpu":
        model.to(device)
    return model  # type: ignore[no-any-return]


def _load_gguf(file: Path, config: PreTrainedConfig, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """The model of a GGUF file. Raises ``OutriderError`` where its tensors are not the config's."""
    config.__dict__.pop("quantization_config", None)
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    gguf.fill(model, file, dtype, device)
    moved: PreTrainedModel = model.eval().to(device)
    return moved


def check_readable(source: str | Path) -> None:
    """Read the weights of a local folder into the page cache. Raises ``OutriderError`` where the disk fails.

    Weights are read from mapped files, and a page that cannot be read would end the process with a bus error. On systems that
    cannot populate a mapping nothing is checked.
    """
    for file in weight_files(Path(source)):
        try:
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                for start in range(0, len(mapped), POPULATE_BYTES):
                    mapped.madvise(MADV_POPULATE_READ, start, min(POPULATE_BYTES, len(mapped) - start))
        except OSError as error:
            if error.errno == errno.EFAULT:  # instead of a bus error
                raise OutriderError(f"cannot read {file}: the disk reports an error") from error
        except (AttributeError, ValueError):  # a system without madvise; an empty file, which the loader refuses
            continue


def layers_beyond(keys: Iterable[str], config: PreTrainedConfig) -> list[str]:
    """The names, of tensors that the model does not know, that belong to layers beyond the config's last.

    Such a layer may be a head that drafts for the model, which has norms and a projection that no layer has.
    """
    found = [(key, layer[1]) for key in sorted(keys) if (layer := re.search(LAYER, key)) is not None]
    heads = {layer for key, layer in found if re.search(r"\.(eh_proj|enorm|hnorm)\.", key)}
    return [key for key, layer in found if int(layer) >= num_layers(config) and layer not in heads]


def adopt(model: PreTrainedModel, by_request: bool = False) -> PreTrainedModel:
    """Puts a loaded model on Outrider's attention, in place, without what reads images and sounds. Raises ``OutriderError``
    where the architecture does not allow it. ``by_request``: it keeps its own attention.
    """
    refuse_encoders(model.config)
    refuse_shared_scales(model)
    if model.get_output_embeddings() is None:
        raise OutriderError(f"{type(model).__name__} has no language model head: load it with AutoModelForCausalLM")
    if not by_request:
        set_attention(model, attention.NAME)
    drop_towers(model)
    recurrence.bind(model)
    model.eval().requires_grad_(False)
    return model


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention that a model calls. Raises ``OutriderError`` where it does not allow that."""
    kind = type(model).__name__
    try:
        model.set_attn_implementation(name)
    except (ValueError, KeyError) as error:
        raise OutriderError(f"{kind} does not use transformers' attention interface: {first_line(error)}") from error
    if text_config(model)._attn_implementation != name:
        raise OutriderError(f"{kind} does not let its attention be set: Outrider cannot run it")


def drop_towers(model: PreTrainedModel) -> None:
    """Takes the encoders of images and sounds out of a multimodal model, in place: their memory is not needed for text."""
    text = model.get_decoder()
    inside = {id(module) for module in text.modules()}
    for parent in (model, model.base_model):
        for name, child in list(parent.named_children()):
            beside = id(child) not in inside and all(text is not module for module in child.modules())
            if beside and isinstance(child, PreTrainedModel):
                setattr(parent, name, NoTower())


class NoTower(nn.Module):
    """In the place of an encoder of images or sounds."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise OutriderError("Outrider runs the text part of a multimodal model: it has no images or sounds to read")


def refuse_encoders(config: PreTrainedConfig) -> None:
    """Raise ``OutriderError`` for bidirectional models, which transformers also lists as causal language models."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise OutriderError(f"unsupported model: {kind} is an encoder-decoder model; expected a decoder-only language model")
    if getattr(config, "is_decoder", True) is False and not kind.startswith("gpt_neox"):  # whose flag has no meaning
        raise OutriderError(
            f"unsupported model: {kind} with is_decoder=False is bidirectional; expected a decoder-only language model"
        )


def refuse_shared_scales(model: PreTrainedModel) -> None:
    """Raises ``OutriderError`` for layers that round a whole pass by one scale: their text would depend on the drafts."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise OutriderError(
                f"{name} is quantised by torch.ao's quantize_dynamic, which rounds all tokens of a pass by one scale: what a"
                " token gives would depend on the drafts beside it; use torchao's quantize_, whose scales are each token's own"
            )


def load_config(source: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config. Raises ``OutriderError`` when there is none or it is not a language model's."""
    path, file = Path(source), gguf.find(source)
    looks_local = path.exists() or str(source).startswith((".", "/", "~")) or str(source).endswith(".gguf")
    if looks_local and not path.is_dir() and file is None:
        problem = "is a file" if Path(source).is_file() else "does not exist"
        raise OutriderError(f"no model folder at {source}: it {problem}")
    has_config = (path / "config.json").exists()
    if looks_local and not has_config and file is None:
        raise OutriderError(f"{source} is not a Hugging Face model folder: config.json is missing")
    if has_config:
        check_file(path / "config.json")
    try:
        with quiet():
            config: PreTrainedConfig = (
                AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
                if file is None
                else gguf.load_config(source, file)
            )
    except OutriderError:
        raise
    except Exception as error:  # a config may be wrong in more ways than can be listed
        hint = "" if looks_local else " (neither a local folder nor a reachable hub id)"
        raise OutriderError(f"cannot read the config of {source}{hint}: {reason(error)}") from error
    if not trust_remote_code and model_class(config) is None:
        raise OutriderError(f"{source} is a {config.model_type} model, not a causal language model")
    check_sizes(str(source), vars(text_config(config)))
    refuse_encoders(config)
    return config


def check_file(path: Path) -> None:
    """Raises ``OutriderError`` for a config.json that transformers would misread or fail on without saying why."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise OutriderError(f"cannot read the config of {path.parent}: config.json is not JSON: {first_line(error)}") from error
    text = config.get("text_config") if isinstance(config, dict) else None
    for name, part in (("config.json", config), ("text_config", {} if text is None else text)):
        if not isinstance(part, dict):
            raise OutriderError(
                f"cannot read the config of {path.parent}: {name} must be an object, not a {type(part).__name__}"
            )
        check_sizes(str(path.parent), part)


def check_sizes(source: str, config: Mapping[str, Any]) -> None:
    """Raises ``OutriderError`` for sizes in a config that no model has."""
    for name, most in MOST.items():
        value = config.get(name)
        if isinstance(value, (int, float)) and not (isinstance(value, int) and 1 <= value <= most):
            raise OutriderError(f"the config of {source} says {name}={value}: expected a whole number from 1 to {most}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what transformers says of a model: Outrider refuses, in one line, what matters of it."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that loads a model of this config: multimodal models are loaded whole, for their text part."""
    is_multimodal = type(config) in AutoModelForMultimodalLM._model_mapping
    return AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM


def model_class(config: PreTrainedConfig) -> Any:
    """The class of a model of this config; None for code that comes with the model, and for what is no language model."""
    mapping = auto_class(config)._model_mapping
    found = mapping.get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found


def pass_arguments(model: PreTrainedModel, past: Cache, positions: Tensor, by_request: bool = False) -> dict[str, Any]:
    """How the model is told of its cache and of positions [1, T], and that none of its tokens is padding.

    ``by_request``: a model that makes masks of its own, which are right for the one request that it is given.
    """
    names = inspect.signature(type(model).forward).parameters
    if "past_key_values" not in names and "cache_params" in names:  # of recurrent layers alone, to which a mask would apply
        return {"position_ids": positions, "cache_params": past, "use_cache": True}
    if by_request:
        return {"past_key_values": past, "use_cache": True, **({"position_ids": positions} if "position_ids" in names else {})}
    # A 4-D mask is passed on as it is by every model, and Outrider's attention does not look at it.
    mask = positions.new_ones((1, 1, 1, 1), dtype=torch.bool)
    return {"position_ids": positions, "past_key_values": past, "attention_mask": mask, "use_cache": True}


def keeps_logits(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for the logits of some tokens alone."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def reason(error: Exception) -> str:
    """What a loader says, in one line, without the names of Python's exceptions."""
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):  # what checked the field says why
        return first_line(error.__cause__)
    is_key = isinstance(error, KeyError) and " " not in str(error)
    return f"unknown value {error}" if is_key else first_line(error)


def text_config(model_or_config: Any) -> PreTrainedConfig:
    """Return the config of the language model, also inside a multimodal one."""
    config = getattr(model_or_config, "config", model_or_config)
    found: PreTrainedConfig = config.get_text_config(decoder=True)
    return found


def check_weights(model: PreTrainedModel, name: str) -> None:
    """Raise ``OutriderError`` for the first tensor with NaN or infinity."""
    for key, tensor in model.named_parameters():
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
            raise OutriderError(f"{name}: the weights of {key} contain NaN or infinity")


def num_layers(config: PreTrainedConfig) -> int:
    """Decoder layers of a text config; those of an encoder beside it do not count."""
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers, whatever its name. Raises ``OutriderError`` if there is none."""
    found = find_decoder_layers(model)
    if found is None:
        raise OutriderError(f"{type(model).__name__} has no list of {num_layers(text_config(model))} decoder layers")
    return found


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The stack of decoder layers; None where there is none."""
    count = num_layers(text_config(model))
    stacks = [each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    return stacks[0] if stacks else None
