"""Passes compiled ahead of time: exported once with dynamic shapes, built by inductor, cached on disk, loaded in milliseconds.

Unlike ``torch.compile``, a process with a package on disk traces nothing and checks no guards, so its first token comes from
compiled code. Shapes are dynamic because Outrider's operators, which take most of the time, do not depend on them; one package
serves every batch, draft length and cache size. A package contains no weights: it reads the model's.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from outrider import disk_cache, progress
from outrider.errors import first_line, is_out_of_memory
from outrider.native.build import find_compiler
from outrider.runner import blocks, compiled_gpu, disk_keys
from outrider.runner.forward import Program
from outrider.runner.gates import fuse_gates
from outrider.runner.graphs import Run

logger = logging.getLogger(__name__)

MAX_INLINED = 8  # elements of the longest vector that inductor compiles in as constants

SECONDS, SECONDS_PER_LAYER = 8.0, 1.5  # approximate compile time of a pass on one core
FOLDER, SUFFIX = "passes", ".pt2"  # of the disk cache


_may_build = ContextVar("may_build", default=True)  # of this thread
_inductor = threading.Lock()  # of its environment variable, which belongs to the process


@contextmanager
def without_building() -> Iterator[None]:
    """Disable compilation in this thread, which would block all its requests and change the rounding of running ones."""
    before = _may_build.set(False)
    try:
        yield
    finally:
        _may_build.reset(before)


def load(program: Program, build: bool) -> Run | None:
    """Return the compiled program from disk, or build it if ``build``. None if there is none or compilation fails."""
    build &= _may_build.get()
    key = _key(program)
    path = disk_cache.find(FOLDER, key, SUFFIX)
    if path is not None:
        try:
            return _load(program, path)
        except Exception as error:  # for example, torch libraries changed without a change of version
            is_kept = is_out_of_memory(error)  # the file is not at fault
            build &= not is_kept
            outcome = "it is compiled anew" if build else "passes stay eager"
            logger.warning("the compiled pass at %s does not load (%s): %s", path, first_line(error), outcome)
            if not is_kept:
                with suppress(OSError):  # a cache that cannot be written
                    path.unlink()
    if not build:
        return None
    try:
        return _load(program, _build(program, key))
    except Exception as error:
        # Compilation can fail in many ways; the eager pass computes the same.
        logger.warning("compilation failed, passes stay eager: %s", first_line(error))
        logger.debug("compilation failed", exc_info=True)
        return None


def _load(program: Program, path: Path) -> Run:
    if program.cache.device.type == "cuda":
        with _inductor_in(disk_cache.cache_dir("inductor")):
            return compiled_gpu.load(program, path)
    # torch._inductor.aoti_load_package without its processor check, which starts Python processes for two seconds to verify
    # what the package's path already encodes.
    package = torch.classes.outrider.Package(str(path))
    weights = program.weights()
    package.load({name: weights[name] for name in package.names()})
    return package.run


def export(program: Program) -> ExportedProgram:
    """Export a program with its dynamic dimensions."""
    with torch.device(program.cache.device):
        inputs, shapes = program.example()
    if program.cache.device.type == "cpu":
        blocks.fastest_activation_bits()  # cached before tracing, which would record the call as an operator of the pass
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's internal warnings
        return torch.export.export(program, inputs, strict=False, dynamic_shapes=shapes)


def _build(program: Program, key: str) -> Path:
    """Compile the pass and store it in the cache."""
    expected = SECONDS + SECONDS_PER_LAYER * program.num_layers
    is_cuda = program.cache.device.type == "cuda"  # then packages use files of inductor's folder
    with (
        progress.logged(logger, f"compiling {program.label}, once per machine", expected),
        tempfile.TemporaryDirectory(prefix="outrider-") as built,
        _inductor_in(disk_cache.cache_dir("inductor") if is_cuda else Path(built)),
    ):
        exported, package = export(program), Path(built) / f"{key}{SUFFIX}"
        if is_cuda:
            compiled_gpu.build(exported, package)
            return disk_cache.store(package, FOLDER, key, SUFFIX)
        fuse_gates(exported)
        options = {
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.precompile_headers": False,  # they would be in inductor's default folder
            "cpp.threads": 1,  # operations besides Outrider's are small: waking threads takes longer than computing them
            **_compiler_option(),
        }
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=options)
        return disk_cache.store(package, FOLDER, key, SUFFIX)


@contextmanager
def _inductor_in(folder: Path) -> Iterator[None]:
    """Make inductor write its files into a private folder: another user could create the default one, which is in /tmp."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    with _inductor:
        before = os.environ.get(name)
        os.environ[name] = str(folder)
        try:
            yield
        finally:
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before


def _compiler_option() -> dict[str, Any]:
    """Return the compiler in a ``$CXX`` of several words, such as ``ccache g++ -pipe``, alone: inductor expects one word."""
    command = find_compiler() or []
    found = next((word for word in command if "++" in word and not word.startswith("-")), None)
    return {"cpp.cxx": found} if found and len(command) > 1 else {}


def _compiled_in(tensor: Tensor) -> Any:
    """Return the numbers of a tensor that inductor compiles into a package as constants; None for those that it reads."""
    return tensor.tolist() if tensor.numel() == 1 or (tensor.dim() == 1 and len(tensor) <= MAX_INLINED) else None


def _key(program: Program) -> str:
    """Return the key of the package: a hash of code, settings, weight types, versions and device."""
    own = [*program.named_parameters(), *program.named_buffers()]
    cache = program.cache
    weights = [(name, each.shape, each.dtype, _compiled_in(each)) for name, each in own]
    shapes = cache.dtype, cache.shape, cache.states.slots
    # A GPU's package contains the number of the device.
    where = disk_keys.machine(cache.device), cache.device.index or 0
    return disk_keys.key(disk_keys.code_of(program), program.identity(), weights, shapes, where)
