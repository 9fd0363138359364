"""What a user may choose about how a model is run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.types import OutriderError


@dataclass(frozen=True)
class RunnerConfig:
    """How a model is executed."""

    dtype: str = "auto"  # auto: as in the checkpoint, arithmetic in float32 where 16 bit is slow; or a torch dtype's name
    device: str = "auto"  # auto: cuda where there is one, else cpu
    max_len: int | None = None  # context window; None: the model's own
    max_batch: int = 8
    compile: str = "auto"  # auto: where a compiled pass is at hand or pays off; always; never
    prefill_chunk: int = 256  # tokens of prompts that are read between two rounds
    kv_memory: float | None = None  # GiB that the target's cache may take; None: what max_batch and max_len come to
    prefix_cache: bool = False  # keep what was cached of ended requests for others that begin with the same text
    trust_remote_code: bool = False
    max_drafts: int = 16  # of a request in one pass, where layers are recurrent: the memory of their states grows with it
    self_check: bool = True  # whether a model is held, when it is loaded, against its own forward pass without a cache

    def __post_init__(self) -> None:
        if self.compile not in ("auto", "always", "never"):
            raise OutriderError(f"compile must be auto, always or never, not {self.compile!r}")
        if self.max_batch < 1 or self.prefill_chunk < 1 or (self.max_len is not None and self.max_len < 1):
            raise OutriderError("max_batch, prefill_chunk and max_len must be at least 1")
        if self.kv_memory is not None and not 0 < self.kv_memory < math.inf:
            raise OutriderError("kv_memory must be a number of GiB above 0")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise OutriderError(f"unknown dtype {self.dtype!r}; use auto, bfloat16, float16 or float32")
