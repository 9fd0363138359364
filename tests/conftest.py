"""Shared setup. The tests run in two processes (``scripts/test``); code compiled once per machine is compiled by the first."""

from __future__ import annotations

import sys

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
