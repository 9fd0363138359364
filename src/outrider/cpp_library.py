"""Compile a C++ file of the package for this CPU, once per machine, and cache the library on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider import disk_cache, progress

logger = logging.getLogger(__name__)

SECONDS = 25.0  # that compiling a library takes, roughly

FAILURES = (subprocess.SubprocessError, OSError, ValueError)  # what ``find_compiler`` and ``built`` raise
# -ffp-contract=off: otherwise compilers fuse a product and a sum in one copy of a function and not in another (GCC avoids
# chains of fused additions on AMD CPUs), and a row's bits would depend on the copy that computes it.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")


def find_compiler() -> list[str] | None:
    """``$CXX``, a command line, else the first of g++, clang++ and c++ that is there; None on Windows and where there is none.

    Raises ``ValueError`` where ``$CXX`` ends within quotes.
    """
    if sys.platform == "win32":
        return None
    try:
        own = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise ValueError(f"CXX={os.environ['CXX']!r} is not a command line: {error}") from error
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    return own or ([found] if found else None)


def library(
    compiler: Sequence[str], source: Path, flags: Sequence[str], libraries: Sequence[str] = (), versions: Sequence[str] = ()
) -> Path:
    """The library of ``source``: from the cache, else compiled, ``flags`` before the source, ``libraries`` behind it.

    It is kept under a key that changes with source, headers, compiler, CPU and ``versions``. Raises one of ``FAILURES``.
    """
    texts = [path.read_text() for path in [source, *sorted(source.parent.glob("*.h"))]]
    what = "|".join([*texts, *versions, *FLAGS, *compiler, platform.machine(), cpu_flags()])
    key = f"{source.stem}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    found = disk_cache.find("kernels", key, ".so")
    if found is not None:
        return found
    said = f"compiling {source.name}, once per machine"
    with progress.logged(logger, said, SECONDS), tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        out = Path(folder) / f"{source.stem}.so"
        command = [*compiler, *FLAGS, *flags, str(source), "-o", str(out), *libraries]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        return disk_cache.store(out, "kernels", key, ".so")


def first_line(error: Exception) -> str:
    """Return the first line of the compiler's message, for a log."""
    details = str(getattr(error, "stderr", "") or error).strip()
    return details.splitlines()[0] if details else type(error).__name__


def cpu_flags() -> str:
    """Return the CPU features that ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
