"""A range of a model's layers as a model, for passes that stop early and passes that continue from there.

Model code is unchanged: in a structural copy that shares all weights, skipped layers return their input. Other layers keep
their index, and with it their cache slots, rotary table and window.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.runner.attention import given_hidden
from outrider.runner.linear import structural_copy
from outrider.runner.loading import decoder_layers


class LayerSpan(NamedTuple):
    """Layers ``start`` to ``stop``, exclusive. A span with ``start`` > 0 takes hidden states instead of tokens."""

    start: int = 0
    stop: int | None = None  # None: up to the last layer
    head: bool = True  # whether the final norm and the output head follow


WHOLE = LayerSpan()


def spanned(model: PreTrainedModel, span: LayerSpan) -> PreTrainedModel:
    """Return the model with the span's layers only, sharing all memory; itself if the span is complete.

    Raises ``OutriderError`` for a model without a list of decoder layers.
    """
    if span.start == 0 and span.stop is None:
        return model
    own = structural_copy(model)
    layers = decoder_layers(own)
    stop = len(layers) if span.stop is None else span.stop
    for index, layer in enumerate(layers):
        if not span.start <= index < stop:
            layers[index] = _Skipped(layer, is_given=index == span.start - 1)
    return own


@cache
def num_extra_outputs(kind: type[nn.Module]) -> int | None:
    """Return the number of outputs in a layer's tuple after the hidden states; None if it returns only the hidden states."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):  # code without a source
        return None
    returned = [node.value for node in ast.walk(code) if isinstance(node, ast.Return)]
    return len(returned[-1].elts) - 1 if returned and isinstance(returned[-1], ast.Tuple) else None


class _Skipped(nn.Module):
    """Identity layer: returns its input; before the span's first layer (``is_given``) the hidden states of the pass's input."""

    def __init__(self, layer: nn.Module, is_given: bool) -> None:
        super().__init__()
        self._is_given = is_given
        for name, value in vars(layer).items():  # plain attributes that models read from layers, such as the attention type
            if isinstance(value, (str, int, float)) and not name.startswith("_"):
                setattr(self, name, value)
        self._num_extra = num_extra_outputs(type(layer))  # type: ignore[arg-type]  # a class is hashable

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor | None, ...]:
        out = given_hidden() if self._is_given else hidden_states
        return out if self._num_extra is None else (out, *[None] * self._num_extra)
