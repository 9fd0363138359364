"""A part of a model's layers as a model of its own: for passes that stop early, and for those that go on from there.

No model code is touched: in a structural copy, which shares all weights, layers that are not run give on what they are given.
Every other layer keeps its index, so it finds its own slots in the cache, its own rotary table and its own window.
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
    """Layers ``start`` to ``stop``, exclusive. A span that begins behind layer 0 takes hidden states in the place of tokens."""

    start: int = 0
    stop: int | None = None  # None: the last layer is in
    head: bool = True  # whether the final norm and the output head follow, whatever the last layer


WHOLE = LayerSpan()


def behind(depth: int) -> int:
    """The index, as types.Scores counts, of what the first ``depth`` layers give: it is what goes into the next one."""
    return depth


def spanned(model: PreTrainedModel, span: LayerSpan) -> PreTrainedModel:
    """The model with the span's layers only: itself where that is all of them. Shares all memory.

    Raises ``OutriderError`` for a model without a list of decoder layers.
    """
    if span.start == 0 and span.stop is None:
        return model
    own = structural_copy(model)
    layers = decoder_layers(own)
    stop = len(layers) if span.stop is None else span.stop
    for index, layer in enumerate(layers):
        if not span.start <= index < stop:
            layers[index] = _Given(layer) if index == span.start - 1 else _Skipped(layer)
    return own


@cache
def outputs_beside(kind: type[nn.Module]) -> int | None:
    """How many outputs a layer returns in a tuple after the hidden states; None where it returns these alone."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):  # code without a source
        return None
    returned = [node.value for node in ast.walk(code) if isinstance(node, ast.Return)]
    return len(returned[-1].elts) - 1 if returned and isinstance(returned[-1], ast.Tuple) else None


class _Skipped(nn.Module):
    """Replaces a layer by the identity: returns the hidden states that it is given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # plain facts that a model may ask its layers for, as their kind of attention
            if isinstance(value, (str, int, float)) and not name.startswith("_"):
                setattr(self, name, value)
        self._outputs_beside = outputs_beside(type(layer))  # type: ignore[arg-type]  # a class is hashable

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor | None, ...]:
        return self._as_layers_return(hidden_states)

    def _as_layers_return(self, hidden_states: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        return hidden_states if self._outputs_beside is None else (hidden_states, *[None] * self._outputs_beside)


class _Given(_Skipped):
    """Replaces the layer before the first one that runs: returns the hidden states with which the pass begins."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor | None, ...]:
        return self._as_layers_return(given_hidden())
