"""Shared setup. The tests run in several processes (``scripts/test``); code compiled once per machine is compiled by the first.

Tests are offline unless they start a hub of their own.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it


def pytest_configure(config: pytest.Config) -> None:
    """Build the C++ library, or wait for the other process, because both would start building at the same time."""
    if not hasattr(config, "workerinput") or sys.platform == "win32":
        return
    import fcntl

    from outrider import native
    from outrider.disk_cache import cache_dir

    with (cache_dir("kernels") / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        native.load()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if weights are read."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("outrider.runner.loading.load_model", fail)


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command does to its process: a command runs once per process, tests run many in one."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    yield
    gc.unfreeze()
    gc.enable()
    logger = logging.getLogger("outrider")  # pytest captures a logger that does not propagate in its own way
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
