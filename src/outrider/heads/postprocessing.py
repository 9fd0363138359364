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


def with_forward(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a module with another ``forward`` and the same weights and attributes, which model code may read."""
    own = copy.copy(module)
    own.forward = forward
    return own


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
    setattr(own, model.base_model_prefix, with_forward(body, lambda *_, inputs_embeds, **__: _LastHidden((inputs_embeds,))))
    own.set_output_embeddings(with_forward(output, lambda hidden: hidden))

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
