"""Passes compiled ahead of time: exported once with free shapes, built by inductor, kept on disk, loaded in milliseconds.

Why ahead of time and not ``torch.compile``: a process that finds the package on disk traces nothing and checks no guards, so
the first token of a fresh process comes from compiled code. Why free shapes: the time goes to Outrider's two operators, which
do not care, and one package then serves every batch, draft length and cache size. The package holds no weights: it reads the
model's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.export import ExportedProgram
from transformers import PreTrainedModel

from outrider.cpp_library import cpu_flags
from outrider.disk_cache import cache_dir
from outrider.runner.gates import fuse_gates
from outrider.runner.linear import is_packed
from outrider.runner.loading import text_config

if TYPE_CHECKING:
    from outrider.runner.passes import Pass

logger = logging.getLogger(__name__)

Run = Callable[[list[Tensor]], list[Tensor]]

# what a package is made from, beside the model
TRACED = ("attention.py", "compiled.py", "gates.py", "layer_span.py", "linear.py", "passes.py", "kernels/__init__.py")


def is_supported(model: PreTrainedModel) -> bool:
    """Only models wholly on the CPU kernels: elsewhere passes stay eager or are captured as graphs."""
    return model.device.type == "cpu" and is_packed(model)


class _Thread(threading.local):
    """What is so for one thread."""

    may_build = True


_thread = _Thread()


@contextmanager
def without_building() -> Iterator[None]:
    """Within, this thread builds no pass: it would hold up everyone whom the thread serves, and change the bits of answers."""
    before, _thread.may_build = _thread.may_build, False
    try:
        yield
    finally:
        _thread.may_build = before


def may_build() -> bool:
    return _thread.may_build


def load(module: Pass, build: bool) -> Run | None:
    """The compiled form of a ``Pass``: from disk, else built if ``build``. None where there is none or it cannot be built."""
    build &= may_build()
    path = _package_path(module)
    found = path.exists()
    if not found:
        if not build:
            return None
        try:
            _build(module, path)
        except Exception as error:
            # Compilers fail in more ways than can be listed, and the eager pass computes the same.
            logger.warning("this model does not compile, its passes stay eager: %s", str(error).strip().splitlines()[:1])
            logger.debug("compilation failed", exc_info=True)
            return None
    try:
        return _load(module, path)
    except Exception as error:
        path.unlink(missing_ok=True)
        if found and build:
            logger.warning("the compiled pass at %s does not load (%s): it is compiled anew", path, error)
            return load(module, build)
        logger.warning("the compiled pass at %s does not load (%s): removed, passes stay eager", path, error)
        return None


def _load(module: Pass, path: Path) -> Run:
    # What torch._inductor.aoti_load_package does, less its look at the processor: it starts Pythons that load torch, two
    # seconds before a first token, to compare what the package's path already says.
    package = torch.classes.outrider.Package(str(path))
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    package.load({name: tensors[name] for name in package.names()})
    run: Run = package.run
    return run


def export(module: Pass) -> ExportedProgram:
    """The pass as a graph: batch, lengths, cache size and number of logits are free."""
    shape = module.cache_shape
    batch, width, total = 2, 3, 5
    store = (shape.num_layers, 2, shape.num_kv_heads, 8)
    tokens = torch.zeros(1, total, dtype=torch.long)
    if module.span.start:
        tokens = torch.zeros(1, total, text_config(module.model).hidden_size)  # float32, as all between packed layers is
    inputs: tuple[Any, ...] = (
        tokens,
        torch.tensor([[0, 1, 0, 1, 2]]),
        torch.arange(batch),
        torch.zeros(batch, dtype=torch.long),
        torch.tensor([2, total]),
        torch.ones(batch, width, width, dtype=torch.bool).tril(),
        torch.arange(total - 1),
        torch.zeros(*store, shape.key_dim, dtype=module.cache_dtype),
        torch.zeros(*store, shape.value_dim, dtype=module.cache_dtype),
    )
    dim = torch.export.Dim
    b, w, t = dim("b", min=1, max=4096), dim("w", min=1, max=1 << 20), dim("t", min=1, max=1 << 22)
    each, store_dims = {0: b}, {1: dim("rows", min=1), 3: dim("slots", min=1)}
    shapes = ({1: t}, {1: t}, each, each, each, {0: b, 1: w, 2: w}, {0: dim("m", min=1)}, store_dims, store_dims)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own use of itself
        return torch.export.export(module, inputs, strict=False, dynamic_shapes=shapes)


def _build(module: Pass, path: Path) -> None:
    logger.info("compiling the pass of %s for this machine: once, about a minute; kept in %s", _name(module), path.parent)
    exported = export(module)
    fuse_gates(exported)
    part = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    # What is left beside Outrider's operators is small: waking threads for it would take longer than doing it.
    options = {"aot_inductor.package_constants_in_so": False, "cpp.threads": 1}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(part), inductor_configs=options)
    part.replace(path)  # atomic: two processes may build at once


def _name(module: Pass) -> str:
    return Path(str(module.model.name_or_path or type(module.model).__name__)).name


def _package_path(module: Pass) -> Path:
    """One package per computation: the config without names and dates, the kinds of weights, the versions and the CPU."""
    model = module.model
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in [*module.named_parameters(), *module.named_buffers()]]
    sources = [Path(__file__).parent.joinpath(name).read_bytes() for name in TRACED]
    what = [
        type(model).__name__,
        json.dumps(config, sort_keys=True, default=str),
        tensors,
        str((module.layers, module.span, module.cache_dtype)),
        torch.__version__,
        transformers.__version__,
        cpu_flags(),
        hashlib.sha256(b"".join(sources)).hexdigest(),
    ]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:20]
    return cache_dir("passes") / f"{digest}.pt2"
