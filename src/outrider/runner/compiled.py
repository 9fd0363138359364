"""Passes compiled ahead of time: exported once with dynamic shapes, built by inductor, cached on disk, loaded in milliseconds.

Unlike ``torch.compile``, a process with a package on disk traces nothing and checks no guards, so its first token comes from
compiled code. Shapes are dynamic because Outrider's operators, which take most of the time, do not depend on them; one package
serves every batch, draft length and cache size. A package contains no weights: it reads the model's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from outrider import disk_cache, progress
from outrider.native.build import cpu_flags, find_compiler
from outrider.runner import blocks
from outrider.runner.forward import Pass
from outrider.runner.gates import fuse_gates
from outrider.runner.linear import is_packed
from outrider.runner.loading import num_layers, text_config
from outrider.types import first_line

logger = logging.getLogger(__name__)

SHORT = 8  # elements of the longest vector that inductor compiles in as constants

Run = Callable[[list[Tensor]], list[Tensor]]

SECONDS, SECONDS_PER_LAYER = 8.0, 1.5  # approximate compile time of a pass on one core
FOLDER, SUFFIX = "passes", ".pt2"  # of the disk cache


def is_supported(model: PreTrainedModel) -> bool:
    """Return whether the model runs entirely on the CPU kernels; other passes stay eager or are captured as graphs."""
    return model.device.type == "cpu" and is_packed(model)


_may_build = ContextVar("may_build", default=True)  # of this thread


@contextmanager
def without_building() -> Iterator[None]:
    """Disable compilation in this thread, which would block all its requests and change the rounding of running ones."""
    before = _may_build.set(False)
    try:
        yield
    finally:
        _may_build.reset(before)


def load(module: Pass, build: bool) -> Run | None:
    """Return the compiled ``Pass`` from disk, or build it if ``build``. None if there is none or compilation fails."""
    build &= _may_build.get()
    key = _key(module)
    path = disk_cache.find(FOLDER, key, SUFFIX)
    if path is not None:
        try:
            return _load(module, path)
        except Exception as error:  # for example, torch libraries changed without a change of version
            outcome = "it is compiled anew" if build else "passes stay eager"
            logger.warning("the compiled pass at %s does not load (%s): %s", path, first_line(error), outcome)
            with suppress(OSError):  # a cache that cannot be written
                path.unlink()
    if not build:
        return None
    try:
        return _load(module, _build(module, key))
    except Exception as error:
        # Compilation can fail in many ways; the eager pass computes the same.
        logger.warning("compilation failed, passes stay eager: %s", first_line(error))
        logger.debug("compilation failed", exc_info=True)
        return None


def _load(module: Pass, path: Path) -> Run:
    # torch._inductor.aoti_load_package without its processor check, which starts Python processes for two seconds to verify
    # what the package's path already encodes.
    package = torch.classes.outrider.Package(str(path))
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    package.load({name: tensors[name] for name in package.names()})
    run: Run = package.run
    return run


def export(module: Pass) -> ExportedProgram:
    """Export the pass with dynamic batch, lengths, cache size and number of logits."""
    cache, shape = module.cache, module.cache.shape
    batch, width, total = 2, 3, 5
    stores = [torch.zeros(store, dtype=cache.dtype) for store in shape.stores(rows=2, slots=8)]
    states = [torch.zeros(store) for store in shape.states.stores(2, cache.states.slots)]
    tokens = torch.zeros(1, total, dtype=torch.long)
    if module.span.start:
        tokens = torch.zeros(1, total, text_config(module.model).hidden_size)  # float32, as between packed layers
    inputs: tuple[Any, ...] = (
        tokens,
        torch.tensor([[0, 1, 0, 1, 2]]),
        torch.arange(batch),
        torch.zeros(batch, dtype=torch.long),
        torch.tensor([2, total]),
        torch.ones(batch, width, width, dtype=torch.bool).tril(),
        torch.arange(total - 1),
        *stores,
        *states,
    )
    blocks.activation_bits()  # cached before tracing, which would record the call as an operator of the pass
    dim = torch.export.Dim
    b, w, t = dim("b", min=1, max=4096), dim("w", min=1, max=1 << 20), dim("t", min=1, max=1 << 22)
    each, rows = {0: b}, dim("rows", min=1)
    cache_dims = ({1: rows, 3: dim("slots", min=1)},) * len(stores) + ({1: rows},) * len(states)
    shapes = ({1: t}, {1: t}, each, each, each, {0: b, 1: w, 2: w}, {0: dim("m", min=1)}, cache_dims)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's internal warnings
        return torch.export.export(module, inputs, strict=False, dynamic_shapes=shapes)


def _build(module: Pass, key: str) -> Path:
    """Compile the pass and store it in the cache."""
    expected = SECONDS + SECONDS_PER_LAYER * num_layers(text_config(module.model))
    name = Path(str(module.model.name_or_path or type(module.model).__name__)).name
    with (
        progress.logged(logger, f"compiling the pass of {name}, once per machine", expected),
        _private_inductor() as folder,
        tempfile.TemporaryDirectory() as built,
    ):
        exported = export(module)
        fuse_gates(exported)
        # Operations besides Outrider's are small: waking threads for them takes longer than computing them.
        options = {"aot_inductor.package_constants_in_so": False, "cpp.threads": 1, **_compiler_option(folder)}
        package = Path(built) / f"{key}{SUFFIX}"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=options)
        return disk_cache.store(package, FOLDER, key, SUFFIX)


@contextmanager
def _private_inductor() -> Iterator[Path]:
    """Use a private folder for inductor's cache: another user could create the default one, which is in /tmp."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before, folder = os.environ.get(name), disk_cache.cache_dir("inductor")
    os.environ[name] = str(folder)
    try:
        yield folder
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _compiler_option(folder: Path) -> dict[str, Any]:
    """Wrap a ``$CXX`` with arguments, such as ``ccache g++ -pipe``, in a script: inductor expects the path of one program."""
    command = find_compiler() or []
    if len(command) < 2:
        return {}
    script = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    names = [Path(word).name for word in command if not word.startswith("-")]  # inductor looks for g++ or clang++ in the name
    program = folder / "-".join([hashlib.sha256(script.encode()).hexdigest()[:8], *names])
    program.write_text(script)
    program.chmod(0o700)
    return {"cpp.cxx": str(program)}


def _compiled_in(tensor: Tensor) -> Any:
    """Return the numbers of a tensor that inductor compiles into a package as constants; None for those that it reads."""
    return tensor.tolist() if tensor.numel() == 1 or (tensor.dim() == 1 and len(tensor) <= SHORT) else None


def _own_code(model: nn.Module) -> str:
    """Return a hash of the files that define the model's modules, except torch's, transformers' and ours."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    names = {each.__module__ for each in classes if each.__module__.split(".")[0] not in ("torch", "transformers", "outrider")}
    files = sorted({file for name in names if (file := getattr(sys.modules.get(name), "__file__", None))})
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _key(module: Pass) -> str:
    """Return the key of the package: a hash of code, config (without names and versions), weight types, versions and CPU."""
    model = module.model
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    own = [*module.named_parameters(), *module.named_buffers()]
    tensors = [[name, list(each.shape), str(each.dtype), _compiled_in(each)] for name, each in own]
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    what = [
        type(model).__name__,
        _own_code(model),
        json.dumps(config, sort_keys=True, default=str),
        tensors,
        str((module.layers, module.span, module.cache.dtype, module.cache.shape, module.cache.states.slots)),
        torch.__version__,
        transformers.__version__,
        cpu_flags(),
        hashlib.sha256(b"".join(sources)).hexdigest(),
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:20]
