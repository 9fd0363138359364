"""Determine what a model's layers store per token, and whether Outrider can run them, by one run without weights.

A forward pass on the meta device computes only shapes. It shows in a fraction of a second what configs do not state reliably:
which layers have attention, the number and size of their heads, and which layers share another layer's keys and values.
"""

from __future__ import annotations

import logging
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
class _Recorder:
    """Records the calls of attention and recurrent layers in one forward pass."""

    device: torch.device | str = "cpu"
    layers: dict[int, LayerShape] = field(default_factory=dict)  # that store keys and values of their own
    shared: dict[int, int] = field(default_factory=dict)  # layers that attend to another layer's keys, and that layer
    keys: dict[int, Tensor] = field(default_factory=dict)  # of each of ``layers``, by which a sharing layer is recognised
    states: dict[StateKey, StateShape] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)  # decoder layers that ran

    def state(self, key: StateKey, shape: StateShape) -> tuple[Tensor, int]:
        """Record the shape of a recurrent state; return a temporary store for one request."""
        if key in self.states:
            raise OutriderError("a layer updates the same recurrent state more than once in a pass")
        self.states[key] = shape
        return torch.zeros(1, 1, NUM_TOKENS + shape.taps, *shape.sizes, device=self.device), 0


ONE_REQUEST = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.full((1,), NUM_TOKENS)
_recorder: ContextVar[_Recorder] = ContextVar("recorder")  # of the survey that this thread runs


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
        shape = _survey_own_attention(model)
        if shape is None:
            raise
        return shape


def _survey_attention(model: PreTrainedModel) -> CacheShape:
    """Survey by the calls of attention."""
    name, recorder = type(model).__name__, _Recorder(model.device)
    _recorder.set(recorder)
    _refuse_own_caches(model)
    recurrence.bind(model)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, KeyError) as error:
        raise UnsupportedAttention(_own_attention_problem(name)) from error
    try:
        _run(model, recorder, PassThrough())
    except OutriderError as error:
        raise type(error)(f"{model.config.model_type}: {error}; {INSTEAD}") from error
    except Exception as error:
        if not recorder.layers and not recorder.states and not decoder_of(model)._can_set_attn_implementation():
            raise UnsupportedAttention(_own_attention_problem(name)) from error
        if model.device.type == "meta" and "meta" in str(error):  # its shapes depend on values
            raise
        raise OutriderError(f"{name} fails on a short text: {first_line(error)}; {INSTEAD}") from error
    known = {*recorder.layers, *recorder.shared, *(key.layer for key in recorder.states)}
    kinds = getattr(text_config(model), "layer_types", None) or ()
    if not recorder.ran <= known | {layer for layer, kind in enumerate(kinds) if kind in WITHOUT_CACHE}:
        raise UnsupportedAttention(_own_attention_problem(name))
    return CacheShape.of(recorder.layers, recorder.shared, StateShapes(*grouped(recorder.states)))


def _refuse_own_caches(model: PreTrainedModel) -> None:
    """Raise ``OutriderError`` for layers whose cache selects the tokens to attend to, or belongs to the architecture."""
    config = text_config(model)
    caches: dict[str, type] = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    for kind in getattr(config, "layer_types", None) or ():
        if kind == "indexed_attention":
            raise OutriderError(f"{config.model_type}: {INDEXED}; {INSTEAD}")
        if kind in caches and caches[kind].__module__ != cache_utils.__name__:
            raise OutriderError(f"{config.model_type}: its layers need their own cache ({kind}); {INSTEAD}")


def _survey_own_attention(model: PreTrainedModel) -> CacheShape | None:
    """Survey a model with its own attention code by the updates of its cache; None if that is not conclusive."""
    cache, recorder = _RecordingCache(), _Recorder(model.device)
    try:
        _run(model, recorder, cache, by_request=True)
    except Exception as error:
        if model.device.type == "meta" and "meta" in str(error):
            raise
        logger.debug("%s does not run one request after another", type(model).__name__, exc_info=True)
        return None
    if recorder.states or not cache.shapes or not recorder.ran <= cache.shapes.keys():
        return None
    return replace(CacheShape.of(cache.shapes), by_request=True)


class _RecordingCache(PassThrough):
    """Cache that records the shapes that each layer stores."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.shapes:
            raise OutriderError("a layer attends more than once")
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states


def _run(model: PreTrainedModel, recorder: _Recorder, past: PassThrough, by_request: bool = False) -> None:
    """Run a model on a few tokens, with its recurrent states and the layers that run recorded."""
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=model.device)
    inputs: dict[str, Any] = {"input_ids": ids, **pass_arguments(model, past, ids, by_request)}
    if keeps_logits(model) and not by_request:
        inputs["logits_to_keep"] = ids[0, :2]
    handles = [
        layer.register_forward_pre_hook(lambda *_, index=index: recorder.ran.add(index))
        for index, layer in enumerate(find_decoder_layers(model) or ())
    ]
    try:
        with torch.inference_mode(), recurrence.active_states(recorder.state, ONE_REQUEST):
            model(**inputs)
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


def _own_attention_problem(name: str) -> str:
    return (
        f"{name} does not attend by transformers' attention interface in every layer"
        f" (it has its own attention code, or a recurrent state): {INSTEAD}"
    )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """Replacement of attention that records the shapes that a layer stores."""
    recorder = _recorder.get()
    layer: Any = getattr(module, "layer_idx", None)
    if layer is None:
        raise OutriderError(f"{type(module).__name__} has no layer index")
    if layer in recorder.layers or layer in recorder.shared:
        raise UnsupportedAttention(
            f"{type(module).__name__} attends more than once in a layer, which Outrider's cache does not support"
        )
    attention.check(module, attention_mask, options)
    source = next((other for other, known in recorder.keys.items() if known is key), None)
    if source is not None:
        recorder.shared[layer] = source
    else:
        recorder.layers[layer], recorder.keys[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3]), key
    if query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1] or value.shape[1] != key.shape[1]:
        raise OutriderError(f"{type(module).__name__} has queries {list(query.shape)} that do not fit keys {list(key.shape)}")
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
