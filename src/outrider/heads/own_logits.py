"""Logit post-processing of a model after its output head: capping (Gemma 2), scaling (Cohere, Granite). A head that uses
the target's output head must apply it too.

transformers' own code is used, in a copy of the model without its layers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Postprocess = Callable[[Tensor], Tensor]  # [..., V] -> [..., V]


class InPlaceOf(nn.Module):
    """Replaces a module and delegates attribute access to the original."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = [original]  # in a list, so that its weights are not registered

    @property
    def original(self) -> nn.Module:
        return self._original[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.original, name)


class _Body(InPlaceOf):
    """Body without layers: returns its inputs as the last hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _LastHidden:
        return _LastHidden((inputs_embeds,))


class _OutputHead(InPlaceOf):
    """Identity layer: returns its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class _LastHidden(tuple[Tensor]):
    """Minimal model output with hidden states only."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


def postprocess_of(model: PreTrainedModel) -> Postprocess | None:
    """Return the element-wise function from output-head values to logits; None if it is the identity."""
    own: Any = copy.copy(model)  # shallow copy: own module list, shared weights
    own._modules = dict(model._modules)
    body, output = model.base_model, model.get_output_embeddings()
    if body is model or output is None:
        return None
    setattr(own, model.base_model_prefix, _Body(body))
    own.set_output_embeddings(_OutputHead(output))

    def postprocess(values: Tensor) -> Tensor:
        flat = values.reshape(1, -1, values.shape[-1])  # [1, T, V], as models return logits
        logits: Tensor = own(inputs_embeds=flat, use_cache=False).logits
        return logits.reshape(values.shape)

    probe = torch.linspace(-60, 60, 61, device=model.device)
    try:
        return None if torch.equal(postprocess(probe), probe) else postprocess
    except Exception:  # model code can fail in this reduced form
        logger.debug("cannot determine the logit post-processing of %s", type(model).__name__, exc_info=True)
        return None
