"""Passes replayed from static buffers: bookkeeping without CUDA, with a recorder that calls the function again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never

import pytest
import torch
from torch import Tensor

from outrider.runner import graphs
from outrider.runner.graphs import MAX_WIDTH, GraphRunner


class Recorder:
    """Replays by calling the function again with the same output tensors, like a graph."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(
        self, function: Callable[[], Sequence[Tensor]], device: torch.device
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        assert device.type == "cpu"
        self.captures += 1
        outputs = [out.clone() for out in function()]

        def replay() -> None:
            for fixed, out in zip(outputs, function(), strict=True):
                fixed.copy_(out)

        return replay, outputs


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(graphs, "record_cuda", made)
    return made


def sums(inputs: list[Tensor]) -> list[Tensor]:
    """Depend on every input, so that an input that is not copied is detected."""
    *numbers, keys, values = inputs
    total = torch.stack([tensor.sum() for tensor in numbers]).sum()
    return [(total + keys.sum() + values.sum()).reshape(1).float()]


def inputs_of(width: int, seed: int, keys: Tensor, values: Tensor, batch: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def ints(*shape: int) -> Tensor:
        return torch.randint(0, 100, shape, generator=draw)

    visible = ints(batch, width, width) > 50
    tokens, positions = ints(1, batch * width), ints(1, batch * width)
    return [tokens, positions, ints(batch), ints(batch), ints(batch), visible, ints(width), keys, values]


def test_a_replay_sees_the_inputs_of_its_own_pass(recorder: Recorder) -> None:
    keys, values = torch.ones(3), torch.ones(3)
    runner = GraphRunner(sums, 2)
    for seed in range(5):
        given = inputs_of(4, seed, keys, values)
        assert torch.equal(runner(given)[0], sums(given)[0])
    assert recorder.captures == 1


def test_a_graph_captured_in_inference_mode_runs_outside_of_it(recorder: Recorder) -> None:
    keys, values, runner = torch.ones(3), torch.ones(3), GraphRunner(sums, 2)
    first, second = (inputs_of(4, seed, keys, values) for seed in range(2))
    with torch.inference_mode():
        runner(first)
    assert torch.equal(runner(second)[0], sums(second)[0])


def test_each_shape_is_captured_once(recorder: Recorder) -> None:
    keys, values = torch.ones(3), torch.ones(3)
    runner = GraphRunner(sums, 2)
    for width, batch in ((1, 1), (4, 1), (4, 2), (1, 1), (4, 2)):
        given = inputs_of(width, width, keys, values, batch)
        assert torch.equal(runner(given)[0], sums(given)[0])
    assert recorder.captures == 3


def test_the_shapes_used_last_are_kept(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    keys, values = torch.ones(3), torch.ones(3)
    runner = GraphRunner(sums, 2)
    captures = []
    for width in (1, 2, 1, 3, 1, 2):
        given = inputs_of(width, width, keys, values)
        assert torch.equal(runner(given)[0], sums(given)[0])
        captures.append(recorder.captures)
    assert captures == [1, 2, 2, 3, 3, 4]


def test_a_cache_that_moved_is_captured_again(recorder: Recorder) -> None:
    runner = GraphRunner(sums, 2)
    values = torch.ones(3)
    for size in (3, 5):
        given = inputs_of(2, 7, torch.ones(size), values)
        assert torch.equal(runner(given)[0], sums(given)[0])
    assert recorder.captures == 2


def test_a_cache_of_another_shape_at_the_same_address_is_captured_again(recorder: Recorder) -> None:
    runner = GraphRunner(sums, 2)
    store, values = torch.arange(8.0), torch.ones(3)
    for size in (3, 5):
        given = inputs_of(2, 7, store[:size], values)
        assert torch.equal(runner(given)[0], sums(given)[0])
    assert recorder.captures == 2 and len(runner._captured) == 1


def test_a_pass_that_cannot_be_captured_runs_without_a_graph(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def fails(function: Callable[[], Sequence[Tensor]], device: torch.device) -> Never:
        attempts.append(device)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record_cuda", fails)
    runner, given = GraphRunner(sums, 2), inputs_of(4, 0, torch.ones(3), torch.ones(3))
    for _ in range(2):
        assert torch.equal(runner(given)[0], sums(given)[0])
    assert len(attempts) == 1 and "passes run without CUDA graphs" in caplog.text


def test_prompts_run_without_a_graph(recorder: Recorder) -> None:
    given = inputs_of(MAX_WIDTH + 1, 0, torch.ones(3), torch.ones(3))
    assert torch.equal(GraphRunner(sums, 2)(given)[0], sums(given)[0])
    assert recorder.captures == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_replays_equal_eager_passes() -> None:
    device = torch.device("cuda")
    keys, values = torch.ones(3, device=device), torch.ones(3, device=device)
    runner = GraphRunner(sums, 2)
    for seed in range(3):
        given = [tensor.to(device) for tensor in inputs_of(4, seed, keys, values)]
        assert torch.equal(runner(given)[0], sums(given)[0])
