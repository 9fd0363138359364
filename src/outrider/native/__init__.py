"""The C++ operators of the CPU, one library: linear layers, attention, recurrent layers, and the sampler's work on rows.

``build`` compiles the library for this CPU, once per machine; ``load`` loads it at its first use. Every operator is tested
against a reference in torch. Those of attention, recurrent layers and the sampler also run without a C++ compiler.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import OutriderError, first_line
from outrider.memory import num_cores
from outrider.native import build

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_loading = threading.Lock()

# Numbers of the 4-bit codes of weights in blocks, before the scale, by kind.
CODES4 = {
    kind: tuple(map(int, numbers.split(",")))
    for numbers, kind in re.findall(r"^\{(.+)\},  // (\w+)", (build.FOLDER / "codes4.inc").read_text(), re.MULTILINE)
}


def load() -> bool:
    """Build the library (about 25 s, once per machine) and load it into ``torch.ops.outrider``. Return False on failure.

    Limits torch's threads to the cores that this process may use, unless ``OMP_NUM_THREADS`` is set.
    """
    with _loading:  # threads that load at the same time build the library once
        return _build_and_load()


@cache
def _build_and_load() -> bool:
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), num_cores()))
    try:
        compiler = build.find_compiler()
        if compiler is None:
            why, advice = "no C++ compiler found", "install g++"
            if sys.platform == "win32":
                why, advice = "the CPU kernels cannot be built on Windows", "use WSL"
            logger.warning("%s: passes use torch's kernels, several times slower; %s", why, advice)
            return False
        found = build.cached(compiler)
        if found is None or not _load_cached(found):
            _load_file(build.library(compiler))
    except (*build.FAILURES, OutriderError) as error:
        logger.warning("the CPU kernels cannot be built or loaded, torch's own are used: %s", first_line(error))
        return False
    return True


def _load_cached(path: Path) -> bool:
    """Load a library from the cache. Remove it and return False if it does not load here, such as with an older libc."""
    try:
        _load_file(path)
    except OSError as error:
        logger.warning("%s does not load (%s): it is built again", path, first_line(error))
        with suppress(OSError):  # a cache that cannot be written
            path.unlink()
        return False
    return True


def _load_file(path: Path) -> None:
    """Load a library. Raises ``OSError``, or ``OutriderError`` on a mount with noexec, where building again does not help."""
    import torch

    if os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OutriderError(f"{path.parent} is on a mount with noexec: set OUTRIDER_CACHE to a folder on a mount without it")
    torch.ops.load_library(path)


def serves(device: torch.device) -> bool:
    """Return whether the operators run on tensors of that device."""
    return device.type == "cpu" and load()
