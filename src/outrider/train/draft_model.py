"""Draft model for a target: config derived from the target's, weights initialised from the target."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.errors import errors_as
from outrider.runner.loading import decoder_layers, load_config, text_config
from outrider.train.options import DraftShape
from outrider.train.shrink import can_shrink, shrink
from outrider.types import OutriderError

LAYERS_SHARE, FEW = 8, 2  # an eighth of the target's layers, at least two: one layer cannot form induction heads
PER_LAYER = ("intermediate_size", "activation_sparsity_pattern")  # entries of Gemma 3n's config, each a list
NEURONS = 32  # the feed-forward width is a multiple


def chosen_layers(shape: DraftShape, total: int, types: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the target layers that initialise the draft, by default with one of full attention if the target has any.

    ``types``: the kind of each layer's attention. Raises ``OutriderError`` for invalid layers.
    """
    if total < 2:
        raise OutriderError("the target has one layer: a draft needs fewer layers than its target")
    count = shape.layers or len(shape.from_layers or ()) or max(min(FEW, total - 1), total // LAYERS_SHARE)
    if not 1 <= count < total:
        raise OutriderError(f"invalid number of layers {count} for a target with {total}: expected 1 to {total - 1}")
    layers = shape.from_layers or tuple(index * total // count for index in range(count))
    if len(layers) != count or not all(0 <= index < total for index in layers):
        raise OutriderError(
            f"invalid layers {layers}: a draft with {count} layers needs {count} of the target's layers 0 to {total - 1}"
        )
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if shape.from_layers is None and full and not set(full) & set(layers):
        layers = tuple(sorted({*layers[:-1], min(full, key=lambda index: abs(index - layers[-1]))}))
    return layers


def draft_config(target: PreTrainedConfig, layers: Sequence[int], width: int) -> PreTrainedConfig:
    """Return the target's config with these layers and a narrower or equal width; attention heads keep their size.

    Raises ``OutriderError`` for layers without keys and values of their own.
    """
    config: Any = copy.deepcopy(target)
    for name, value in target.to_dict().items():
        is_per_layer = "layer" in name or name in PER_LAYER
        if is_per_layer and isinstance(value, (list, tuple)) and len(value) == target.num_hidden_layers:
            setattr(config, name, [value[index] for index in layers])  # per-layer settings, such as the attention type
    config.num_hidden_layers = len(layers)
    _keep_experts(config, target, layers)
    _keep_keys(config, target, layers)
    if width == target.hidden_size:
        return config
    heads = int(target.num_attention_heads)
    size = int(getattr(target, "head_dim", None) or target.hidden_size // heads)
    config.hidden_size, config.head_dim = width, size
    config.num_attention_heads = max(1, heads * width // target.hidden_size)
    groups = max(1, int(target.num_key_value_heads) * config.num_attention_heads // heads)
    while config.num_attention_heads % groups:
        groups -= 1
    config.num_key_value_heads = groups
    scaled = target.intermediate_size * width / target.hidden_size
    config.intermediate_size = min(target.intermediate_size, max(1, round(scaled / NEURONS)) * NEURONS)
    return config


def _keep_experts(config: Any, target: Any, layers: Sequence[int]) -> None:
    """Set the entries that say which layers have experts, DeepSeek's and Qwen's, for the chosen layers of the target."""
    first, step = (getattr(target, name, None) for name in ("first_k_dense_replace", "decoder_sparse_step"))
    if first:
        config.first_k_dense_replace = sum(index < first for index in layers)
    if step:  # experts in every n-th layer, except the named ones
        named = target.mlp_only_layers
        config.mlp_only_layers = [new for new, index in enumerate(layers) if index in named or (index + 1) % step]
        config.decoder_sparse_step = 1


def _keep_keys(config: Any, target: Any, layers: Sequence[int]) -> None:
    """Give each layer keys and values of its own. Raises ``OutriderError`` for layers that use an earlier layer's (Gemma)."""
    owners = target.num_hidden_layers - (getattr(target, "num_kv_shared_layers", None) or 0)
    if max(layers) >= owners:
        advice = f"give --from-layers with layers 0 to {owners - 1}"
        raise OutriderError(f"layer {max(layers)} of the target uses the keys and values of an earlier layer: {advice}")
    if owners < target.num_hidden_layers:
        config.num_kv_shared_layers = 0


def check_new_draft(source: str, shape: DraftShape) -> None:
    """Raise ``OutriderError`` if a target has no draft of this shape. Reads the target's config only."""
    config = text_config(load_config(source))
    layers, _ = _layers_and_width(config, shape)
    with torch.device("meta"):
        _built(draft_config(config, layers, int(config.hidden_size)))


def _layers_and_width(config: PreTrainedConfig, shape: DraftShape) -> tuple[tuple[int, ...], int]:
    """Return the target's layers that initialise a draft, and its width. Raises ``OutriderError`` for an invalid size."""
    layers = chosen_layers(shape, config.num_hidden_layers, getattr(config, "layer_types", None) or ())
    width = shape.width or int(config.hidden_size)
    if not 1 <= width <= config.hidden_size:
        raise OutriderError(
            f"invalid width {width} for a target of width {config.hidden_size}: expected 1 to {config.hidden_size}"
        )
    return layers, width


def _built(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with random weights. Raises ``OutriderError`` for a config that is not a language model's."""
    with errors_as("unsupported target for a new draft", Exception):  # configs and models raise anything
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def new_draft(target: PreTrainedModel, shape: DraftShape) -> tuple[PreTrainedModel, str]:
    """Return a draft in float32 and a description of its initialisation. Raises ``OutriderError`` for an invalid size."""
    config = text_config(target)
    layers, width = _layers_and_width(config, shape)
    names = ", ".join(map(str, layers))
    if width < config.hidden_size and not can_shrink(target):
        kind = type(target).__name__
        raise OutriderError(f"unsupported layers for a narrower draft: {kind}; leave the width at {config.hidden_size}")
    planned = draft_config(config, layers, width)
    # A multimodal config says it outside its text config.
    planned.tie_word_embeddings = target.get_output_embeddings().weight is target.get_input_embeddings().weight
    draft: Any = _built(planned)
    draft.to(target.device)
    if width == config.hidden_size:
        copy_layers(target, draft, layers)
        return draft, f"initialised from layers {names} of the target with its embeddings, norm and head"
    shrink(target, draft, layers)
    how = f"projected to the {width} principal directions of its embeddings: the first heads, the strongest neurons"
    return draft, f"initialised from layers {names} of the target, {how}"


@torch.no_grad()
def copy_layers(target: PreTrainedModel, draft: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copy target layer ``layers[i]`` to draft layer i, and everything outside the layers.

    Raises ``OutriderError`` if the draft has layers of other kinds than those, or other weights that the target lacks.
    """
    for place, (small, index) in enumerate(zip(decoder_layers(draft), layers, strict=True)):
        weights = decoder_layers(target)[index].state_dict()
        if _shapes(weights) != _shapes(small.state_dict()):
            raise OutriderError(
                f"layer {index} of the target has another kind than layer {place} of a draft: give --from-layers"
            )
        small.load_state_dict(weights)
    total = len(decoder_layers(target))
    of_target, copied = _by_part(target), {id(weight) for weight in decoder_layers(draft).parameters()}
    for name, tensor in _by_part(draft).items():
        source = _for_layers(of_target[name], tensor.shape, layers, total) if name in of_target else None
        if source is not None:
            tensor.copy_(source)
            copied.add(id(tensor))
    for name, weight in draft.named_parameters():
        if id(weight) not in copied:
            raise OutriderError(f"unsupported target for a new draft: {type(target).__name__} has no {name} of this shape")


def _for_layers(tensor: Tensor, shape: torch.Size, layers: Sequence[int], total: int) -> Tensor | None:
    """Return a tensor of a target with ``total`` layers in this shape, by the layers' parts if there is one per layer (Gemma).

    None if it has neither shape.
    """
    for dim, size in enumerate(tensor.shape):
        if tensor.shape != shape and size % total == 0:
            some = tensor.unflatten(dim, (total, -1)).index_select(dim, torch.tensor(layers, device=tensor.device))
            found: Tensor = some.flatten(dim, dim + 1)
            if found.shape == shape:
                return found
    return tensor if tensor.shape == shape else None


def _by_part(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors outside the layers, by names that are the same in a multimodal model and its language model."""
    parts: dict[str, Any] = {"": model, "decoder ": model.get_decoder(), "head ": model.get_output_embeddings()}
    layers = {id(tensor) for tensor in decoder_layers(model).state_dict(keep_vars=True).values()}
    named = ((part + name, each) for part, module in parts.items() for name, each in module.state_dict(keep_vars=True).items())
    return {name: tensor for name, tensor in named if id(tensor) not in layers}


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}
