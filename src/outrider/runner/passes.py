"""Run programs of one model, such as its passes: eagerly, which is the reference, or compiled ahead of time.

On a GPU both are captured as graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.runner import compiled, compiled_gpu
from outrider.runner.attention import PassLayout
from outrider.runner.forward import Pass, Program
from outrider.runner.graphs import GraphRunner, Run
from outrider.runner.kv_cache import KVCache
from outrider.runner.layer_span import WHOLE, LayerSpan
from outrider.runner.linear import is_packed

ProgramKey = tuple[tuple[int, ...], LayerSpan]  # (hidden states that it reports, layers that it runs)


class ProgramRunner:
    """Runs the programs of one model. One is compiled only if all that run before it are.

    Compiled and eager programs round differently, so changing from one to the other could change the text of the same request:
    only ``compile_now`` does, for all programs or for none.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[ProgramKey], Program],
        cache: KVCache,
        compile: str,
        on_compiled: Callable[[], None] | None = None,
    ) -> None:
        """``make``: the programs of ``model``, which run over ``cache``.

        ``on_compiled`` is called when compiled programs replace eager ones that were run.
        """
        self._make, self._on_compiled = make, on_compiled
        # A model that runs one request after another is not a single function of a pass's inputs.
        self._compile = "never" if cache.shape.by_request else compile
        self._takes_graphs = cache.device.type == "cuda" and not cache.shape.is_recurrent
        self._num_stores = len(cache.tensors)
        is_supported = is_packed(model) or (self._takes_graphs and compiled_gpu.suits(model))
        self._can_compile = is_supported and self._compile != "never"
        self._runs: dict[ProgramKey, Run] = {}
        self._compiled: set[ProgramKey] = set()

    def run_of(self, hidden: tuple[int, ...] = (), span: LayerSpan = WHOLE) -> Run:
        """Return the function that runs a program; it takes a list of the program's inputs."""
        key = (hidden, span)
        if key not in self._runs:
            program, build = self._make(key), self._compile == "always" or bool(self._runs)
            compiled_run = compiled.load(program, build) if self._can_compile and self.is_compiled else None
            if compiled_run is None:
                self._runs[key] = self._captured(lambda inputs: tuple(program(*inputs)))
            else:
                self._add_compiled({key: compiled_run})
        return self._runs[key]

    def compile_now(self) -> None:
        """Compile the programs in use, or load them from the disk cache, now; those that come later are compiled as well.

        If one of them cannot be compiled, none changes.
        """
        found: dict[ProgramKey, Run] = {}
        for key in self._runs.keys() - self._compiled if self._can_compile else ():
            compiled_run = compiled.load(self._make(key), build=True)
            if compiled_run is None:
                return
            found[key] = compiled_run
        self._add_compiled(found)
        if found and self._on_compiled is not None:
            self._on_compiled()

    @property
    def is_compiled(self) -> bool:
        """Return whether every program run so far is compiled; True if none has run."""
        return self._compiled == self._runs.keys()

    @property
    def could_compile(self) -> bool:
        """Return whether programs are eager only because no compiled ones were found."""
        return self._compile == "auto" and bool(self._runs) and not self._compiled and self._can_compile

    def _add_compiled(self, found: dict[ProgramKey, Run]) -> None:
        self._runs |= {key: self._captured(run) for key, run in found.items()}
        self._compiled |= found.keys()

    def _captured(self, run: Run) -> Run:
        return GraphRunner(run, self._num_stores) if self._takes_graphs and self._compile != "never" else run


class PassRunner(ProgramRunner):
    """Runs passes of one model over one cache."""

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, compile: str, on_compiled: Callable[[], None] | None = None
    ) -> None:
        super().__init__(model, lambda kind: Pass(model, cache, *kind), cache, compile, on_compiled)

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, layout: PassLayout, hidden: tuple[int, ...], logits_at: Tensor, span: LayerSpan = WHOLE
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Map tokens [1, T] to logits [M, V] at ``logits_at`` [M], and {hidden state: [T, H]} for those in ``hidden``.

        A ``span`` that starts after layer 0 takes hidden states [1, T, H]; one without the head returns logits [0].
        """
        out = self.run_of(hidden, span)([tokens, logits_at, *layout.tensors])
        logits, states = (out[0][0], out[1:]) if span.head else (tokens.new_empty(0), out)
        return logits, {index: each[0] for index, each in zip(hidden, states, strict=True)}
