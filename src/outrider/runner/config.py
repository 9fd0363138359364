"""Options of model execution. Does not import torch, because the command line reads these declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.options import INT32, LIMITS, MODELS, CheckedOptions, Kind, boolean, choice, number, option, whole

if TYPE_CHECKING:
    import torch

BITS = {"int8": 8, "int4": 4}  # bits per weight, by the values of the option ``weights``


def _dtype_name(value: Any) -> Any:
    """Return the name of a torch dtype, such as ``"float32"``; other values as they are."""
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def _device_name(value: Any) -> str:
    name = str(value) if type(value).__name__ == "device" else value
    if not isinstance(name, str):
        raise TypeError("not a name")
    if name not in ("auto", "cpu"):
        import torch

        torch.device(name)
    return name


def torch_device(named: str | torch.device) -> torch.device:
    """Return the device of an option; ``"auto"`` is a GPU if there is one."""
    import torch

    return torch.device(named if named != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def torch_dtype(named: str | torch.dtype) -> torch.dtype | None:
    """Return the dtype of an option; None for ``"auto"``."""
    import torch

    if named == "auto":
        return None
    found: torch.dtype = getattr(torch, named) if isinstance(named, str) else named
    return found


DEVICE = Kind("auto or a torch device, such as cpu, cuda or cuda:1", _device_name)


@dataclass(frozen=True)
class RunnerConfig(CheckedOptions):
    """How a model is executed. Raises ``OutriderError`` for a value of the wrong type or out of bounds."""

    dtype: str | torch.dtype = option(
        choice("auto", "bfloat16", "float16", "float32", spelled=_dtype_name),
        "auto",
        "Type of the weights; auto: as in the checkpoint, with float32 arithmetic if 16-bit arithmetic is slow.",
        panel=MODELS,
        in_plan=True,
    )
    weights: str | None = option(
        choice(*BITS),
        None,
        "Quantise the target's weights to 8 or 4 bits at load time, on a CPU (default: as in the checkpoint).",
        panel=MODELS,
        in_plan=True,
    )
    device: str | torch.device = option(
        DEVICE,
        "auto",
        "Device: cpu, cuda, cuda:1; auto: a GPU if there is one.",
        panel=MODELS,
        in_plan=True,
    )
    max_len: int | None = option(
        whole(2, INT32),
        None,
        "Context length in tokens, prompt included; determines the cache size (default: the model's own; longrope: the original"
        " one).",
        panel=MODELS,
        in_plan=True,
    )
    max_batch: int = option(
        whole(1, 65536), 8, "Maximum number of sequences that run concurrently.", panel=LIMITS, in_plan=True
    )
    compile: str = option(
        choice("auto", "always", "never"),
        "auto",
        "Compile the passes; auto: if compiled ones are cached, and before a long run (default: auto; always in"
        " compare, bench, tune, audit, demo and serve).",
        panel=MODELS,
        in_plan=True,
    )
    prefill_chunk: int = option(whole(1, INT32), 256, "Prompt tokens that are processed between two rounds.")
    kv_memory: float | None = option(
        number(above=0, at_most=2**20),
        None,
        "GiB limit of the target's KV cache (default: enough for --max-batch sequences of --max-len).",
        panel=LIMITS,
        in_plan=True,
    )
    prefix_cache: bool = option(boolean(), True, "Reuse the KV cache of earlier requests for prompts with the same prefix.")
    trust_remote_code: bool = option(
        boolean(),
        False,
        "Allow Python code of the repositories of the target and of a draft that you name to run.",
        panel=MODELS,
    )
    max_drafts: int = option(
        whole(1, 4096), 16, "Maximum drafts per request and pass with recurrent layers, which keep one state per draft."
    )
    self_check: bool = option(
        boolean(),
        True,
        "Check that a loaded model's output equals that of its own forward pass without a cache. Large models are checked again"
        " only if their files, the code or the machine has changed.",
        panel=MODELS,
    )

    @property
    def bits(self) -> int | None:
        """Return the bits of rounded weights; None if weights stay as in the checkpoint."""
        return None if self.weights is None else BITS[self.weights]
