"""Provenance of results: the data needed to reproduce them."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.memory import kernel_lines
from outrider.native.build import cpu_flags
from outrider.types import dtype_name

if TYPE_CHECKING:
    from outrider.runner import ModelRunner

SECRET, HIDDEN = "--api-key", "hidden"  # an option whose value must not be published
# Instruction sets that speed up matrix products.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")


def origin() -> dict[str, Any]:
    """Return versions, processor, command and date as JSON-ready data."""
    return {
        "version": __version__,
        "commit": commit(),
        "cpu": cpu_name(),
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
    }


def provenance(runner: ModelRunner) -> dict[str, Any]:
    """Return ``origin`` plus device, dtype and ``weights`` (None: as in the checkpoint) of a model in this process."""
    import torch

    return origin() | {
        "device": device_name(runner.device),
        "dtype": dtype_name(runner.dtype),
        "weights": runner.config.weights,
        "threads": torch.get_num_threads(),
    }


def same_program(runner: ModelRunner) -> dict[str, Any]:
    """Return the part of ``provenance`` in which measurements of one document may not differ."""
    found = provenance(runner)
    return {name: found[name] for name in ("version", "commit", "cpu", "device", "dtype", "weights", "threads")}


def digest(value: Any) -> str:
    """Return a fingerprint of data that two runs must have in common, such as the token ids of their prompts."""
    return sha256(json.dumps(value, default=repr).encode()).hexdigest()[:16]


def command() -> str:
    """Return the command line, such as ``outrider bench --k 4``; scripts by relative path, secrets hidden."""
    program, words = Path(sys.argv[0]), sys.argv[1:]
    name = ["outrider"]
    if program.suffix == ".py" and program.parent.name != "outrider":  # python -m outrider runs outrider/__main__.py
        script, here = program.resolve(), Path.cwd()
        name = ["python", str(script.relative_to(here)) if script.is_relative_to(here) else script.name]
    for place, word in enumerate(words):
        if word.startswith(f"{SECRET}="):
            words[place] = f"{SECRET}={HIDDEN}"
        elif place and words[place - 1] == SECRET:
            words[place] = HIDDEN
    return shlex.join([*name, *map(without_password, words)])


def without_password(url: str) -> str:
    """Return a URL with its user and password hidden."""
    return re.sub(r"(?<=://)[^/]*(?=@)", HIDDEN, url)


def commit() -> str | None:
    """Return the commit of the checkout, with "+" if its code or ``bench/`` has uncommitted changes.

    None outside a checkout, also if the package is installed inside another project's.
    """
    folder = Path(__file__).parent
    try:
        answers = {
            what: subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=True
            ).stdout
            for what, arguments in {
                "own": ["ls-files", "--error-unmatch", Path(__file__).name],
                "head": ["rev-parse", "--short=12", "HEAD"],
                "changes": ["status", "--porcelain", "--", ":/src", ":/bench"],
            }.items()
        }
    except (OSError, subprocess.SubprocessError):
        return None
    return answers["head"].strip() + ("+" if answers["changes"].strip() else "")


def device_name(device: Any) -> str:
    """Return the device's name, such as ``cuda: NVIDIA H100`` or ``cpu: Intel Xeon ... (2 cores)``."""
    import torch

    return f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else f"{device.type}: {cpu_name()}"


def cpu_name() -> str:
    """Return ``AMD EPYC (2 cores; avx2 avx512f avx512_bf16)``, with the instructions that determine the speed of a pass."""
    names = (line.split(":", 1)[1].strip() for line in kernel_lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    flags = cpu_flags().split()
    kinds = " ".join(kind for kind in INSTRUCTIONS if kind in flags)
    return f"{name} ({os.cpu_count()} cores{kinds and '; ' + kinds})"
