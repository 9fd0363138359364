"""What a model does to the numbers of its output head before they are its logits: caps them (Gemma 2), scales them (Cohere,
Granite). A head that guesses through the target's output head must do the same.

The code that does it is transformers': it runs in a copy of the model of which nothing but its last lines is left.
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

Finish = Callable[[Tensor], Tensor]  # [..., V] -> [..., V]


class InPlaceOf(nn.Module):
    """Stands where a module stood, and answers what is asked of it (a kind of attention, a factor) as that one would."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = [original]  # in a list: its weights are not this one's

    @property
    def original(self) -> nn.Module:
        return self._original[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.original, name)


class _Body(InPlaceOf):
    """Hands on the hidden states that it is given as the last ones."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _LastHidden:
        return _LastHidden((inputs_embeds,))


class _OutputHead(InPlaceOf):
    """Leaves what it is given as it is."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class _LastHidden(tuple[Tensor]):
    """What the body of any architecture returns; of all that some have beside the hidden states, nothing."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


def finish_of(model: PreTrainedModel) -> Finish | None:
    """From the numbers of the model's output head to its logits, element by element; None where these are the same."""
    own: Any = copy.copy(model)  # its own list of modules, the same weights
    own._modules = dict(model._modules)
    body, output = model.base_model, model.get_output_embeddings()
    if body is model or output is None:
        return None
    setattr(own, model.base_model_prefix, _Body(body))
    own.set_output_embeddings(_OutputHead(output))

    def finish(numbers: Tensor) -> Tensor:
        flat = numbers.reshape(1, -1, numbers.shape[-1])  # [1, T, V], as a model gives them
        logits: Tensor = own(inputs_embeds=flat, use_cache=False).logits
        return logits.reshape(numbers.shape)

    probe = torch.linspace(-60, 60, 61, device=model.device)
    try:
        return None if torch.equal(finish(probe), probe) else finish
    except Exception:  # a model's own code, called in a way that it does not know
        logger.debug("what %s does to its logits cannot be told", type(model).__name__, exc_info=True)
        return None
