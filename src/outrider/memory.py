"""Memory, disk space and CPU cores available to this process."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from outrider.errors import OutriderError

GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # control groups version 1 report a larger number if there is no limit


def return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps holes, such as those left by packing, more than half the model's size."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def free_memory() -> int | None:
    """Return the bytes of memory that this process may still allocate; None if unknown."""
    return _least(_meminfo("MemAvailable:"), *(max(0, limit - _used_memory(file)) for file, limit in _group_limits()))


def total_memory() -> int | None:
    """Return the bytes of memory of the machine, or of this process's control group if lower; None if unknown."""
    return _least(_meminfo("MemTotal:"), *(limit for _, limit in _group_limits()))


def num_cores() -> int:
    """Return the number of cores that this process may use: its affinity, or its control group's quota rounded up if lower."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([own, *_quotas()])


def _quotas() -> Iterator[int]:
    """Yield the CPU quotas of this process's control group and of its parents, in cores, rounded up."""
    files = [[file] for file in _group_files("", "cpu.max")]
    files += [[file, file.with_name("cpu.cfs_period_us")] for file in _group_files("cpu", "cpu.cfs_quota_us")]
    for parts in files:
        with suppress(OSError, ValueError):  # no such file, or "max"
            granted, period = map(int, " ".join(part.read_text() for part in parts).split())
            if granted > 0:  # -1: unlimited
                yield max(1, math.ceil(granted / period))


def _group_files(controller: str, name: str) -> list[Path]:
    """Return the paths of a file of this process's control group and of its parents, each of which may set a limit.

    In a container, the root may be the group itself.

    ``controller``: name of the controller in version 1; empty for version 2.
    """
    groups = [line.split(":", 2)[1:] for line in kernel_lines(Path("/proc/self/cgroup"))]
    return [
        GROUPS / controller / str(each).strip("/") / name
        for controllers, path in groups
        if controller in controllers.split(",")
        for each in (PurePosixPath(path), *PurePosixPath(path).parents)
    ]


def require_memory(needed: int, what: str, advice: str) -> None:
    """Raise ``OutriderError`` if the bytes exceed the memory of this process. ``what``: beginning of the sentence."""
    total = total_memory()
    if total is not None and needed > total:
        raise OutriderError(f"{what} {size(needed)}, but this process has {size(total)} of memory: {advice}")


def require_disk(folder: Path, needed: int, what: str, advice: str) -> None:
    """Raise ``OutriderError`` if the bytes exceed the free space of a folder's disk. ``what``: beginning of the sentence."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutriderError(f"{what} {size(needed)}, but {folder} has {size(free)} of free disk space: {advice}")


def size(num_bytes: float) -> str:
    """Format a size, such as "1.3 GB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _number(file: Path) -> int | None:
    try:
        number = int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return number if number < UNLIMITED else None


def _group_limits() -> list[tuple[Path, int]]:
    """Return the files that limit the memory of this process's control group, with their limits in bytes."""
    files = [*_group_files("", "memory.max"), *_group_files("memory", "memory.limit_in_bytes")]
    return [(file, limit) for file in files if (limit := _number(file)) is not None]


def _used_memory(limit_file: Path) -> int:
    """Return the bytes that a control group uses, without cached files, which the kernel can drop."""
    used = _least(*(_number(limit_file.with_name(name)) for name in ("memory.current", "memory.usage_in_bytes"))) or 0
    prefix = "" if limit_file.name == "memory.max" else "total_"  # version 1 counts subgroups separately
    cached = {f"{prefix}active_file", f"{prefix}inactive_file"}
    counts = map(str.split, kernel_lines(limit_file.with_name("memory.stat")))
    return used - sum(int(number) for name, number in counts if name in cached)


def _meminfo(name: str) -> int | None:
    lines = kernel_lines(Path("/proc/meminfo"))
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def kernel_lines(file: Path) -> list[str]:
    """Return the lines of one of the kernel's files; none if this system does not have it."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
