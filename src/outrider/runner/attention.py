"""Attention over Outrider's own KV cache, plugged into transformers by its public ``AttentionInterface``: no model code is
forked.

A pass's layout (which cache rows, where it writes, who sees whom) is the runner's to say and no model's: it is set for the
time of the forward call by ``active_pass``, and the attention function of every layer reads it there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outrider.runner import kernels  # noqa: F401 - declares torch.ops.outrider
from outrider.types import OutriderError

NAME = "outrider"


@dataclass(frozen=True)
class PassLayout:
    """Where the T tokens of one pass stand in the cache: those of B requests one behind the other, at most W of each."""

    keys: Tensor  # [L, R, Hkv, S, D]
    values: Tensor  # [L, R, Hkv, S, Dv]
    cache_rows: Tensor  # [B] int64
    bases: Tensor  # [B] int64: slot of the pass's first token; slots before it hold the committed text
    ends: Tensor  # [B] int64: where each request's tokens end among the T
    positions: Tensor  # [1, T] int64
    visible: Tensor  # bool [B, W, M], M >= W: which of the last M slots, a text of W tokens at their end, each token sees
    hidden: Tensor | None = None  # [1, T, H]: what the layer before the first one run gave, where that is not the first
    layers_done: set[int] = field(default_factory=set)  # whose attention has run


_active: PassLayout | None = None


def given_hidden() -> Tensor:
    """The hidden states [1, T, H] with which the pass under way begins, where it does not begin with tokens."""
    if _active is None or _active.hidden is None:
        raise RuntimeError("a pass that begins behind the first layer needs hidden states")
    return _active.hidden


@contextmanager
def active_pass(layout: PassLayout) -> Iterator[None]:
    """Makes ``layout`` the one that attention works on."""
    global _active
    previous, _active = _active, layout
    try:
        yield
    finally:
        _active = previous


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: writes this pass's keys and values, attends to what is visible -> [1, T, H, Dv]."""
    layout = _active
    if layout is None:
        raise RuntimeError("this model was prepared by Outrider's runner: call the runner, not the model")
    _check(module, layout, attention_mask, options)
    stored = (layout.keys.shape[2], layout.keys.shape[4], layout.values.shape[4])
    if (key.shape[1], key.shape[3], value.shape[3]) != stored or value.shape[1] != stored[0]:
        raise OutriderError(f"{type(module).__name__} has other head sizes than its config says: Outrider cannot run it")
    out = torch.ops.outrider.attend(
        query,
        key,
        value,
        layout.keys,
        layout.values,
        module.layer_idx,
        layout.cache_rows,
        layout.bases,
        layout.ends,
        layout.positions,
        layout.visible,
        float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        float(options.get("softcap") or 0.0),
        _window(module, options),
    )
    return out, None


def _check(module: nn.Module, layout: PassLayout, attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    """Raises ``OutriderError`` for what would be computed wrongly without a word."""
    odd = next((name for name in ("s_aux", "position_bias", "sinks") if options.get(name) is not None), None)
    # The mask that Outrider gives is of booleans: another one is the model's.
    if odd is None and attention_mask is not None and attention_mask.dtype != torch.bool:
        odd = "a mask of its own"
    if odd is None and getattr(module, "is_causal", True) is False:
        odd = "to see both ways"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if odd is None and (layer in layout.layers_done or not 0 <= layer < layout.keys.shape[0]):
        odd = "more than one attention a layer"
    if odd is not None:
        raise OutriderError(f"{type(module).__name__} needs {odd} in attention, which Outrider's cache does not support")
    layout.layers_done.add(layer)


def _window(module: Any, options: dict[str, Any]) -> int:
    """The layer's sliding window, 0 for none: said to attention or, by a few models, only to the mask, which is not built."""
    if "sliding_window" in options:
        return int(options["sliding_window"] or 0)
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    by_mask = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    if not by_mask or (kinds and kinds[module.layer_idx] != "sliding_attention"):
        return 0
    return int(getattr(config, "sliding_window", None) or 0)


def _no_mask(*_: Any, **__: Any) -> None:
    """Visibility is the layout's: transformers need build no mask."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
