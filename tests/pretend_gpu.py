"""A CUDA device that is not there: its tensors are computed on the CPU, and what a real one refuses raises torch's error.

Most mistakes on a GPU are tensors on the wrong device, and these show without a GPU: ``pretend_gpu`` makes ``device="cuda"``
usable in a torch built for CPUs. Each operator checks that its tensors are on one device (only scalars and indices may be
on the CPU), operators without a CUDA kernel fail, and a graph replays its recorded operators on the memory of its recording.
Not emulated: Triton, compiled passes, streams, rounding, memory and speed. Only the thread that enters it has the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from outrider.native.build import find_compiler
from outrider.runner import compiled_gpu, graphs, kernels, linear, recurrence

aten, operators = torch.ops.aten, torch.ops.outrider
DEVICE = torch.device("cuda", 0)
COPIES = (aten.copy_.default, aten._to_copy.default)
# They take indices on the CPU, and copy them to the device.
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default)
REFERENCES: dict[Any, Callable[..., Tensor]] = {
    operators.attend.default: kernels.reference_attend,
    operators.short_conv.default: recurrence.reference_short_conv,
    operators.delta_scan.default: recurrence.reference_delta_scan,
    operators.selective_scan.default: recurrence.reference_selective_scan,
}
# torch sets the current device around some operators. Builds for CPUs do not register how.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());
"""
FACTS: dict[str, Callable[..., Any]] = {
    "_lazy_init": lambda: None,
    "current_stream": mock.Mock(),
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_device_name": lambda *_: "pretended GPU",
}


class GpuTensor(Tensor):
    """A tensor on the pretended device. ``on_cpu`` has its numbers."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.on_cpu = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} of a tensor of pretend_gpu, outside of it")

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GpuTensor({self.on_cpu!r})"


Generator = torch.Generator  # ``pretend_gpu`` replaces it


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


class PretendedDevice(TorchDispatchMode):
    """Runs each operator on the ``on_cpu`` tensors after checking their devices, and records it while a graph is captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded: list[tuple[Any, Any, Any, Any]] | None = None
        self._generators: list[torch.Generator] = []  # those of this device

    def generator(self, device: Any = "cpu") -> torch.Generator:
        """Stand in for ``torch.Generator``."""
        made = Generator()
        if _is_ours(device):
            self._generators.append(made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = [each for each in tensors if isinstance(each, GpuTensor)]
        device = kwargs.get("device")
        if not ours and not _is_ours(device):
            return func(*args, **kwargs)
        if func in REFERENCES:
            with self:
                return REFERENCES[func](*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode these operators arrive whole
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        self._check(func, args, kwargs, tensors)
        stays = isinstance(args[0], GpuTensor) if func is aten.copy_.default else device is None or _is_ours(device)
        return self._computed(func, args, kwargs, stays and func is not aten._local_scalar_dense.default)

    def _computed(self, func: Any, args: Any, kwargs: Any, is_on_gpu: bool) -> Any:
        """Run an operator on the CPU; wrap its outputs if they are on the pretended device."""
        inner_args, inner_kwargs = tree_map_only(GpuTensor, lambda each: each.on_cpu, (args, kwargs))
        inner_kwargs.pop("pin_memory", None)
        if "device" in inner_kwargs:
            inner_kwargs["device"] = torch.device("cpu")
        found = func(*inner_args, **inner_kwargs)
        if func is aten._to_copy.default and found is inner_args[0]:
            found = found.clone()
        if self._recorded is not None:
            self._recorded.append((func, inner_args, inner_kwargs, found))
        changed = [
            arg for arg, each in zip(args, func._schema.arguments, strict=False) if each.alias_info and each.alias_info.is_write
        ]
        if not is_on_gpu:
            return found
        if len(changed) == 1 and isinstance(found, Tensor):
            return changed[0]
        # A view of a tensor from outside of inference mode does not belong to inference mode.
        is_view = any(each.alias_info is not None for each in func._schema.arguments) and not args[0].is_inference()
        with torch.inference_mode(torch.is_inference_mode_enabled() and not is_view):
            return tree_map_only(Tensor, GpuTensor, found)

    def _check(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        """Raise what torch raises for tensors on two devices, for a missing kernel, and for a wait while capturing."""
        others = [each for each in tensors if not isinstance(each, GpuTensor) and each.dim() > 0]
        if self._recorded is not None and (func in WAITS or (others and func in (*COPIES, *INDEXING))):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func.namespace == "outrider":
            raise NotImplementedError(f"Could not run '{func}' with arguments from the 'CUDA' backend")
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata not in {each._cdata for each in self._generators}:  # type: ignore[attr-defined]
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if func in INDEXING and isinstance(args[0], GpuTensor):
            others = [each for each in args[2:3] if not isinstance(each, GpuTensor) and each.dim() > 0]
        if others and func not in COPIES:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {func}")

    def record(self, function: Callable[[], Sequence[Tensor]], device: torch.device) -> tuple[graphs.Replay, Sequence[Tensor]]:
        """Stand in for ``graphs.record_cuda``: a replay repeats the operators, not the Python code that called them."""
        assert _is_ours(device)
        function()
        recorded: list[tuple[Any, Any, Any, Any]] = []
        self._recorded = recorded
        try:
            outputs = function()
        finally:
            self._recorded = None

        def replay() -> None:
            for func, args, kwargs, found in recorded:
                for kept, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)

        return replay, outputs


def is_plain(model: nn.Module) -> bool:
    """Stand in for ``linear.is_plain``, which compares the types of weights with torch's."""
    return not getattr(model, "is_quantized", False) and all(
        type(each.data) in (Tensor, GpuTensor) for each in model.parameters()
    )


def register_guard(folder: Path) -> None:
    """Compile and load GUARD, once per process: without it, torch cannot assign to a part of a tensor on the device."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    root = Path(torch.__file__).parent
    command = [*(find_compiler() or []), "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(source)]
    subprocess.run([*command, "-o", str(library), f"-L{root / 'lib'}", "-lc10"], check=True, capture_output=True)
    ctypes.CDLL(str(library))


@contextlib.contextmanager
def pretend_gpu() -> Iterator[None]:
    """Make ``device="cuda"`` usable in this thread, after ``register_guard``."""
    device = PretendedDevice()
    with contextlib.ExitStack() as stack:
        for name, fact in FACTS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fact))
        for module in (linear, compiled_gpu):
            stack.enter_context(mock.patch.object(module, "is_plain", is_plain))
        stack.enter_context(mock.patch.object(graphs, "record_cuda", device.record))
        stack.enter_context(mock.patch.object(torch, "Generator", device.generator))
        # Tied weights stay tied when a model moves to a tensor of another type.
        stack.enter_context(mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device=...) uses the dispatcher
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(device)
        yield
