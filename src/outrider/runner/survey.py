"""Determine what a model's layers store per token, and whether Outrider can run them, by one run without weights.

A forward pass on the meta device computes only shapes. It shows in a fraction of a second what configs do not state reliably:
which layers have attention, the number and size of their heads, and which layers share another layer's keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.masking_utils import AttentionMaskInterface

from outrider.errors import first_line
from outrider.runner import attention, recurrence
from outrider.runner.attention import UnsupportedAttention
from outrider.runner.checkpoints.stored import without_quantization
from outrider.runner.kv_cache import INDEXED, CacheShape, LayerShape, PassThrough
from outrider.runner.loading import (
    decoder_of,
    drop_losses,
    find_decoder_layers,
    keeps_logits,
    pass_arguments,
    quiet,
    reason,
    text_config,
)
from outrider.runner.state_cache import StateKey, StateShape, StateShapes, grouped
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

NAME = "outrider-survey"
NUM_TOKENS = 3
WITHOUT_CACHE = ("mlp", "moe")  # layer types that process each token separately
INSTEAD = "run it with transformers' generate, without speculation"


@dataclass
class _Seen:
    """Records the calls of attention and recurrent layers in one forward pass."""

    device: torch.device | str = "cpu"
    layers: dict[int, LayerShape] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    states: dict[StateKey, StateShape] = field(default_factory=dict)

    def state(self, key: StateKey, shape: StateShape) -> tuple[Tensor, int]:
        """Record the shape of a recurrent state; return a temporary store for one request."""
        if key in self.states:
            raise OutriderError("a layer updates the same recurrent state more than once in a pass")
        self.states[key] = shape
        return torch.zeros(1, 1, NUM_TOKENS + shape.taps, *shape.sizes, device=self.device), 0


ONE_REQUEST = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.full((1,), NUM_TOKENS)
_seen: ContextVar[_Seen] = ContextVar("seen")  # by the survey that this thread runs


def survey(model: PreTrainedModel) -> CacheShape:
    """Return the cache shape of a model. Runs it on tokens, on its device, and leaves it with the survey's attention.

    Raises ``OutriderError``, with the reason, for a model that Outrider cannot run. On the meta device it also raises any
    exception of a model whose shapes depend on values.
    """
    own = text_config(model)._attn_implementation
    drop_losses(model)
    try:
        return _survey_attention(model)
    except UnsupportedAttention:
        model.set_attn_implementation(own)
        shape = _survey_stores(model)
        if shape is None:
            raise
        return shape


def _survey_attention(model: PreTrainedModel) -> CacheShape:
    """Survey by the calls of attention."""
    name, seen = type(model).__name__, _Seen(model.device)
    _seen.set(seen)
    _refuse_own_caches(model)
    recurrence.bind(model)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, KeyError) as error:
        raise UnsupportedAttention(_not_attending(name)) from error
    ran: set[int] = set()
    try:
        with torch.inference_mode(), recurrence.active_states(seen.state, ONE_REQUEST), _noting_layers(model, ran):
            model(**_inputs(model, PassThrough()))
    except OutriderError as error:
        raise type(error)(f"{model.config.model_type}: {error}; {INSTEAD}") from error
    except Exception as error:
        if not seen.layers and not seen.states and not decoder_of(model)._can_set_attn_implementation():
            raise UnsupportedAttention(_not_attending(name)) from error
        if model.device.type == "meta" and "meta" in str(error):  # its shapes depend on values
            raise
        raise OutriderError(f"{name} fails on a short text: {first_line(error)}; {INSTEAD}") from error
    known = {*seen.layers, *seen.shared, *(key.layer for key in seen.states)}
    kinds = getattr(text_config(model), "layer_types", None) or ()
    if not ran <= known | {layer for layer, kind in enumerate(kinds) if kind in WITHOUT_CACHE}:
        raise UnsupportedAttention(_not_attending(name))
    return CacheShape.of(seen.layers, seen.shared, StateShapes(*grouped(seen.states)))


def _refuse_own_caches(model: PreTrainedModel) -> None:
    """Raise ``OutriderError`` for layers whose cache selects the tokens to attend to, or belongs to the architecture."""
    config = text_config(model)
    caches: dict[str, type] = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    for kind in getattr(config, "layer_types", None) or ():
        if kind == "indexed_attention":
            raise OutriderError(f"{config.model_type}: {INDEXED}; {INSTEAD}")
        if kind in caches and caches[kind].__module__ != cache_utils.__name__:
            raise OutriderError(f"{config.model_type}: its layers need their own cache ({kind}); {INSTEAD}")


def _survey_stores(model: PreTrainedModel) -> CacheShape | None:
    """Survey a model with its own attention code by the updates of its cache; None if that is not conclusive."""
    cache, seen, ran = _Noting(), _Seen(model.device), set[int]()
    try:
        with torch.inference_mode(), recurrence.active_states(seen.state, ONE_REQUEST), _noting_layers(model, ran):
            model(**_inputs(model, cache, by_request=True))
    except Exception as error:
        if model.device.type == "meta" and "meta" in str(error):
            raise
        logger.debug("%s does not run one request after another", type(model).__name__, exc_info=True)
        return None
    if seen.states or not cache.layers_seen or not ran <= cache.layers_seen.keys():
        return None
    return replace(CacheShape.of(cache.layers_seen), by_request=True)


class _Noting(PassThrough):
    """Cache that records the shapes that each layer stores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_seen: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.layers_seen:
            raise OutriderError("a layer attends more than once")
        self.layers_seen[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states


def _inputs(model: PreTrainedModel, past: PassThrough, by_request: bool = False) -> dict[str, Any]:
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=model.device)
    inputs = {"input_ids": ids, **pass_arguments(model, past, ids, by_request)}
    return {**inputs, "logits_to_keep": ids[0, :2]} if keeps_logits(model) and not by_request else inputs


