"""What a user may choose about how a model is run. Imports no torch: the command line reads these declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.options import INT32, LIMITS, MODELS, Choice, Flag, Number, Whole, check, option

if TYPE_CHECKING:
    import torch


def _dtype_name(value: Any) -> Any:
    """``torch.float32`` by its name."""
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


@dataclass(frozen=True)
class Device:
    """A torch device by its name."""

    expected: str = "auto or a torch device, such as cpu, cuda or cuda:1"
    flag_type: Any = str

    def read(self, value: Any) -> str:
        name = str(value) if type(value).__name__ == "device" else value
        if not isinstance(name, str):
            raise TypeError("not a name")
        if name not in ("auto", "cpu"):
            import torch

            torch.device(name)
        return name


@dataclass(frozen=True)
class RunnerConfig:
    """How a model is executed. Raises ``OutriderError`` for a value of the wrong type or out of bounds."""

    dtype: str | torch.dtype = option(
        Choice(("auto", "bfloat16", "float16", "float32"), _dtype_name),
        "auto",
        "Type of the weights; auto: as in the checkpoint, arithmetic in float32 where 16 bits are slow.",
        panel=MODELS,
        in_plan=True,
    )
    device: str | torch.device = option(
        Device(), "auto", "Where the model runs; auto: a GPU if there is one.", panel=MODELS, in_plan=True
    )
    max_len: int | None = option(
        Whole(2),
        None,
        "Longest context in tokens, prompt included; it sets the memory of the cache (default: the model's own).",
        panel=MODELS,
        in_plan=True,
    )
    max_batch: int = option(Whole(1, 65536), 8, "Sequences that run at once.", panel=LIMITS, in_plan=True)
    compile: str = option(
        Choice(("auto", "always", "never")),
        "auto",
        "Whether to compile the passes; auto: where a compiled pass is cached or pays off.",
        panel=MODELS,
        in_plan=True,
    )
    prefill_chunk: int = option(Whole(1, INT32), 256, "Tokens of prompts that are read between two rounds.")
    kv_memory: float | None = option(
        Number(above=0, at_most=2**20),
        None,
        "GiB that the target's cache may take (default: what max_batch and max_len come to).",
        panel=LIMITS,
        in_plan=True,
    )
    prefix_cache: bool = option(Flag(), False, "Keep the cache of ended requests for prompts that begin with the same text.")
    trust_remote_code: bool = option(Flag(), False, "Run Python code that comes with the model.", panel=MODELS)
    max_drafts: int = option(
        Whole(1, 4096), 16, "Most drafts of a request in one pass where layers are recurrent: each takes memory for a state."
    )
    self_check: bool = option(Flag(), True, "Check a loaded model against its own forward pass without a cache.")

    def __post_init__(self) -> None:
        check(self)
