"""How much memory there is for a model, and how much its weights take."""

from __future__ import annotations

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
    """Return the limit of this process's control group, in bytes; None without one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = [GROUPS / path.strip("/") / "memory.max", GROUPS / "memory.max"]
        elif "memory" in controllers.split(","):
            names = [GROUPS / "memory" / path.strip("/") / "memory.limit_in_bytes", GROUPS / "memory" / "memory.limit_in_bytes"]
        else:
            continue
        limits += [_number(name) for name in names]  # in a container the group's own folder is the root
    return _least(*limits)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder that are read: those of the first format where it has two."""
    kinds = (sorted(folder.glob(f"*{suffix}")) for suffix in (".safetensors", ".bin", ".pt"))
    return next((files for files in kinds if files), [])


def refuse_too_large(source: str | Path) -> None:
    """Raise ``OutriderError`` if the weights in a local folder exceed this process's memory."""
    needed, total = sum(file.stat().st_size for file in weight_files(Path(source))), total_memory()
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
