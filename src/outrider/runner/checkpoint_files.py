"""Check the files of a checkpoint before they are loaded, where the loaders' own messages name neither file nor cause."""

from __future__ import annotations

import errno
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import first_line
from outrider.files import read_object
from outrider.hub import expected_weights
from outrider.types import OutriderError
from outrider.weight_files import indexed_files, weight_files, weights_or_index

MADV_POPULATE_READ = 22  # Linux 5.14 and newer
POPULATE_BYTES = 1 << 28  # bytes per call
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names in configs; 0: no mixture
# Sizes in a config and their largest plausible values: a model of 10^20 layers would fill the memory.
MAX_SIZES = (
    dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
            *("num_attention_heads", "num_key_value_heads", "head_dim"),
        ),
        2**31 - 1,
    )
    | {"num_hidden_layers": 10_000}
    | dict.fromkeys(EXPERTS, 100_000)
)
LFS = b"version https://git-lfs"  # beginning of a pointer that Git LFS replaces by the file
AGAIN = "download it again"
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as in its library


def check_weight_files(source: str | Path) -> None:
    """Raise ``OutriderError`` for weights in a local folder that are missing, incomplete or damaged, or on a disk error."""
    folder, files = Path(source), weight_files(source)
    main = weights_or_index(folder)
    if main is not None and (folder / main).is_file():
        indexed_files(folder, main)
    elif folder.is_dir() and not files:
        why = expected_weights([file.name for file in folder.iterdir()], main)
        raise OutriderError(f"{source} has no weights: {why}")
    for file in files:
        _check_whole(file)
        _check_readable(file)


def _check_whole(file: Path) -> None:
    """Raise ``OutriderError`` for a pointer of Git LFS, and for a safetensors file that is incomplete or something else."""
    try:
        total = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(len(LFS))
            if start == LFS:
                raise OutriderError(f"{file} is a pointer of Git LFS, not the weights: run git lfs pull in its folder")
            if file.suffix != ".safetensors":
                return
            length = int.from_bytes(start[:8], "little")
            if len(start) < 8 or start[8:9] != b"{":
                raise OutriderError(f"{file} is not a safetensors file, it begins with {start[:16]!r}: {AGAIN}")
            if length > MAX_HEADER_BYTES:
                raise ValueError
            opened.seek(8)
            entries = {} if 8 + length > total else json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            needed = 8 + length + max(ends, default=0)
    except OSError as error:
        raise OutriderError(f"cannot read {file}: {first_line(error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OutriderError(f"{file} is not a safetensors file, its header is broken: {AGAIN}") from error
    if needed > total:
        raise OutriderError(f"{file} is incomplete, it has {total:,} of at least {needed:,} bytes: {AGAIN}")


def _check_readable(file: Path) -> None:
    """Read a file into the page cache. Raises ``OutriderError`` on a disk error.

    Weights are read from mapped files, where an unreadable page ends the process with a bus error. Does nothing on systems
    that cannot populate a mapping.
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for start in range(0, len(mapped), POPULATE_BYTES):
                mapped.madvise(MADV_POPULATE_READ, start, min(POPULATE_BYTES, len(mapped) - start))
    except OSError as error:
        if error.errno == errno.EFAULT:  # instead of a bus error
            raise OutriderError(f"cannot read {file}: the disk reports an error") from error
    except (AttributeError, ValueError):  # a system without madvise; an empty file, which the loader refuses
        return


def check_config_file(path: Path) -> None:
    """Raise ``OutriderError`` for a config.json that transformers misreads or rejects without a clear reason."""
    config = read_object(path, f"cannot read the config of {path.parent}")
    text = config.get("text_config")
    for part in (config, {} if text is None else text):
        if not isinstance(part, dict):
            raise OutriderError(
                f"cannot read the config of {path.parent}: text_config must be an object, got a {type(part).__name__}"
            )
        check_sizes(str(path.parent), part)
        heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
        dtype = part.get("dtype") or part.get("torch_dtype")
        if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            raise OutriderError(
                f"the config of {path.parent} says num_attention_heads={heads} and num_key_value_heads={shared}: expected a"
                " divisor"
            )
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype.removeprefix("torch."), None), torch.dtype):
            raise OutriderError(f"the config of {path.parent} says dtype={dtype!r}: expected a dtype such as bfloat16")


def check_sizes(source: str, config: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raise ``OutriderError`` for implausible sizes in a config. ``names``: its own names of entries, by transformers'."""
    for usual, most in MAX_SIZES.items():
        name, least = (names or {}).get(usual, usual), 0 if usual in EXPERTS else 1
        value = config.get(name)
        if isinstance(value, (int, float)) and not (isinstance(value, int) and least <= value <= most):
            raise OutriderError(f"the config of {source} says {name}={value}: expected a whole number from {least} to {most}")


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN or infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    numbers = tensor.float() if tensor.itemsize == 1 else tensor  # aminmax does not take 8-bit floats
    return all(bool(torch.isfinite(each)) for each in torch.aminmax(numbers))  # NaN propagates
