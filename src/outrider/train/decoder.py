"""A causal language model with access to every layer's output and optional layers, with gradients, in transformers' code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from outrider.errors import errors_as
from outrider.heads.postprocessing import with_forward
from outrider.runner.loading import decoder_layers, text_config
from outrider.types import OutriderError

TOLERANCE = 1e-3  # relative to the largest logit, in float32


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: the model is in eval mode and not compiled, because shapes differ from training's."""
    was_training = model.training
    try:
        with torch.compiler.set_stance("force_eager"):
            model.eval()
            yield
    finally:
        model.train(was_training)


class Decoder:
    """The layers of one model, for passes that return every layer's output and select rows per layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raise ``OutriderError`` for a model without a list of decoder layers."""
        self.model = model
        self.layers = decoder_layers(model)

    def hidden_states(self, ids: Tensor, runs: Tensor | None = None) -> list[Tensor]:
        """Return hidden states after each layer, before the final norm: L tensors [B, S, H].

        ``runs``: bool [L, B], rows that each layer runs for; others keep their state. None: all.
        """
        seen: list[Tensor] = []
        own = [_seen(layer, None if runs is None else runs[index], seen) for index, layer in enumerate(self.layers)]
        with self._replaced(own):
            self.model.base_model(input_ids=ids, use_cache=False)
        return seen

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the model's norm and head to any layer's hidden state: [B, S, H] -> [B, S, V]."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with self._replaced([with_forward(layer, lambda *_, **__: hidden) for layer in self.layers]):
            out: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return out

    def token_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of hidden states [B, S, H] against labels [B, S]."""
        return cross_entropy(self.logits(hidden).flatten(0, 1).float(), labels.flatten())

    @torch.no_grad()
    def check(self) -> None:
        """Raise ``OutriderError`` unless the model equals its layers run one by one, and each can be left out per sequence."""
        kind = type(self.model).__name__
        ids = torch.tensor([[11, 7, 5, 3, 2], [2, 3, 5, 7, 11]], device=self.model.device)
        ids = ids % int(text_config(self.model).vocab_size)
        without = torch.ones(len(self.layers), 2, dtype=torch.bool)
        without[-1, 0] = False
        problem = f"unsupported model for layer skipping: the layers of {kind} cannot be skipped one by one"
        # Model code can fail with unexpected inputs.
        with errors_as(problem, RuntimeError, TypeError, IndexError, AttributeError):
            with evaluating(self.model):
                whole = self.model(input_ids=ids, use_cache=False).logits
                states = self.hidden_states(ids)
                parts, left = self.logits(states[-1]), self.hidden_states(ids, without)[-1]
            close = TOLERANCE * whole.abs().max().clamp(min=1.0)
            is_same = bool((whole - parts).abs().max() <= close) and torch.equal(left[0], states[-2][0])
            is_same = is_same and torch.allclose(left[1], states[-1][1], rtol=TOLERANCE, atol=TOLERANCE)
        if not is_same:
            raise OutriderError(f"unsupported model for layer skipping: {kind} does more than run its layers one after another")

    @contextmanager
    def _replaced(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        originals = list(self.layers)
        try:
            for index, module in enumerate(modules):
                self.layers[index] = module
            yield
        finally:
            for index, layer in enumerate(originals):
                self.layers[index] = layer


def _seen(layer: nn.Module, rows: Tensor | None, seen: list[Tensor]) -> nn.Module:
    """Return a module that runs the layer for some rows [B], returns the others unchanged, and records the output.

    The layer computes all rows unless it runs for none: few are dropped, and its arguments need no selection.
    """

    def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        out = hidden_states
        if rows is None or bool(rows.any()):
            out = layer(hidden_states, *args, **options)
        if not isinstance(out, Tensor):
            raise TypeError("a layer returns more than a hidden state")
        if rows is not None and not bool(rows.all()):
            out = torch.where(rows.to(out.device)[:, None, None], out, hidden_states)
        seen.append(out)
        return out

    return with_forward(layer, forward)
