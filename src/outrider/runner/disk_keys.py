"""Keys of files in the disk cache: hashes of what a file depends on, Outrider's code and libraries included."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import transformers
from torch import nn

from outrider import native
from outrider.native.build import cpu_flags

CODE = (".py", ".cpp", ".h", ".inc")  # endings of source files


def key(*parts: object) -> str:
    """Return the hash of parts with a complete ``repr``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


@cache
def own_code() -> str:
    """Return a hash of the sources of the runner and of ``native``, and of the versions of torch and transformers."""
    files = [*Path(__file__).parent.rglob("*"), *native.build.FOLDER.rglob("*")]
    code = _content(file for file in files if file.suffix in CODE and file.is_file())  # lock files of editors are broken links
    return key(torch.__version__, transformers.__version__, code)


def code_of(program: nn.Module) -> str:
    """Return a hash of ``own_code`` and of the files that define a program's modules, except torch's and transformers'."""
    classes = {each for module in program.modules() for each in type(module).__mro__}
    names = {each.__module__ for each in classes if each.__module__.split(".")[0] not in ("torch", "transformers")}
    return key(own_code(), _content(Path(file) for name in names if (file := getattr(sys.modules.get(name), "__file__", None))))


def machine(device: torch.device) -> str:
    """Return the CPU's features, or the name of a GPU."""
    return cpu_flags() if device.type == "cpu" else torch.cuda.get_device_name(device)


def state_of(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each file. Raises ``OSError`` for one that does not exist."""
    return [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in (file.stat(),)]


def _content(files: Iterable[Path]) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(files))
