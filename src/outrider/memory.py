"""How much memory and how many cores this process may use, and how much memory weights take."""

from __future__ import annotations

import math
import os
from pathlib import Path

from outrider.errors import OutriderError

GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 of control groups writes a number like this for no limit


def free_memory() -> int | None:
    """Return the bytes of memory that this process may still take; None if unknown."""
    return _least(_meminfo("MemAvailable:"), group_limit())


def total_memory() -> int | None:
    """Return the bytes of memory that this process may take at most: the machine's or its control group's; None if unknown."""
    return _least(_meminfo("MemTotal:"), group_limit())


def group_limit() -> int | None:
    """Return the memory limit of this process's control group, in bytes; None without one."""
    names = [*_group_files("", "memory.max"), *_group_files("memory", "memory.limit_in_bytes")]
    return _least(*(_number(name) for name in names))


def num_cores() -> int:
    """Return how many cores this process may use: by its affinity, and by its control group's share of time, rounded up."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [own]
    for name in _group_files("", "cpu.max"):
        try:
            granted, period = name.read_text().split()
            limits.append(max(1, math.ceil(int(granted) / int(period))))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def _group_files(controller: str, name: str) -> list[Path]:
    """Files of that name of this process's control group, and of the root: in a container the group's own folder is the root.

    ``controller``: of version 1; empty for version 2.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = [line.split(":", 2)[1:] for line in lines]
    return [
        root / name
        for controllers, path in groups
        if controller in controllers.split(",")
        for root in (GROUPS / controller / path.strip("/"), GROUPS / controller)
    ]


def weight_files(source: Path) -> list[Path]:
    """Return the files of weights that are read of a folder, those of the first format where it has two, or of a GGUF file."""
    if source.suffix == ".gguf" and source.is_file():
        return [source]
    kinds = (sorted(source.glob(f"*{suffix}")) for suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    return next((files for files in kinds if files), [])


def refuse_too_large(source: str | Path, growth: int = 1) -> None:
    """Raise ``OutriderError`` if the weights in a local folder exceed this process's memory.

    ``growth``: bytes in memory per byte of the files.
    """
    needed, total = growth * sum(file.stat().st_size for file in weight_files(Path(source))), total_memory()
    if total is not None and needed > total:
        raise OutriderError(
            f"the weights in {source} take {size(needed)}, but this process has {size(total)} of memory: choose a smaller or a"
            " quantised checkpoint"
        )


def size(num_bytes: float) -> str:
    """``"1.3 GB"``"""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _number(file: Path) -> int | None:
    try:
        number = int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None
    return number if number < UNLIMITED else None


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
