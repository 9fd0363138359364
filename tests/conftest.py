"""The tests run in two processes (``scripts/test``): what is compiled once a machine is compiled by the first that needs it."""

from __future__ import annotations

import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Builds the C++ library, or waits until the other process has: both would begin at the same moment."""
    if not hasattr(config, "workerinput") or sys.platform == "win32":
        return
    import fcntl

    from outrider import native
    from outrider.disk_cache import cache_dir

    with (cache_dir("kernels") / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        native.load()
