"""Capture programs as CUDA graphs, once per shape, so that a few hundred small kernels cost one launch.

A graph works on fixed memory: each shape has its own input tensors, into which a program's inputs are copied before the replay.
Only the cache's tensors, which come last, are used in place. The runner pads requests to the longest, so that there are few
shapes. Each graph has memory of its own: at most MAX_GRAPHS are kept, the most recently used. When the cache grows, its
memory moves and graphs are captured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from outrider.errors import first_line

logger = logging.getLogger(__name__)

Run = Callable[[list[Tensor]], Sequence[Tensor]]
Replay = Callable[[], None]
Captured = tuple[list[Tensor], Replay, Sequence[Tensor]]  # inputs, replay, outputs

_capturing = Lock()  # torch captures on one stream
MAX_GRAPHS = 128  # batches and draft trees of changing sizes have hundreds of shapes; engines usually capture 30 to 70
MAX_WIDTH = 64  # wider passes are prefill: they keep the device busy without a graph and have any width


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has computed what this thread started; a CPU has."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # waiting for the whole device ends other threads' captures


def record_cuda(function: Callable[[], Sequence[Tensor]], device: torch.device) -> tuple[Replay, Sequence[Tensor]]:
    """Capture ``function`` as a CUDA graph. Return its replay and the tensors that each replay writes."""
    with _capturing, torch.cuda.device(device):  # streams and graphs belong to the current device
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries allocate workspaces on first use, which must not happen during capture
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads go on allocating
            outputs = function()
    return graph.replay, outputs


class GraphRunner:
    """Runs a program through captured graphs, one for each combination of its inputs' shapes.

    The outputs are valid until the next run with the same shapes. A program that cannot be captured runs as it is.
    """

    def __init__(self, function: Run, num_stores: int) -> None:
        """``num_stores``: the inputs at the end that are tensors of the cache."""
        self._function, self._num_stores = function, num_stores
        self._captured: dict[tuple[torch.Size, ...], Captured] = {}  # the one used last is last
        self._is_eager = False  # the program cannot be captured
        self._cache: tuple[int, ...] = ()  # address and shape of the captured cache

    @torch.inference_mode()  # a graph's inputs are of this mode, and training writes text outside of it
    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run the program. One of its inputs is a visibility, bool [B, W, M]: W is the number of tokens of a request."""
        own, stores = inputs[: -self._num_stores], inputs[-self._num_stores :]
        width = next(each.shape[1] for each in own if each.dtype == torch.bool)
        if width > MAX_WIDTH or self._is_eager:
            return self._function(inputs)
        cache = tuple(number for store in stores for number in (store.data_ptr(), *store.shape))
        if cache != self._cache:  # drop all: freed memory may be reused by a cache of another shape
            self._captured.clear()
            self._cache = cache
        key = tuple(each.shape for each in own)
        found = self._captured.pop(key, None)
        if found is None:
            if len(self._captured) == MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]
            try:
                found = self._capture(own, stores)
            except RuntimeError as error:  # the model's code waits for the device, or memory ran out
                logger.warning("passes run without CUDA graphs, which is slower: %s", first_line(error))
                self._captured.clear()
                self._is_eager = True
                return self._function(inputs)
        self._captured[key] = found
        inputs, replay, outputs = found
        for fixed, given in zip(inputs, own, strict=True):
            fixed.copy_(given, non_blocking=True)
        replay()
        return outputs

    def _capture(self, own: list[Tensor], stores: list[Tensor]) -> Captured:
        # Warm-up runs the program on the same inputs and writes the same slots as the replay.
        fixed = [given.clone() for given in own]
        return fixed, *record_cuda(lambda: self._function([*fixed, *stores]), own[0].device)