@contextmanager
def _noting_layers(model: PreTrainedModel, ran: set[int]) -> Iterator[None]:
    """Add the decoder layers that a forward pass runs to ``ran``."""
    handles = [
        layer.register_forward_pre_hook(lambda *_, index=index: ran.add(index))
        for index, layer in enumerate(find_decoder_layers(model) or ())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without_weights(config: PreTrainedConfig, model_class: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model of this config on the meta device. Raises ``OutriderError`` for an invalid config."""
    config = without_quantization(config)
    try:
        with quiet(), torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # invalid configs raise many kinds of exceptions
        keys = [key for key, value in vars(config).items() if isinstance(error, KeyError) and value == error.args[0]]
        why = f"unknown {keys[0]} {error}" if keys else reason(error)
        raise OutriderError(f"the config of {config.name_or_path or config.model_type} is not valid: {why}") from error
    return model


def survey_without_weights(config: PreTrainedConfig, model_class: Any) -> CacheShape | None:
    """Return the cache shape for a config, before weights are read; None if it must be surveyed on the loaded model.

    Raises ``OutriderError`` for an invalid config, or a model that Outrider cannot run.
    """
    model = without_weights(config, model_class)
    with quiet():
        model.set_experts_implementation("batched_mm")  # shapes independent of the chosen experts
        try:
            return survey(model.eval())
        except OutriderError:
            raise
        except Exception:
            logger.debug("%s does not run without weights", type(model).__name__, exc_info=True)
            return None


def _not_attending(name: str) -> str:
    return (
        f"{name} does not attend by transformers' attention interface in every layer"
        f" (it has its own attention code, or a recurrent state): {INSTEAD}"
    )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """Replacement of attention that records the shapes that a layer stores."""
    seen = _seen.get()
    layer: Any = getattr(module, "layer_idx", None)
    if layer is None:
        raise OutriderError(f"{type(module).__name__} has no layer index")
    if layer in seen.layers or layer in seen.shared:
        raise UnsupportedAttention(
            f"{type(module).__name__} attends more than once in a layer, which Outrider's cache does not support"
        )
    attention.check(module, attention_mask, options)
    source = next((other for other, known in seen.keys.items() if known is key), None)
    if source is not None:
        seen.shared[layer] = source
    else:
        seen.layers[layer], seen.keys[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3]), key
    if query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1] or value.shape[1] != key.shape[1]:
        raise OutriderError(f"{type(module).__name__} has queries {list(query.shape)} that do not fit keys {list(key.shape)}")
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
