"""Run passes of one model: eager, which is the reference, or compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.runner import compiled
from outrider.runner.attention import PassLayout
from outrider.runner.forward import Pass
from outrider.runner.graphs import GraphRunner, Run
from outrider.runner.kv_cache import KVCache
from outrider.runner.layer_span import WHOLE, LayerSpan

Kind = tuple[tuple[int, ...], LayerSpan]  # (hidden states, layers)


class PassRunner:
    """Runs passes of one model, all of them compiled or all of them eager.

    The two round differently, so changing from one to the other could change the text of the same request. The first pass
    decides; only ``compile_now`` changes it afterwards.
    """

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, compile: str, on_compiled: Callable[[], None] | None = None
    ) -> None:
        """``on_compiled`` is called when compiled passes replace eager ones that were run."""
        # A model that runs one request after another is not a single function of a pass's inputs.
        self._compile = "never" if cache.shape.by_request else compile
        self._model, self._cache, self._on_compiled = model, cache, on_compiled
        self._runs: dict[Kind, Run] = {}
        self._compiled: set[Kind] = set()

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, layout: PassLayout, layers: tuple[int, ...], logits_at: Tensor, span: LayerSpan = WHOLE
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Map tokens [1, T] to logits [M, V] at ``logits_at`` [M], and {hidden state: [T, H]}.

        A ``span`` that starts after layer 0 takes hidden states [1, T, H]; one without the head returns logits [0].
        """
        where = [layout.positions, layout.cache_rows, layout.bases, layout.ends, layout.visible]
        out = self.runner_of(layers, span)([tokens, *where, logits_at, *layout.stores])
        logits, hidden = (out[0][0], out[1:]) if span.head else (tokens.new_empty(0), out)
        return logits, {layer: states[0] for layer, states in zip(layers, hidden, strict=True)}

    def runner_of(self, layers: tuple[int, ...] = (), span: LayerSpan = WHOLE) -> Run:
        """Return the function behind ``run`` for tight loops; it takes the inputs of ``Pass.forward``."""
        kind = (layers, span)
        if kind not in self._runs:
            self._runs[kind] = self._prepare(kind, build=self._compile == "always" or bool(self._compiled))
        return self._runs[kind]

    def compile_now(self) -> None:
        """Compile the passes in use, or load them from the disk cache, now; those that come later are compiled as well."""
        eager = self._runs.keys() - self._compiled
        if self._compile != "never" and eager:
            for kind in eager:
                self._runs[kind] = self._prepare(kind, build=True)
            if eager & self._compiled and self._on_compiled is not None:
                self._on_compiled()

    @property
    def is_compiled(self) -> bool:
        """Return whether every kind of pass run so far is compiled."""
        return bool(self._runs) and self._compiled == self._runs.keys()

    @property
    def could_compile(self) -> bool:
        """Return whether the passes are eager only because no compiled ones were found."""
        return self._compile == "auto" and bool(self._runs) and not self._compiled and compiled.is_supported(self._model)

    def _prepare(self, kind: Kind, build: bool) -> Run:
        module = Pass(self._model, self._cache, *kind)

        def eager(inputs: list[Tensor]) -> Sequence[Tensor]:
            return tuple(module(*inputs))

        if self._compile == "never":
            return eager
        if compiled.is_supported(self._model):
            may_change = build or not self._runs  # after eager passes, compiled ones would change the rounding
            run = compiled.load(module, build) if may_change else None
            if run is not None:
                self._compiled.add(kind)
                return run
        elif self._model.device.type == "cuda" and not self._cache.shape.states.kinds:
            self._compiled.add(kind)
            return GraphRunner(eager)
        return eager
