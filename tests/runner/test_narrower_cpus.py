"""The kernels of CPUs with fewer instructions than this one, compiled here and tested by the tests of this CPU's."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import native
from outrider.native import build

FOLDER = Path(__file__).parent
# Compiler options that disable a set and those that build on it.
LACKING = {"avx512f": ["-mno-avx512f"], "avx_vnni": ["-mno-avx512f", "-mno-avxvnni"], "avx": ["-mno-avx"]}


@pytest.mark.skipif(not native.load(), reason="no C++ compiler")
@pytest.mark.parametrize("instructions", LACKING)
def test_the_kernels_are_right_without(instructions: str) -> None:
    if instructions not in build.cpu_flags().split():
        pytest.skip(f"this CPU has no {instructions}: its own kernels are those")
    compiler = build.find_compiler()
    assert compiler is not None
    environment = {**os.environ, "CXX": shlex.join([*compiler, *LACKING[instructions]])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not as_fast_as_torch and not reference"]
    tests = [str(FOLDER / name) for name in ("test_kernels.py", "test_blocks.py", "test_gates.py")]
    run = subprocess.run([*command, *tests], env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-3000:] + run.stderr[-1000:]
