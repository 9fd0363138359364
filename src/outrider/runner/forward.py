"""One forward pass of a model in a given layout, as the function that is run eagerly or compiled."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from outrider.runner.attention import PassLayout, active_pass
from outrider.runner.kv_cache import KVCache
from outrider.runner.layer_span import WHOLE, LayerSpan, spanned
from outrider.runner.linear import is_packed
from outrider.runner.loading import decoder_layers, keeps_logits, num_layers, pass_arguments, text_config
from outrider.types import OutriderError


class Program(nn.Module, ABC):
    """A function of tensors over a KV cache that is run eagerly or compiled. Its modules hold the weights that it reads."""

    label: str  # in progress reports: what is compiled
    num_layers: int
    cache: KVCache

    def weights(self) -> dict[str, Tensor]:
        """Return its parameters and buffers by name, each under all of its names."""
        return {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers(remove_duplicate=False))}

    @abstractmethod
    def identity(self) -> object:
        """Return what its compiled form depends on besides code, weights, cache and versions, with a complete ``repr``."""

    @abstractmethod
    def example(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return inputs from which it is exported, and their dynamic dimensions."""


def described(model: PreTrainedModel) -> str:
    """Return a model's class and config, without names and versions."""
    return type(model).__name__ + json.dumps(nameless_config(model), sort_keys=True, default=str)


def nameless_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's config without names and versions."""
    config = model.config.to_dict()
    return {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}


def example_layout(cache: KVCache, sees_earlier: bool = False) -> tuple[PassLayout, tuple[dict[int, Any], ...]]:
    """Return a layout of five tokens of two requests, to export a program, and the dynamic dimensions of its tensors.

    ``sees_earlier``: whether the visibility covers slots before the program's own tokens (M > W of ``PassLayout``).
    """
    dim = torch.export.Dim
    b, w, t = dim("b", min=1, max=4096), dim("w", min=1, max=1 << 20), dim("t", min=1, max=1 << 22)
    seen = dim("seen", min=1, max=1 << 20) if sees_earlier else w
    rows, slots = dim("rows", min=1), dim("slots", min=1)
    inputs = (
        torch.tensor([[0, 1, 0, 1, 2]]),
        torch.arange(2),
        torch.zeros(2, dtype=torch.long),
        torch.tensor([2, 5]),
        torch.ones(2, 3, 3 + sees_earlier, dtype=torch.bool).tril(int(sees_earlier)),
    )
    stores = [torch.zeros(store, dtype=cache.dtype) for store in cache.shape.stores(rows=2, slots=8)]
    states = [torch.zeros(store) for store in cache.shape.states.stores(2, cache.states.slots)]
    store_shapes = ({1: rows, 3: slots},) * len(stores) + ({1: rows},) * len(states)
    return cache.pass_layout((*inputs, *stores, *states)), ({1: t}, *({0: b},) * 3, {0: b, 1: w, 2: seen}, *store_shapes)


class Pass(Program):
    """The function that is run and compiled: tokens and their layout -> logits and requested hidden states.

    The tokens of all requests are concatenated without padding; only attention separates the requests. Batch, lengths, cache
    size and number of logits are dynamic, so one compiled form serves prefill, plain and speculative rounds. A pass that begins
    after the first layer takes hidden states instead of tokens; one that ends before the head returns no logits.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, hidden: tuple[int, ...], span: LayerSpan = WHOLE) -> None:
        """``hidden``: the hidden states to return, counted as in ``types.Scores``; ``span``: the layers to run."""
        super().__init__()
        self.model, self.hidden, self.span = spanned(model, span), hidden, span
        self.cache, self.num_layers = cache, num_layers(text_config(model))
        self.label = f"the pass of {Path(str(model.name_or_path or type(model).__name__)).name}"
        self._layers = [decoder_layers(self.model)] if hidden else []  # in a list: they are registered with the model
        self._keeps_logits = keeps_logits(self.model)
        last = len(self._layers[0]) if hidden else 0
        if hidden and not 0 <= min(hidden) <= max(hidden) <= last:
            raise OutriderError(f"a model of {last} layers has the hidden states 0 to {last}, not all of {hidden}")

    def identity(self) -> object:
        return described(self.model), self.hidden, self.span

    def example(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        layout, shapes = example_layout(self.cache)
        tokens = torch.zeros(1, 5, dtype=torch.long)
        if self.span.start:
            dtype = torch.float32 if is_packed(self.model) else self.cache.dtype  # between the layers
            tokens = torch.zeros(1, 5, text_config(self.model).hidden_size, dtype=dtype)
        inputs = (tokens, torch.arange(4), *layout.tensors)
        return inputs, (shapes[0], {0: torch.export.Dim("m", min=1)}, shapes)

    def forward(
        self,
        tokens: Tensor,  # [1, T] ids, or the hidden states [1, T, H] of the layer before the span
        logits_at: Tensor,  # [M]: the tokens whose logits are wanted
        *where: Tensor,  # of the layout
    ) -> tuple[Tensor, ...]:
        layout = self.cache.pass_layout(where, tokens if self.span.start else None)
        if not self.cache.shape.by_request:
            return self._run(tokens, layout, logits_at)
        parts = [self._run(tokens[:, own], part) for part, own in layout.requests()]
        out = [torch.cat(of_requests, 1) for of_requests in zip(*parts, strict=True)]
        if self.span.head:
            out[0] = out[0][:, logits_at]
        return tuple(out)

    def _run(self, tokens: Tensor, layout: PassLayout, logits_at: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run the model in one layout: logits (of all tokens without ``logits_at``) and hidden states."""
        captured: dict[int, Tensor] = {}
        handles = [self._capture(index, captured) for index in self.hidden]
        inputs = {"inputs_embeds" if self.span.start else "input_ids": tokens}
        inputs |= pass_arguments(self.model, self.cache, layout.positions, self.cache.shape.by_request)
        try:
            with active_pass(layout):
                if self.span.head and self._keeps_logits and logits_at is not None:
                    out = [self.model(**inputs, logits_to_keep=logits_at).logits]
                elif self.span.head:
                    logits = self.model(**inputs).logits
                    out = [logits if logits_at is None else logits[:, logits_at]]
                else:
                    self.model.base_model(**inputs)
                    out = []
        finally:
            for handle in handles:
                handle.remove()
        if missing := [index for index in self.hidden if index not in captured]:  # cross-attention without an image
            raise OutriderError(f"no hidden states before layers {missing}: the model skips these layers for text alone")
        return (*out, *(captured[index] for index in self.hidden))

    def _capture(self, index: int, captured: dict[int, Tensor]) -> torch.utils.hooks.RemovableHandle:
        """Store hidden state ``index`` of the next run: the input of that layer, for the last index the final norm's output."""

        def before(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
            captured[index] = args[0] if args else options["hidden_states"]

        def after(module: nn.Module, args: object, output: ModelOutput) -> None:
            captured[index] = output[0]

        if index == len(self._layers[0]):
            return self.model.base_model.register_forward_hook(after)
        return self._layers[0][index].register_forward_pre_hook(before, with_kwargs=True)
