"""Run passes of one model: eager, which is the reference, or compiled ahead of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.runner import compiled
from outrider.runner.attention import PassLayout
from outrider.runner.forward import Pass
from outrider.runner.graphs import GraphRunner
from outrider.runner.kv_cache import KVCache
from outrider.runner.layer_span import WHOLE, LayerSpan

logger = logging.getLogger(__name__)

PATIENCE = 20.0  # seconds of eager passes after which compiling pays, which takes about as long


Run = Callable[[list[Tensor]], "Sequence[Tensor]"]
Kind = tuple[tuple[int, ...], LayerSpan]  # (hidden states, layers)


class PassRunner:
    """Runs passes of one model: compiled if available, requested or worth it, else eager."""

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, compile: str, on_compiled: Callable[[], None] | None = None
    ) -> None:
        """``on_compiled`` is called when a compiled pass replaces an eager one that was run."""
        # What is given one request after another is not one function of a pass's inputs.
        compile = "never" if cache.shape.by_request else compile
        self._model, self._cache, self._compile, self._on_compiled = model, cache, compile, on_compiled
        self._runs: dict[Kind, Run] = {}
        self._compiled: set[Kind] = set()
        self._eager: dict[Kind, float] = {}  # seconds of eager passes by kind

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, layout: PassLayout, layers: tuple[int, ...], logits_at: Tensor, span: LayerSpan = WHOLE
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Map tokens [1, T] to logits [M, V] at ``logits_at`` [M], and {hidden state: [T, H]}.

        A ``span`` that starts after layer 0 takes hidden states [1, T, H]; one without the head returns logits [0].
        """
        kind = (layers, span)
        run = self.runner_of(layers, span)
        started = time.perf_counter() if kind in self._eager else 0.0
        where = [layout.positions, layout.cache_rows, layout.bases, layout.ends, layout.visible]
        out = run([tokens, *where, logits_at, *layout.stores])
        if started:
            self._eager[kind] += time.perf_counter() - started
            if self._eager[kind] > PATIENCE and compiled.may_build():
                self._take_over(kind)
        logits, hidden = (out[0][0], out[1:]) if span.head else (tokens.new_empty(0), out)
        return logits, {layer: states[0] for layer, states in zip(layers, hidden, strict=True)}

    def runner_of(self, layers: tuple[int, ...] = (), span: LayerSpan = WHOLE) -> Run:
        """Return the function behind ``run`` for tight loops; it takes the inputs of ``Pass.forward``."""
        kind = (layers, span)
        if kind not in self._runs:
            self._runs[kind] = self._prepare(kind)
        return self._runs[kind]

    def compile_now(self) -> None:
        """Compile the passes in use, or load them from the disk cache, now."""
        if self._compile != "never":
            for kind in list(self._runs):
                if kind not in self._compiled:
                    self._take_over(kind)

    @property
    def is_compiled(self) -> bool:
        """Return whether every kind of pass run so far is compiled."""
        return bool(self._runs) and self._compiled == self._runs.keys()

    @property
    def is_provisional(self) -> bool:
        """Return whether some passes are eager only until compiling them pays."""
        return bool(self._eager) and (self._model.device.type == "cuda" or compiled.is_supported(self._model))

    def _take_over(self, kind: Kind) -> None:
        """Return a compiled pass, if possible."""
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
        if self._compile != "never" and self._model.device.type == "cuda" and not self._cache.shape.states.kinds:
            self._eager.pop(kind, None)
            self._compiled.add(kind)
            return GraphRunner(lambda inputs: tuple(module(*inputs)))
        return lambda inputs: tuple(module(*inputs))
