"""Memory bandwidth of the machine, measured in the same run as the speeds, and bytes of weights read per token."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

MEGABYTES = 1024  # per array: far larger than any cache
REPEATS = 5


def bandwidth(threads: int) -> dict[str, float]:
    """Return the median GB/s of a large copy (bytes read plus bytes written) and of a large read, using all threads."""
    length = (MEGABYTES << 20) // 4
    source, target = np.ones(length, np.float32), np.ones(length, np.float32)
    pieces = [slice(length * i // threads, length * (i + 1) // threads) for i in range(threads)]

    def copy(piece: slice) -> None:
        np.copyto(target[piece], source[piece])

    def read(piece: slice) -> None:
        np.dot(source[piece], source[piece])

    with ThreadPoolExecutor(threads) as pool:
        return {
            "copy_gb_s": 2 * source.nbytes / 1e9 / _seconds(pool, copy, pieces),
            "read_gb_s": source.nbytes / 1e9 / _seconds(pool, read, pieces),
        }


def _seconds(pool: ThreadPoolExecutor, task: Callable[[slice], None], pieces: list[slice]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        list(pool.map(task, pieces))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first iteration touches the pages


def weights_read(model: Path) -> int:
    """Return the number of parameters read per token.

    Not counted are an input embedding that is not also the output head, and the experts of a mixture that a token does not use.
    """
    shapes: dict[str, list[int]] = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    has_head = any(name.startswith("lm_head.") for name in shapes)
    config = json.loads((model / "config.json").read_text())
    used = config.get("num_experts_per_tok", 1) / (config.get("num_experts") or config.get("num_local_experts") or 1)
    sizes = {name: prod(shape) * (used if ".experts." in name else 1) for name, shape in shapes.items()}
    return round(sum(size for name, size in sizes.items() if not (has_head and "embed_tokens" in name)))


def add_shares(cells: list[dict[str, Any]], parameters: int, measured: list[dict[str, float]]) -> None:
    """Add to every cell of 16-bit plain decoding the share of the bandwidth used to read its weights."""
    for cell in cells:
        if cell["method"] == "plain" and cell["bits"] == 16 and "decode_tok_s" in cell and measured:
            gb_s = cell["decode_tok_s"] * 2 * parameters / 1e9
            cell["weights_gb_s"] = gb_s
            for name in ("copy", "read"):
                cell[f"{name}_share"] = gb_s / statistics.median(each[f"{name}_gb_s"] for each in measured)
