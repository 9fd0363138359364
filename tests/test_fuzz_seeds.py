"""Inputs that were findings of ``bench/fuzz.py`` once: each is used, or refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SEEDS = sorted(path for path in (ROOT / "tests" / "fuzz_seeds").glob("*/*") if path.is_file())


@pytest.fixture(scope="module")
def targets():
    """Return the fuzzer's targets by name."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from fuzz_targets import TARGETS
    finally:
        sys.path.remove(str(ROOT / "bench"))
    made: dict[str, Any] = {name: TARGETS[name]() for name in {file.parent.name for file in SEEDS}}
    yield made
    for target in made.values():
        target.close()


@pytest.mark.parametrize("file", SEEDS, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_a_former_finding_is_handled(file, targets):
    targets[file.parent.name].run(file.read_bytes())
