"""Shared setup. The tests run in two processes (``scripts/test``); code compiled once per machine is compiled by the first."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest


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
def logs() -> Iterator[None]:
    """Undo what a command did to the package's logger: pytest captures a logger that does not propagate in its own way."""
    yield
    logger = logging.getLogger("outrider")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
