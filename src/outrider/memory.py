"""Memory, disk space and CPU cores available to this process, and the size of model weights."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath

from outrider.errors import OutriderError
from outrider.files import GGUF_PART, expanded, object_in, read_object

GROUPS = Path("/sys/fs/cgroup")
INDEX_SUFFIX = ".index.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_NAMES = ("model.safetensors", INDEXES[0], "pytorch_model.bin", INDEXES[1])  # transformers' order of preference
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
LOADED_NAMES = (*WEIGHT_NAMES, *MEDUSA_FILES)  # in order of preference
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


def on_this_machine(source: str | Path) -> Path | None:
    """Return a local folder, or the folder of a hub id in the download cache; None otherwise."""
    from huggingface_hub import constants, try_to_load_from_cache

    path = expanded(source)
    if str(source) and os.path.isdir(path):
        return path
    try:
        config = try_to_load_from_cache(str(source), "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # not a hub id
        return None
    return Path(config).parent if isinstance(config, str) else None


def weight_files(source: str | Path) -> list[Path]:
    """Return the weight files that are loaded from a folder (of one format only), a cached hub id, or a GGUF file or part.

    A broken index has none: it is reported when the model is loaded.
    """
    path = expanded(source)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return gguf_parts(path)
    folder = on_this_machine(source)
    if folder is None:
        return []
    names: list[str] = []
    with suppress(OSError, OutriderError):
        first = first_file(folder)
        names = [file.name for file in folder.glob("*.gguf")] if first is None else indexed_files(folder, first)
    return sorted(file for file in map(folder.joinpath, names) if file.is_file())  # no links to files deleted from a cache


def first_file(folder: Path) -> str | None:
    """Return the name of the weights, or of their index, that a folder's config.json states, else of the first that exists.

    Raises ``OutriderError`` as ``stated_file``.
    """
    return stated_file(folder) or next((name for name in LOADED_NAMES if (folder / name).is_file()), None)


def stated_file(folder: Path) -> str | None:
    """Return the name of the weights, or of their index, in a folder's config.json; None if it states none.

    transformers then loads no other file. Raises ``OutriderError`` for one outside the folder.
    """
    config = folder / "config.json"
    name = object_in(config).get("transformers_weights")
    if not isinstance(name, str):
        return None
    _refuse_outside(name, config)
    return name


def _refuse_outside(name: str, file: Path) -> None:
    """Raise ``OutriderError`` if the name of weights in a file, which may be a stranger's, leads out of the file's folder."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise OutriderError(f"{file} names weights outside its folder, {name}: expected the name of a file in it")


def indexed_files(folder: Path, first: str, prefix: str = "") -> list[str]:
    """Return the names of the files that an index lists for tensors whose names begin with ``prefix``.

    For a weight file, its own name. ``first``: see ``first_file``. Raises ``OutriderError`` for a broken index.
    """
    if not first.endswith(INDEX_SUFFIX):
        return [first]
    return sorted({file for tensor, file in weight_map(folder / first).items() if tensor.startswith(prefix)})


def gguf_parts(path: Path) -> list[Path]:
    """Return a GGUF file, or, for a part of one that llama.cpp split, all parts that exist beside it, in order."""
    part = GGUF_PART.fullmatch(path.stem)
    if part is None:
        return [path]
    own = {file: GGUF_PART.fullmatch(file.stem) for file in path.parent.glob("*.gguf") if file.is_file()}
    return sorted(file for file, found in own.items() if found and found.groups() == part.groups())


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor by an index. Raises ``OutriderError`` if it is missing or not an index."""
    files = read_object(index, f"{index} is not a weight index").get("weight_map")
    if not isinstance(files, dict) or not all([isinstance(file, str) for file in files.values()]):
        raise OutriderError(f"{index} is not a weight index: expected the file name of each tensor")
    for file in {*files.values()}:
        _refuse_outside(file, index)
    return files


def weight_bytes(source: str | Path) -> int:
    """Return the size of ``weight_files``; 0 if there are none on this machine."""
    return sum(file.stat().st_size for file in weight_files(source))


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
