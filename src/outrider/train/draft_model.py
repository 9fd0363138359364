"""Draft model for a target: config derived from the target's, weights initialised from the target."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.runner.loading import decoder_layers, text_config
from outrider.train.options import DraftShape
from outrider.train.shrink import can_shrink, shrink
from outrider.types import OutriderError

LAYERS_SHARE, FEW = 8, 2  # an eighth of the target's layers, at least two: one layer cannot form induction heads
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
    """Return the target's config with these layers and a narrower or equal width; attention heads keep their size."""
    config: Any = copy.deepcopy(target)
    for name, value in target.to_dict().items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == target.num_hidden_layers:
            setattr(config, name, [value[index] for index in layers])  # per-layer settings, such as the attention type
    config.num_hidden_layers = len(layers)
    _keep_experts(config, target, layers)
    if width == target.hidden_size:
        return config  # type: ignore[no-any-return]
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
    return config  # type: ignore[no-any-return]


def _keep_experts(config: Any, target: Any, layers: Sequence[int]) -> None:
    """Set the entries that say which layers have experts, DeepSeek's and Qwen's, for the chosen layers of the target."""
    first, step = (getattr(target, name, None) for name in ("first_k_dense_replace", "decoder_sparse_step"))
    if first:
        config.first_k_dense_replace = sum(index < first for index in layers)
    if step:  # experts in every n-th layer, except the named ones
        named = target.mlp_only_layers
        config.mlp_only_layers = [new for new, index in enumerate(layers) if index in named or (index + 1) % step]
        config.decoder_sparse_step = 1


def new_draft(target: PreTrainedModel, shape: DraftShape) -> tuple[PreTrainedModel, str]:
    """Return a draft in float32 and a description of its initialisation. Raises ``OutriderError`` for an invalid size."""
    config = text_config(target)
    layers = chosen_layers(shape, config.num_hidden_layers, getattr(config, "layer_types", None) or ())
    width = shape.width or int(config.hidden_size)
    names = ", ".join(map(str, layers))
    if not 1 <= width <= config.hidden_size:
        raise OutriderError(
            f"invalid width {width} for a target of width {config.hidden_size}: expected 1 to {config.hidden_size}"
        )
    if width < config.hidden_size and not can_shrink(target):
        kind = type(target).__name__
        raise OutriderError(f"unsupported layers for a narrower draft: {kind}; leave the width at {config.hidden_size}")
    draft = AutoModelForCausalLM.from_config(draft_config(config, layers, width), dtype=torch.float32)
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

    Raises ``OutriderError`` if the draft has layers of other kinds than those.
    """
    for place, (small, index) in enumerate(zip(decoder_layers(draft), layers, strict=True)):
        weights = decoder_layers(target)[index].state_dict()
        if _shapes(weights) != _shapes(small.state_dict()):
            raise OutriderError(
                f"layer {index} of the target has another kind than layer {place} of a draft: give --from-layers"
            )
        small.load_state_dict(weights)
    of_target = target.state_dict(keep_vars=True)
    own = {id(tensor) for tensor in decoder_layers(draft).state_dict(keep_vars=True).values()}
    for name, tensor in draft.state_dict(keep_vars=True).items():
        if id(tensor) not in own and name in of_target and of_target[name].shape == tensor.shape:
            tensor.copy_(of_target[name])


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}
