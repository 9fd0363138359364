"""Finding and loading a causal language model: a local folder, a hub id, or an object the user already has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.runner import attention
from outrider.types import OutriderError, first_line

# Sizes in a config, and the largest that is not a mistake: a model of 10^20 layers is made until the memory ends.
MOST = dict.fromkeys(
    (
        *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    ),
    2**31 - 1,
) | {"num_hidden_layers": 10_000}


def load_model(
    source: str | Path, dtype: torch.dtype | str, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM with Outrider's attention, in eval mode.

    Raises ``OutriderError``, in one line: no such folder or hub id, not a causal LM, broken files, an unsupported architecture.
    """
    config = load_config(source, trust_remote_code)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, where it can be said which
        )
        model, info = loaded
    except Exception as error:  # broken files fail in more ways than can be listed
        raise OutriderError(f"cannot load {source}: {_reason(error)}") from error
    for name, there, expected in sorted(info["mismatched_keys"]):
        sizes = f"{list(there)} in the weights and {list(expected)} by config.json"
        raise OutriderError(f"cannot load {source}: {name} is {sizes}")
    _check_layers(source, text_config(config), info["unexpected_keys"])
    missing = sorted(info["missing_keys"])  # transformers would fill them with random numbers
    if missing:
        raise OutriderError(f"{source} lacks weights of the model: {len(missing)} tensors, the first {missing[0]}")
    if device.type != "cpu":
        model.to(device)
    return adopt(model)


def _check_layers(source: str | Path, config: PreTrainedConfig, unused: Iterable[str]) -> None:
    """Refuses weights of more layers than the config counts: without them the model says other things."""
    found = [int(match[1]) + 1 for match in (re.search(r"\.(?:layers|h)\.(\d+)\.", key) for key in unused) if match]
    counted = config.num_hidden_layers + (getattr(config, "num_nextn_predict_layers", None) or 0)  # those for drafting
    if found and max(found) > counted:
        written = f"config.json counts {config.num_hidden_layers} layers, the weights hold {max(found)}"
        raise OutriderError(f"cannot load {source}: {written}")


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Puts a loaded model on Outrider's attention, in place. Raises ``OutriderError`` where the architecture does not allow
    it.
    """
    refuse_encoders(model.config)
    refuse_own_attention(type(model))
    if model.get_output_embeddings() is None:
        raise OutriderError(f"{type(model).__name__} has no language-model head: load it with AutoModelForCausalLM")
    try:
        model.set_attn_implementation(attention.NAME)
    except (ValueError, KeyError) as error:
        raise OutriderError(
            f"{type(model).__name__} does not use transformers' attention interface: {first_line(error)}"
        ) from error
    if text_config(model)._attn_implementation != attention.NAME:
        raise OutriderError(f"{type(model).__name__} does not let its attention be set: Outrider cannot run it")
    model.eval().requires_grad_(False)
    return model


def refuse_encoders(config: PreTrainedConfig) -> None:
    """Raises ``OutriderError`` for models that read both ways, which transformers also files under causal language models."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise OutriderError(f"{kind} is an encoder-decoder model: Outrider runs decoder-only language models")
    if getattr(config, "is_decoder", True) is False and not kind.startswith("gpt_neox"):  # whose flag means nothing
        raise OutriderError(f"{kind} with is_decoder=False reads both ways: Outrider runs decoder-only language models")


def refuse_own_attention(model_class: Any) -> None:
    """Raises ``OutriderError`` where attention is not a function that can be exchanged."""
    if not model_class._can_set_attn_implementation():
        raise OutriderError(f"{model_class.__name__} does not use transformers' attention interface: Outrider cannot run it")


def load_config(source: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config. Raises ``OutriderError`` when there is none or it is not a causal LM's."""
    path = Path(source)
    looks_local = path.exists() or str(source).startswith((".", "/", "~"))
    if looks_local and not path.is_dir():
        raise OutriderError(f"no model folder at {source}")
    if looks_local and not (path / "config.json").exists():
        raise OutriderError(f"{source} holds no config.json: not a Hugging Face model folder")
    if looks_local:
        _check_written(path / "config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # wrong values fail in more ways than can be listed
        hint = "" if looks_local else " (neither a local folder nor a hub id that can be reached)"
        raise OutriderError(f"cannot read the config of {source}{hint}: {_reason(error)}") from error
    if not trust_remote_code and type(config) not in AutoModelForCausalLM._model_mapping:
        raise OutriderError(f"{source} is a {config.model_type} model, not a causal language model")
    refuse_encoders(config)
    if type(config) in AutoModelForCausalLM._model_mapping:
        refuse_own_attention(AutoModelForCausalLM._model_mapping[type(config)])
    return config


def _check_written(file: Path) -> None:
    """Refuses what transformers stumbles over without saying where: no object, and counts that no model has."""
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutriderError(f"cannot read the config {file}: {first_line(error)}") from error
    if not isinstance(written, dict):
        raise OutriderError(f"{file} must hold an object, not a {type(written).__name__}")
    text = {} if written.get("text_config") is None else written["text_config"]
    if not isinstance(text, dict):
        raise OutriderError(f"{file}: text_config must be an object, not a {type(text).__name__}")
    check_sizes(written, str(file))
    check_sizes(text, str(file))


def check_sizes(config: Mapping[str, Any], source: str) -> None:
    """Raises ``OutriderError`` for a size of no or negative length in a config, or one beyond any model's."""
    for name, most in MOST.items():
        value = config.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise OutriderError(f"{source}: {name} is {value}, expected 1 to {most}")


def _reason(error: Exception) -> str:
    """What a loader says, in one line, without the names of Python's exceptions."""
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):  # what checked the field says why
        return first_line(error.__cause__)
    is_key = isinstance(error, KeyError) and " " not in str(error)
    return f"unknown value {error}" if is_key else first_line(error)


def text_config(model_or_config: Any) -> PreTrainedConfig:
    """The config of the language model proper, also inside a multimodal one."""
    config = getattr(model_or_config, "config", model_or_config)
    found: PreTrainedConfig = config.get_text_config(decoder=True)
    return found


def settle_rope(model: PreTrainedModel, max_len: int, is_asked: bool) -> int:
    """Fixes rotary frequencies that would change with the longest text of a pass (longrope); the context window that remains.

    transformers switches a whole batch to the long-text frequencies when one text outgrows the original window, and keys cached
    before keep the others. Here they are the short ones, up to the original window, unless a longer one was asked for.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        if getattr(module, "rope_type", None) != "longrope":
            continue
        original = int(module.config.rope_parameters["original_max_position_embeddings"])
        if max_len > original and is_asked:
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=original + 1)
            module.inv_freq = frequencies
        else:
            max_len = min(max_len, original)
        module.rope_type = "default"  # from here on nothing is recomputed
    return max_len


def check_weights(model: PreTrainedModel, name: str) -> None:
    """Raises ``OutriderError`` naming the first tensor that holds NaN or infinity."""
    for key, tensor in model.named_parameters():
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
            raise OutriderError(f"{name}: the weights of {key} hold NaN or infinity")


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The stack of decoder layers, whatever the architecture calls it. Raises ``OutriderError`` where there is none."""
    count = text_config(model).num_hidden_layers
    for _, module in model.base_model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise OutriderError(f"{type(model).__name__} has no list of {count} decoder layers")
