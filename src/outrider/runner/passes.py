"""One forward pass of a model in a given layout: eager, the reference, or compiled ahead of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from outrider.runner import compiled
from outrider.runner.attention import PassLayout, active_pass
from outrider.runner.graphs import GraphRunner
from outrider.runner.kv_cache import KVCache
from outrider.runner.loading import decoder_layers
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

PATIENCE = 20.0  # seconds of eager passes after which compiling, which takes about as long, is the better bet


class Pass(nn.Module):
    """The function that is run and compiled: tokens and their layout -> logits and the hidden states asked for.

    Its batch, width, cache size and number of logits are free, so one compiled form serves prefill, plain and speculative
    rounds.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self._cache = [cache]  # in a list, so that a module does not look into it
        self.cache_shape, self.cache_dtype = cache.shape, cache.dtype
        self._stack = [decoder_layers(model)] if layers else []
        last = cache.shape.num_layers
        if layers and not 0 <= min(layers) <= max(layers) <= last:
            raise OutriderError(f"a model of {last} layers has the hidden states 0 to {last}, not all of {layers}")

    def forward(  # noqa: PLR0913 - the inputs of a compiled function
        self,
        token_ids: Tensor,  # [B, W]
        positions: Tensor,  # [B, W]
        cache_rows: Tensor,  # [B]
        bases: Tensor,  # [B]
        visible: Tensor,  # [B, W, W]
        logits_at: Tensor,  # [M]: the places in the pass whose logits are wanted
        keys: Tensor,  # [L, R, Hkv, S, D]
        values: Tensor,
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
                    logits_to_keep=logits_at,
                ).logits
        finally:
            for handle in handles:
                handle.remove()
        return (logits, *(captured[layer] for layer in self.layers))

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


class PassRunner:
    """Runs passes of one model: compiled where that is at hand, asked for or worth its time, else eager."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, compile: str) -> None:
        self._model, self._cache, self._compile = model, cache, compile
        self._runs: dict[tuple[int, ...], Run] = {}
        self._compiled: set[tuple[int, ...]] = set()
        self._eager: dict[tuple[int, ...], float] = {}  # layers -> seconds spent in eager passes of that kind

    @torch.inference_mode()
    def run(
        self, token_ids: Tensor, layout: PassLayout, layers: tuple[int, ...], logits_at: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """[B, W] tokens -> logits [B, M, V] of the places ``logits_at`` [M], and {hidden state: [B, W, H]}."""
        run = self.runner_of(layers)
        started = time.perf_counter() if layers in self._eager else 0.0
        where = [layout.positions, layout.cache_rows, layout.bases, layout.visible, logits_at, layout.keys, layout.values]
        out = run([token_ids, *where])
        if started:
            self._eager[layers] += time.perf_counter() - started
            if self._eager[layers] > PATIENCE:
                self._runs[layers] = self._prepare(layers, insist=True)
        return out[0], dict(zip(layers, out[1:], strict=True))

    def runner_of(self, layers: tuple[int, ...] = ()) -> Run:
        """The function behind ``run``, for loops in which a look-up counts: inputs as ``Pass.forward`` takes them."""
        if layers not in self._runs:
            self._runs[layers] = self._prepare(layers)
        return self._runs[layers]

    def compile_now(self, layers: tuple[int, ...] = ()) -> None:
        """Compiles the passes in use and the one with these hidden states (or loads them from the disk cache), not later when
        it pays off.
        """
        if self._compile != "never":
            for kind in {*self._runs, layers}:
                self._runs[kind] = self._prepare(kind, insist=True)

    @property
    def is_compiled(self) -> bool:
        """Whether every kind of pass run so far is compiled."""
        return bool(self._runs) and self._compiled == self._runs.keys()

    def _prepare(self, layers: tuple[int, ...], insist: bool = False) -> Run:
        module = Pass(self._model, self._cache, layers)
        insist = insist or self._compile == "always"
        if self._compile != "never" and compiled.is_supported(self._model):
            run = compiled.load(module, build=insist)
            if run is not None:
                self._eager.pop(layers, None)
                self._compiled.add(layers)
                return run
        if self._compile == "auto" and not insist:
            self._eager.setdefault(layers, 0.0)
        else:
            self._eager.pop(layers, None)
        if self._compile != "never" and self._model.device.type == "cuda":
            self._eager.pop(layers, None)
            self._compiled.add(layers)
            return GraphRunner(lambda inputs: tuple(module(*inputs)))
        return lambda inputs: tuple(module(*inputs))
