"""Where a result comes from: what is needed to repeat it."""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch

from outrider import __version__
from outrider.bench.report import commit, device_name
from outrider.runner import ModelRunner


def provenance(runner: ModelRunner) -> dict[str, Any]:
    """Versions, machine, command and date, JSON-ready."""
    return {
        "version": __version__,
        "commit": commit(),
        "device": device_name(runner.device),
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "command": " ".join(["outrider", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")},
    }
