"""Threads of the kernels: same bits for any number of threads, with concurrent callers, and after fork."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from outrider import native
from outrider.runner.kernels import pack_weight

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
    result: Tensor = torch.ops.outrider.linear(ROWS, weight, None, 1000)
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
