"""One forward pass of a model in a given layout: eager, the reference, or compiled ahead of time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.runner.attention import PassLayout, active_pass
from outrider.runner.kv_cache import KVCache
from outrider.runner.loading import decoder_layers


class Pass(nn.Module):
    """The function that is run and compiled: tokens and their layout -> logits and the hidden states asked for.

    Without ``logits`` only those of the last token are computed: reading a prompt needs none.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, layers: tuple[int, ...], logits: bool) -> None:
        super().__init__()
        self.model, self.layers, self.logits = model, layers, logits
        self._cache = [cache]  # in a list, so that a module does not look into it
        self._stack = [decoder_layers(model)] if layers else []

    def forward(
        self,
        token_ids: Tensor,  # [B, W]
        positions: Tensor,  # [B, W]
        cache_rows: Tensor,  # [B]
        bases: Tensor,  # [B]
        keys: Tensor,  # [L, R, Hkv, S, D]
        values: Tensor,
        visible: Tensor | None = None,  # [B, W, W]
    ) -> tuple[Tensor, ...]:
        layout = PassLayout(keys, values, cache_rows, bases, positions, visible)
        captured: dict[int, Tensor] = {}
        handles = [self._capture(layer, captured) for layer in self.layers]
        try:
            with active_pass(layout):
                logits = self.model(
                    input_ids=token_ids,
                    position_ids=positions,
                    # A 4-D mask is passed on as it is by every model, and Outrider's attention does not look at it.
                    attention_mask=token_ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
                    past_key_values=self._cache[0],
                    use_cache=True,
                    logits_to_keep=0 if self.logits else 1,
                ).logits
        finally:
            for handle in handles:
                handle.remove()
        return (logits, *(captured[layer] for layer in self.layers))

    def _capture(self, layer: int, captured: dict[int, Tensor]) -> torch.utils.hooks.RemovableHandle:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            captured[layer] = output if isinstance(output, Tensor) else output[0]

        return self._stack[0][layer].register_forward_hook(hook)


class PassRunner:
    """Runs passes of one model, eager until a compiled one is at hand."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, compile: str) -> None:
        self._model, self._cache, self._compile = model, cache, compile
        self._passes: dict[tuple[tuple[int, ...], bool], Pass] = {}

    @torch.inference_mode()
    def run(
        self, token_ids: Tensor, layout: PassLayout, layers: tuple[int, ...], logits: bool = True
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """[B, W] tokens -> logits [B, W, V] (of the last token alone where ``logits`` is false) and {layer: [B, W, H]}."""
        key = (layers, logits)
        if key not in self._passes:
            self._passes[key] = Pass(self._model, self._cache, layers, logits)
        out = self._passes[key](
            token_ids, layout.positions, layout.cache_rows, layout.bases, layout.keys, layout.values, layout.visible
        )
        return out[0], dict(zip(layers, out[1:], strict=True))
