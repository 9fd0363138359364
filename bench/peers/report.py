"""What a comparison leaves behind: a table for people and one JSON document for programs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines import HERE, OURS
from rich.table import Table


def provenance(command: list[str]) -> dict[str, Any]:
    """Where and how a result was made; paths are cut to their last part."""
    return {
        "command": " ".join(["compare.py", *(Path(word).name if os.path.isabs(word) else word for word in command)]),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "loadavg_at_start": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
    }


def table(cells: list[dict[str, Any]]) -> Table:
    """Every engine of every method, with ours over theirs."""
    view = Table(title="Tokens per second, medians of alternating rounds (decode: without the prompt's pass)")
    view.add_column("method")
    view.add_column("engine")
    view.add_column("dtype")
    view.add_column("K", justify="right")
    for name in ("tok/s", "decode", "ours / it", "decode: ours / it", "same text", "others' CPU", "peak MB"):
        view.add_column(name, justify="right")
    previous = None
    for entry in cells:
        if previous not in (None, entry["method"]):
            view.add_section()
        previous = entry["method"]
        view.add_row(*_row(entry))
    return view


def _row(entry: dict[str, Any]) -> list[str]:
    if "tok_s" not in entry:
        return [entry["method"], entry["engine"], "", "", entry["error"] or "not measured"]
    schedule = "" if entry["schedule"] == "constant" else f"{entry['schedule']} "
    return [
        entry["method"],
        f"[bold]{OURS}[/bold]" if entry["engine"] == OURS else entry["engine"],
        entry["meta"]["dtype"],
        "-" if entry["method"] == "plain" else f"{schedule}{entry['k']}",
        f"{entry['tok_s']:.1f}",
        f"{entry['decode_tok_s']:.1f}",
        f"{entry['ratio']:.2f}x" if "ratio" in entry else "",
        f"{entry['decode_ratio']:.2f}x" if "decode_ratio" in entry else "",
        f"{entry['same_text']:.0%}" if "same_text" in entry else "",
        f"{entry['other_cpu']:.0%}",
        str(entry["meta"]["peak_rss_mb"]),
    ]


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True)
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--", "../../src", ".") else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    kinds = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16") if flag in flags]
    return f"{(names or ['unknown'])[0]} ({' '.join(kinds)})"
