"""Draft model for a target: config derived from the target's, weights initialised from the target."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.runner.loading import decoder_layers, text_config
from outrider.train.options import DraftShape
from outrider.train.shrink import can_shrink, shrink
from outrider.types import OutriderError

LAYERS_SHARE, FEW = 8, 2  # an eighth of the target's layers, at least two: one layer cannot form induction heads
NEURONS = 32  # the feed-forward width is a multiple


def chosen_layers(shape: DraftShape, total: int) -> tuple[int, ...]:
    """Return the target layers that initialise the draft. Raises ``OutriderError`` for invalid layers."""
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
    return layers


def draft_config(target: PreTrainedConfig, layers: Sequence[int], width: int) -> PreTrainedConfig:
    """Return the target's config with these layers and a narrower or equal width; attention heads keep their size."""
    config: Any = copy.deepcopy(target)
    for name, value in target.to_dict().items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == target.num_hidden_layers:
            setattr(config, name, [value[index] for index in layers])  # per-layer settings, such as the attention type
    config.num_hidden_layers = len(layers)
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


def new_draft(target: PreTrainedModel, shape: DraftShape) -> tuple[PreTrainedModel, str]:
    """Return a draft in float32 and a description of its initialisation. Raises ``OutriderError`` for an invalid size."""
    config = text_config(target)
    layers, width = chosen_layers(shape, config.num_hidden_layers), shape.width or int(config.hidden_size)
    names = ", ".join(map(str, layers))
    if not 1 <= width <= config.hidden_size:
        raise OutriderError(
            f"invalid width {width} for a target of width {config.hidden_size}: expected 1 to {config.hidden_size}"
        )
    if width < config.hidden_size and not can_shrink(target):
        kind = type(target).__name__
        raise OutriderError(f"unsupported layers for a narrower draft: {kind}; leave the width at {config.hidden_size}")
    draft = AutoModelForCausalLM.from_config(
        draft_config(config, layers, width), dtype=torch.float32, attn_implementation="sdpa"
    )
    draft.to(target.device)
    if width == config.hidden_size:
        copy_layers(target, draft, layers)
        return draft, f"initialised from layers {names} of the target with its embeddings, norm and head"
    shrink(target, draft, layers)
    how = f"projected to the {width} principal directions of its embeddings: the first heads, the strongest neurons"
    return draft, f"initialised from layers {names} of the target, {how}"


@torch.no_grad()
def copy_layers(target: PreTrainedModel, draft: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copy target layer ``layers[i]`` to draft layer i, and everything outside the layers."""
    for small, index in zip(decoder_layers(draft), layers, strict=True):
        small.load_state_dict(decoder_layers(target)[index].state_dict())
    of_target = target.state_dict(keep_vars=True)
    own = {id(tensor) for tensor in decoder_layers(draft).state_dict(keep_vars=True).values()}
    for name, tensor in draft.state_dict(keep_vars=True).items():
        if id(tensor) not in own and name in of_target and of_target[name].shape == tensor.shape:
            tensor.copy_(of_target[name])
