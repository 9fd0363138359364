"""Compile the C++ of this folder for this CPU, once per machine, and cache the library on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from outrider import disk_cache, progress
from outrider.memory import kernel_lines, num_cores

logger = logging.getLogger(__name__)

SECONDS = 25.0  # approximate compile time of the library

FAILURES = (subprocess.SubprocessError, OSError, ValueError)  # what ``find_compiler`` and ``library`` raise
FOLDER = Path(__file__).parent
# The slowest to compile first.
UNITS = ("linear", "blocks", "operators", "attention", "sampling", "recurrence", "experts", "threads")
TIMEOUT = 600.0  # seconds for compiling all units, and again for linking
POLL = 0.02  # seconds between checks of the running compilers
# -ffp-contract=off: otherwise compilers fuse a product and a sum in one copy of a function and not in another (GCC avoids
# chains of fused additions on AMD CPUs), and a row's bits would depend on the copy that computes it.
# On ARM old compilers lack -march=native, on POWER all do.
NATIVE = "-mcpu=native" if platform.machine().startswith(("aarch64", "arm64", "ppc64")) else "-march=native"
FLAGS = (
    *("-std=c++20", "-O3", NATIVE, "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fPIC", "-fvisibility=hidden"),
)


def find_compiler() -> list[str] | None:
    """Return ``$CXX``, a command line, or the first installed one of g++, clang++ and c++; None on Windows and without one.

    Raises ``ValueError`` if ``$CXX`` has an unclosed quote.
    """
    if sys.platform == "win32":
        return None
    try:
        own = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise ValueError(f"CXX={os.environ['CXX']!r} is not a command line: {error}") from error
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    return own or ([found] if found else None)


def library(compiler: Sequence[str]) -> Path:
    """Compile the library, store it in the disk cache and return it. Raises one of ``FAILURES``."""
    task = "compiling the CPU kernels, once per machine"
    with progress.logged(logger, task, SECONDS), tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        return disk_cache.store(_compiled(compiler, Path(folder)), "kernels", _key(compiler), ".so")


def cached(compiler: Sequence[str]) -> Path | None:
    """Return the library from the disk cache; None if it is not there."""
    return disk_cache.find("kernels", _key(compiler), ".so")


def _flags() -> list[str]:
    """Return the compiler's flags, without the folders of torch."""
    import torch

    return [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]


def _key(compiler: Sequence[str]) -> str:
    """Return the cache key: it depends on the sources, the compiler's command, the flags, torch, libc and the CPU."""
    import torch

    sources = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h", ".inc")]
    machine = [*platform.libc_ver(), platform.machine(), cpu_flags()]
    what = [*sources, *compiler, *_flags(), torch.__version__, sys.abiflags, *machine]
    return f"native-{hashlib.sha256('|'.join(what).encode()).hexdigest()[:16]}"


def _compiled(compiler: Sequence[str], folder: Path) -> Path:
    import torch

    torch_folder = Path(torch.__file__).parent  # torch.utils.cpp_extension knows it too, but takes a second to import
    flags = [*_flags(), f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    objects = [str(folder / f"{unit}.o") for unit in UNITS]
    sources = [str(FOLDER / f"{unit}.cpp") for unit in UNITS]
    _run([[*compiler, *flags, "-c", source, "-o", out] for source, out in zip(sources, objects, strict=True)])
    out = folder / "native.so"
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([[*compiler, *flags, "-shared", *objects, "-o", str(out), *libraries]])
    return out


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in parallel, one per core. A failure or an interrupt ends those that run.

    No thread waits for a command: Python joins threads before it exits, and SIGTERM would wait for the compiler.
    """
    running: dict[subprocess.Popen[bytes], IO[str]] = {}
    waiting, deadline = list(commands), monotonic() + TIMEOUT
    environment = os.environ | {"LC_ALL": "C"}  # for `_cause`, messages in English
    with ExitStack() as files:
        try:
            while waiting or running:
                while waiting and len(running) < num_cores():
                    errors: IO[str] = files.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                    process = subprocess.Popen(waiting.pop(0), stdout=subprocess.DEVNULL, stderr=errors, env=environment)
                    running[process] = errors
                for process in [each for each in running if each.poll() is not None]:
                    errors = running.pop(process)
                    if process.returncode:
                        errors.seek(0)
                        cause = _cause(errors.read()) or f"{commands[0][0]} ended with exit code {process.returncode}"
                        raise subprocess.SubprocessError(cause)
                if running and monotonic() > deadline:
                    raise subprocess.TimeoutExpired(next(iter(running)).args, TIMEOUT)
                sleep(POLL)
        finally:
            for process in running:
                process.kill()
                process.wait()


def _cause(messages: str) -> str:
    """Return a compiler's first error, without the lines about its includes and functions; else all messages."""
    error = re.search(r"^.+(:\d+:|: fatal) error: .+", messages, re.MULTILINE)
    return error.group() if error else messages.strip()


def cpu_flags() -> str:
    """Return the CPU features that ``NATIVE`` depends on; on macOS and POWER the CPU's name, which determines them."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):  # a sandbox
            return subprocess.check_output(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    lines = kernel_lines(Path("/proc/cpuinfo"))
    kinds = ("flags", "Features", "cpu\t")  # on x86, on ARM, on POWER
    return next((line for line in lines if line.startswith(kinds)), "" if lines else platform.processor())
