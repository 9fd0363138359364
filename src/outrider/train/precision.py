"""Choose the precision of training: the dtype of matrix products."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import torch

from outrider.train.claims import damaged_file_errors, read_or_create_json
from outrider.types import dtype_name


@cache
def autocast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 on a GPU with units for it, and on a CPU where a measured product is faster in it; else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - start)
        return min(times)

    return torch.bfloat16 if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else torch.float32


def run_dtype(folder: Path, device: torch.device) -> torch.dtype:
    """Return the dtype of the products of the run in this folder.

    It is chosen at the start and kept when the run is resumed, because a second measurement can differ.
    """
    file = folder / "arithmetic.json"
    chosen = read_or_create_json(file, lambda: {"dtype": dtype_name(autocast_dtype(device))})
    with damaged_file_errors(file):
        dtype: torch.dtype = getattr(torch, chosen["dtype"])
    return dtype


def arithmetic(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Context manager: compute products in this dtype; float32 is the default."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
