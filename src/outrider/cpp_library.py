"""Builds a C++ file of the package for this very CPU, once a machine, and keeps the library on disk."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.disk_cache import cache_dir

FAILURES = (subprocess.SubprocessError, OSError)  # what ``compile_library`` raises
# -ffp-contract=off: compilers fuse a product and a sum in one copy of a function and not in another, as they think best for the
# CPU (GCC avoids chains of fused additions on AMD's), and a row's bits would depend on which copy computes it.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")


def find_compiler() -> str | None:
    """``$CXX``, else the first of g++, clang++ and c++ that is there; None on Windows and where there is none."""
    if sys.platform == "win32":
        return None
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def library_path(source: Path, compiler: str, *versions: str) -> Path:
    """Where the library stands, or will: under a name that changes with source, headers, compiler, CPU and ``versions``."""
    texts = [path.read_text() for path in [source, *sorted(source.parent.glob("*.h"))]]
    what = "|".join([*texts, *versions, *FLAGS, compiler, platform.machine(), cpu_flags()])
    return cache_dir("kernels") / f"{source.stem}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"


def compile_library(compiler: str, source: Path, library: Path, flags: Sequence[str], libraries: Sequence[str] = ()) -> None:
    """Compiles ``source``; ``flags`` stand before it, ``libraries`` behind it. Raises one of ``FAILURES``."""
    part = library.with_suffix(f".{os.getpid()}.part")
    command = [compiler, *FLAGS, *flags, str(source), "-o", str(part), *libraries]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    part.replace(library)  # atomic: two processes may build at once


def first_line(error: Exception) -> list[str]:
    """What the compiler said first, for a log."""
    details = getattr(error, "stderr", "") or str(error)
    return details.strip().splitlines()[:1]


def cpu_flags() -> str:
    """What ``-march=native`` depends on, of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
