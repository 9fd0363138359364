"""Fixtures of the runner's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Threads that divide few numbers of elements evenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
