"""Attention over Outrider's own KV cache, registered with transformers' public ``AttentionInterface``, without forked model
code.

The runner determines a pass's layout (cache rows, write positions, visibility): ``active_pass`` sets it for the forward call,
and the attention function of every layer reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outrider.runner import kernels, recurrence  # noqa: F401 - kernels declares torch.ops.outrider
from outrider.runner.state_cache import StateKey, StateShape, StateShapes
from outrider.types import OutriderError

NAME = "outrider"


@dataclass(frozen=True)
class PassLayout:
    """Layout of the T tokens of one pass in the cache: those of B requests concatenated, at most W each."""

    layer_places: tuple[tuple[int, int] | None, ...]  # by layer: its kind, and its index among the layers of that kind
    states: StateShapes  # of recurrent layers
    positions: Tensor  # [1, T] int64
    cache_rows: Tensor  # [B] int64
    bases: Tensor  # [B] int64: slot of the pass's first token; earlier slots hold committed tokens
    ends: Tensor  # [B] int64: end of each request's tokens among the T
    visible: Tensor  # bool [B, W, M], M >= W: visibility of the last M slots, which end with the pass's W tokens
    stores: tuple[Tensor, ...]  # keys and values, in turn, of each kind of layer: [L, R, Hkv, S, D]; then recurrent states
    hidden: Tensor | None = None  # [1, T, H]: input of the first layer of the pass, if that is not layer 0
    by_request: bool = False  # whether this is one request of a model with its own attention code (see ``CacheShape``)
    layers_done: set[int] = field(default_factory=set)  # layers whose attention has run

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return its tensors, which are the last inputs of a program; ``KVCache.pass_layout`` takes them."""
        return self.positions, self.cache_rows, self.bases, self.ends, self.visible, *self.stores

    def state(self, key: StateKey, shape: StateShape) -> tuple[Tensor, int]:
        """Return the store [L, R, S, ...] of one recurrent state, and its index in that store."""
        kind, index = self.states.places[key]
        return self.stores[len(self.stores) - len(self.states.kinds) + kind], index

    def entries(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Return the stores of keys and values [L, R, Hkv, S, D] of a layer, once per pass, and its index in them."""
        place = self.layer_places[layer] if 0 <= layer < len(self.layer_places) else None
        if place is None or layer in self.layers_done:
            raise OutriderError(f"layer {layer} attends where it did not, or more often, when the model was surveyed")
        self.layers_done.add(layer)
        return self.stores[2 * place[0]], self.stores[2 * place[0] + 1], place[1]

    def requests(self) -> Iterator[tuple[PassLayout, slice]]:
        """Yield each request's own layout and the range of its tokens, for models that read keys and values from the cache."""
        start = 0
        for b, end in enumerate(self.ends.tolist()):
            own, one = slice(start, end), slice(b, b + 1)
            hidden = None if self.hidden is None else self.hidden[:, own]
            inputs = (self.positions[:, own], self.cache_rows[one], self.bases[one], self.ends[one] - start, self.visible[one])
            yield PassLayout(self.layer_places, self.states, *inputs, self.stores, hidden, by_request=True), own
            start = end


# The pass that this thread runs: several ``LLM``s may run in threads of one process.
_active: ContextVar[PassLayout | None] = ContextVar("active", default=None)


def given_hidden() -> Tensor:
    """Return the hidden states [1, T, H] that the running pass begins with, if not with tokens."""
    layout = _active.get()
    if layout is None or layout.hidden is None:
        raise RuntimeError("a pass that begins after the first layer needs hidden states")
    return layout.hidden


def position_offsets() -> Tensor | int:
    """Return [T]: position minus index of each token of the active pass; 0 outside of passes.

    A pass of one request has a single number.
    """
    layout = _active.get()
    if layout is None or layout.by_request:
        return num_earlier()
    positions = layout.positions[0]
    return positions - torch.arange(positions.shape[0], device=positions.device)


def num_earlier() -> int:
    """Return how many cached tokens' keys and values a model's own attention code receives: 0 if Outrider's attention runs."""
    layout = _active.get()
    return int(layout.bases[0]) if layout is not None and layout.by_request else 0


def update_cache(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Store new keys and values for a model's own attention code; return all of the request, [1, Hkv, S, D].

    In other passes return the new ones unchanged: Outrider's attention writes and reads the cache itself.
    """
    layout = _active.get()
    if layout is None or not layout.by_request:
        return key, value
    keys, values, index = layout.entries(layer)
    row, base = int(layout.cache_rows[0]), int(layout.bases[0])
    found = []
    for store, new in ((keys, key), (values, value)):
        slots = store[index, row]
        slots[:, base : base + new.shape[2]] = new[0]
        found.append(slots[None, :, : base + new.shape[2]].to(new.dtype))
    return found[0], found[1]


def rows_of_tokens() -> Tensor | None:
    """Return the cache row of each token of the active pass, int64 [T]; None outside of passes."""
    layout = _active.get()
    if layout is None:
        return None
    index = torch.arange(layout.positions.shape[1], device=layout.positions.device)
    return layout.cache_rows[torch.searchsorted(layout.ends, index, right=True)]


@contextmanager
def active_pass(layout: PassLayout) -> Iterator[None]:
    """Make ``layout`` the active one for attention and recurrent layers."""
    token = _active.set(layout)
    try:
        with recurrence.active_states(layout.state, (layout.cache_rows, layout.bases, layout.ends)):
            yield
    finally:
        _active.reset(token)


class UnsupportedAttention(OutriderError):
    """The model's attention cannot be replaced by Outrider's function."""


class AttentionRange(NamedTuple):
    """Which earlier tokens a token of this layer attends to: all of them if both fields are 0."""

    window: int = 0  # size of a sliding window in positions, the token's own included
    chunk: int = 0  # size of chunks in positions; a token attends within its chunk


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: write this pass's keys and values and attend to visible slots -> [1, T, H, Dv]."""
    layout = _active.get()
    if layout is None:
        raise RuntimeError("this model was prepared by Outrider's runner: call the runner, not the model")
    check(module, attention_mask, options)
    keys, values, index = layout.entries(int(module.layer_idx))  # type: ignore[arg-type]
    limits = range_of(module, options)
    out = torch.ops.outrider.attend(
        query,
        key,
        value,
        keys,
        values,
        index,
        layout.cache_rows,
        layout.bases,
        layout.ends,
        layout.positions,
        layout.visible,
        float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        float(options.get("softcap") or 0.0),
        limits.window,
        limits.chunk,
        options.get("s_aux"),  # attention sinks
    )
    return out, None


def check(module: nn.Module, attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    """Raise ``OutriderError`` for unsupported attention; ``UnsupportedAttention`` if the model's own code can run it."""
    kind = type(module).__name__
    if getattr(module, "is_causal", True) is False:
        raise OutriderError(f"{kind} needs bidirectional attention, which Outrider's cache does not support")
    odd = next((name for name in ("position_bias", "sinks") if options.get(name) is not None), None)
    # Outrider passes a boolean mask of one element; any other one is the model's own.
    is_ours = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.numel() == 1)
    if odd is None and not is_ours:
        odd = "its own mask"
    if odd is not None:
        raise UnsupportedAttention(f"{kind} needs {odd} in attention, which Outrider's cache does not support")


def range_of(module: Any, options: dict[str, Any]) -> AttentionRange:
    """Return the layer's window or chunk. Some models pass it only to the mask, which Outrider does not build."""
    if "sliding_window" in options:
        return AttentionRange(window=int(options["sliding_window"] or 0))
    config, code = getattr(module, "config", None), sys.modules[type(module).__module__]
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else "sliding_attention"
    if kind == "sliding_attention" and hasattr(code, "create_sliding_window_causal_mask"):
        return AttentionRange(window=int(getattr(config, "sliding_window", None) or 0))
    if kind == "chunked_attention" and hasattr(code, "create_chunked_causal_mask"):
        return AttentionRange(chunk=int(getattr(config, "attention_chunk_size", None) or 0))
    return AttentionRange()


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # visibility comes from the layout
