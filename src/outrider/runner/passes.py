"""One forward pass of a model in a given layout: eager, the reference, or compiled ahead of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from outrider.runner import compiled
from outrider.runner.attention import PassLayout, active_pass
from outrider.runner.graphs import GraphRunner
from outrider.runner.kv_cache import KVCache
from outrider.runner.layer_span import WHOLE, LayerSpan, spanned
from outrider.runner.loading import decoder_layers
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

PATIENCE = 20.0  # seconds of eager passes after which compiling, which takes about as long, is the better bet


class Pass(nn.Module):
    """The function that is run and compiled: tokens and their layout -> logits and the hidden states asked for.

    The tokens of all requests stand one behind the other, each with as many as it needs: attention alone knows whose they are.
    Batch, lengths, cache size and number of logits are free, so one compiled form serves prefill, plain and speculative rounds.
    A pass over a part of the layers takes hidden states in the place of tokens where it does not begin at the first, and gives
    no logits where it ends before the head.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, layers: tuple[int, ...], span: LayerSpan = WHOLE) -> None:
        super().__init__()
        self.model, self.layers, self.span = spanned(model, span), layers, span
        self._cache = [cache]  # in a list, so that a module does not look into it
        self.cache_shape, self.cache_dtype = cache.shape, cache.dtype
        self._stack = [decoder_layers(self.model)] if layers else []
        last = cache.shape.num_layers
        if layers and not 0 <= min(layers) <= max(layers) <= last:
            raise OutriderError(f"a model of {last} layers has the hidden states 0 to {last}, not all of {layers}")

    def forward(  # noqa: PLR0913 - the inputs of a compiled function
        self,
        tokens: Tensor,  # [1, T] ids, or the hidden states [1, T, H] of the layer before the span
        positions: Tensor,  # [1, T]
        cache_rows: Tensor,  # [B]
        bases: Tensor,  # [B]
        ends: Tensor,  # [B]
        visible: Tensor,  # [B, W, W]
        logits_at: Tensor,  # [M]: the tokens whose logits are wanted
        keys: Tensor,  # [L, R, Hkv, S, D]
        values: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden = tokens if self.span.start else None
        layout = PassLayout(keys, values, cache_rows, bases, ends, positions, visible, hidden)
        captured: dict[int, Tensor] = {}
        handles = [self._capture(layer, captured) for layer in self.layers]
        inputs: dict[str, Any] = {
            "inputs_embeds" if self.span.start else "input_ids": tokens,
            "position_ids": positions,
            # A 4-D mask is passed on as it is by every model, and Outrider's attention does not look at it.
            "attention_mask": positions.new_ones((1, 1, 1, 1), dtype=torch.bool),
            "past_key_values": self._cache[0],
            "use_cache": True,
        }
        try:
            with active_pass(layout):
                if self.span.head:
                    out = [self.model(**inputs, logits_to_keep=logits_at).logits]
                else:
                    self.model.base_model(**inputs)
                    out = []
        finally:
            for handle in handles:
                handle.remove()
        return (*out, *(captured[layer] for layer in self.layers))

    def _capture(self, index: int, captured: dict[int, Tensor]) -> torch.utils.hooks.RemovableHandle:
        """Counted as transformers' ``hidden_states``: what goes into layer ``index``, or comes out after the final norm."""

        def before(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
            captured[index] = args[0] if args else options["hidden_states"]

        def after(module: nn.Module, args: object, output: ModelOutput) -> None:
            captured[index] = output[0]

        if index == len(self._stack[0]):
            return self.model.base_model.register_forward_hook(after)
        return self._stack[0][index].register_forward_pre_hook(before, with_kwargs=True)


Run = Callable[[list[Tensor]], "Sequence[Tensor]"]
Kind = tuple[tuple[int, ...], LayerSpan]  # hidden states wanted, layers run


class PassRunner:
    """Runs passes of one model: compiled where that is at hand, asked for or worth its time, else eager."""

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, compile: str, on_compiled: Callable[[], None] | None = None
    ) -> None:
        """``on_compiled`` is called where a compiled pass takes over from an eager one that was run."""
        self._model, self._cache, self._compile, self._on_compiled = model, cache, compile, on_compiled
        self._runs: dict[Kind, Run] = {}
        self._compiled: set[Kind] = set()
        self._eager: dict[Kind, float] = {}  # seconds spent in eager passes of that kind

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, layout: PassLayout, layers: tuple[int, ...], logits_at: Tensor, span: LayerSpan = WHOLE
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """[1, T] tokens -> logits [M, V] of the tokens ``logits_at`` [M], and {hidden state: [T, H]}.

        A ``span`` that begins behind the first layer takes hidden states [1, T, H]; one without the head gives logits [0].
        """
        kind = (layers, span)
        run = self.runner_of(layers, span)
        started = time.perf_counter() if kind in self._eager else 0.0
        where = [layout.positions, layout.cache_rows, layout.bases, layout.ends, layout.visible]
        out = run([tokens, *where, logits_at, layout.keys, layout.values])
        if started:
            self._eager[kind] += time.perf_counter() - started
            if self._eager[kind] > PATIENCE and compiled.may_build():
                self._take_over(kind)
        logits, hidden = (out[0][0], out[1:]) if span.head else (tokens.new_empty(0), out)
        return logits, {layer: states[0] for layer, states in zip(layers, hidden, strict=True)}

    def runner_of(self, layers: tuple[int, ...] = (), span: LayerSpan = WHOLE) -> Run:
        """The function behind ``run``, for loops in which a look-up counts: inputs as ``Pass.forward`` takes them."""
        kind = (layers, span)
        if kind not in self._runs:
            self._runs[kind] = self._prepare(kind)
        return self._runs[kind]

    def compile_now(self) -> None:
        """Compiles the passes in use (or loads them from the disk cache) instead of waiting for it to pay off."""
        if self._compile != "never":
            for kind in list(self._runs):
                if kind not in self._compiled:
                    self._take_over(kind)

    @property
    def is_compiled(self) -> bool:
        """Whether every kind of pass run so far is compiled."""
        return bool(self._runs) and self._compiled == self._runs.keys()

    @property
    def is_provisional(self) -> bool:
        """Whether passes were run that stay eager only until compiling them pays off."""
        return bool(self._eager) and (self._model.device.type == "cuda" or compiled.is_supported(self._model))

    def _take_over(self, kind: Kind) -> None:
        """A compiled pass in the place of the eager one, if there can be one."""
        self._runs[kind] = self._prepare(kind, insist=True)
        if kind in self._compiled and self._on_compiled is not None:
            self._on_compiled()

    def _prepare(self, kind: Kind, insist: bool = False) -> Run:
        module = Pass(self._model, self._cache, *kind)
        insist = insist or self._compile == "always"
        if self._compile != "never" and compiled.is_supported(self._model):
            run = compiled.load(module, build=insist)
            if run is not None:
                self._eager.pop(kind, None)
                self._compiled.add(kind)
                return run
        if self._compile == "auto" and not insist:
            self._eager.setdefault(kind, 0.0)
        else:
            self._eager.pop(kind, None)
        if self._compile != "never" and self._model.device.type == "cuda":
            self._eager.pop(kind, None)
            self._compiled.add(kind)
            return GraphRunner(lambda inputs: tuple(module(*inputs)))
        return lambda inputs: tuple(module(*inputs))
