"""Threads of the kernels: same bits for any number of threads, with concurrent callers, and after fork."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider import native
from outrider.runner.blocks import ROUNDED
from outrider.runner.kernels import pack_weight

from .test_kernels import Pass

pytestmark = pytest.mark.skipif(not native.load(), reason="no C++ compiler")
ROWS = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return pack_weight(torch.randn(1000, 192, generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def times(weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.outrider.linear(ROWS, weight, None, 1000, 32)
    return result


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(weight: Tensor, threads: int, count: int) -> None:
    torch.set_num_threads(1)
    expected = times(weight)
    torch.set_num_threads(count)
    for _ in range(200):
        assert torch.equal(times(weight), expected)


def test_concurrent_callers_do_not_interfere(weight: Tensor, threads: int) -> None:
    expected = times(weight)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: times(weight), range(600)))
    assert all(torch.equal(each, expected) for each in found)


def _child(weight: Tensor, expected: Tensor) -> None:
    os._exit(0 if all(torch.equal(times(weight), expected) for _ in range(20)) else 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_its_own_threads(weight: Tensor, threads: int) -> None:
    child = multiprocessing.get_context("fork").Process(target=_child, args=(weight, times(weight)))
    child.start()
    child.join(30)
    alive, code = child.is_alive(), child.exitcode
    child.kill()
    assert not alive and code == 0


Operator = Callable[[], Tensor]  # with its inputs


def attend() -> Operator:
    """Process a prompt with one head of keys, in tiles of 8 or 16 tokens."""
    prompt = Pass([21], 150, kv_heads=1, dims=(64, 64), capacity=171, dtype=torch.bfloat16)
    where = (prompt.cache_rows, torch.tensor(prompt.bases), torch.tensor([150]), prompt.positions, prompt.visible)
    inputs = (prompt.query, prompt.key, prompt.value, prompt.keys, prompt.values, 1, *where, 0.3, 0.0, 0)

    def run() -> Tensor:
        for store in (prompt.keys, prompt.values):
            store[1, prompt.cache_rows[0], :, 21:] = math.nan  # otherwise tiles read what an earlier run has written
        result: Tensor = torch.ops.outrider.attend(*inputs)
        return result

    return run


def next_token_probs() -> Operator:
    rows = torch.randn(5, 3, 40_000, generator=torch.Generator().manual_seed(2)).softmax(-1)
    tokens, num_accepted, lens = torch.zeros(5, 2, dtype=torch.long), torch.tensor([0, 1, 2, 0, 1]), torch.full((5,), 2)
    return partial(torch.ops.outrider.next_token_probs, rows, rows[:, 1:].contiguous(), tokens, num_accepted, lens)


def sample_inverse_cdf() -> Operator:
    rows = torch.randn(5, 40_000, generator=torch.Generator().manual_seed(3)).softmax(-1)
    return partial(torch.ops.outrider.sample_inverse_cdf, rows, [0.1, 0.9, 0.4, 0.6, 0.0])


def pack_blocks() -> Operator:
    """Round a weight of which torch would convert each panel in threads of its own."""
    weight = torch.linspace(-1, 1, 256 * 4096).view(256, 4096).bfloat16()
    packed = torch.zeros(8, ROUNDED[8].panel_bytes(4096), dtype=torch.uint8)

    def run() -> Tensor:
        torch.ops.outrider.pack_blocks(weight, 8, packed)
        return packed

    return run


OPERATORS = [attend, next_token_probs, sample_inverse_cdf, pack_blocks]


@pytest.mark.parametrize("make", OPERATORS)
def test_one_sequence_or_batch_has_the_same_bits_with_any_number_of_threads(make: Callable[[], Operator], threads: int) -> None:
    run = make()
    torch.set_num_threads(1)
    expected = run().clone()
    for count in (2, 3, 4):
        torch.set_num_threads(count)
        assert torch.equal(run(), expected), count


def _count_threads(run: Operator) -> None:
    run()
    os._exit(len(list(Path("/proc/self/task").iterdir())))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are not listed here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", OPERATORS)
def test_work_is_divided_among_all_threads_and_no_others(make: Callable[[], Operator], threads: int) -> None:
    """A forked child has no threads before."""
    child = multiprocessing.get_context("fork").Process(target=_count_threads, args=(make(),))
    child.start()
    child.join(10)
    code = child.exitcode
    child.kill()
    assert code == threads


def test_threads_divide_a_prompt_in_a_pass_that_also_decodes(threads: int) -> None:
    lens, longest = torch.tensor([1] * 15 + [1000]), 1000
    query, new = (torch.randn(1, heads, int(lens.sum()), 64) for heads in (4, 1))
    stores = (torch.zeros(1, 16, 1, longest, 64), torch.zeros(1, 16, 1, longest, 64))
    positions = torch.cat([torch.arange(count) for count in lens.tolist()])[None]
    visible = torch.ones(16, longest, longest, dtype=torch.bool).tril()
    where = (torch.arange(16), torch.zeros(16, dtype=torch.long), lens.cumsum(0), positions, visible)
    torch.set_num_threads(2)
    least = total = 0.0  # seconds on the processor: of the less busy thread of each pass, and of both
    for _ in range(10):
        own, both = time.thread_time(), time.process_time()
        torch.ops.outrider.attend(query, new, new, *stores, 0, *where, 0.3, 0.0, 0)
        own, both = time.thread_time() - own, time.process_time() - both
        least, total = least + min(own, both - own), total + both
    assert least > 0.2 * total
