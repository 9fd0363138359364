"""The engines that can be compared: interpreter, capabilities and environment of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS = "outrider"


@dataclass(frozen=True)
class Setting:
    """One setting of one engine."""

    method: str
    dtype: str
    k: int = 0
    schedule: str = "constant"

    @property
    def label(self) -> str:
        """Label in tables: the draft length, and its schedule if it is not constant."""
        if self.method == "plain":
            return "-"
        return str(self.k) if self.schedule == "constant" else f"{self.schedule} {self.k or ''}".strip()


@dataclass(frozen=True)
class EngineSpec:
    """One engine: its worker, the number formats worth trying, and the draft lengths it chooses itself."""

    name: str
    dtypes: tuple[str, ...]
    fixed_at_start: bool = False  # method and K are fixed when the process starts
    schedules: tuple[tuple[str, int], ...] = ()  # (schedule, first K), of method draft; Outrider's also of ngram
    by_bits: Mapping[int, str] = field(default_factory=dict)  # best number format for 16, 8 and 4 bits per weight
    reads_gguf: bool = False  # without converting the file
    preload: tuple[str, ...] = ()  # libraries in the environment's lib folder, for LD_PRELOAD

    def python(self, venvs: Path) -> Path:
        """Return the interpreter of this engine's worker; Outrider uses the driver's."""
        return Path(sys.executable) if self.name == OURS else venvs / self.name / "bin" / "python"

    def script(self) -> Path:
        return HERE / f"worker_{self.name}.py"

    def environment(self, venvs: Path) -> dict[str, str]:
        """Return the environment of the worker's process.

        Without OMP_WAIT_POLICY, which importing outrider set here: llama.cpp's threads wait for each other thousands of times
        a second, and sleeping cost it a quarter of its speed.
        """
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        found = [str(path) for name in self.preload for path in (venvs / self.name).glob(f"lib/{name}")]
        return inherited | ({"LD_PRELOAD": ":".join(found)} if found else {})

    def formats(self, bits: int | str | None) -> tuple[str, ...]:
        """Return the number formats to try for these bits per weight or this type of GGUF file; None: all."""
        if isinstance(bits, str):
            return ("auto",) if self.reads_gguf else ()
        if bits is None:
            return self.dtypes
        return (self.by_bits[bits],) if bits in self.by_bits else ()

    def settings(self, method: str, dtype: str, ks: list[int]) -> list[Setting]:
        """Return every setting of a method in one number format."""
        if method == "plain":
            return [Setting(method, dtype)]
        settings = [Setting(method, dtype, k) for k in ks]
        if method == "draft" or self.name == OURS:
            settings += [Setting(method, dtype, k, schedule) for schedule, k in self.schedules]
        return settings


ENGINES = {
    spec.name: spec
    for spec in (
        EngineSpec(
            OURS,
            dtypes=("auto",),
            schedules=(("auto", 0),),
            by_bits={16: "bfloat16", 8: "int8", 4: "int4"},
            reads_gguf=True,
        ),
        EngineSpec(
            "transformers",
            dtypes=("float32", "bfloat16", "float16"),
            schedules=(("heuristic", 5), ("dynamic", 20)),
            by_bits={16: "bfloat16"},
        ),
        EngineSpec(
            "vllm",
            dtypes=("float32", "bfloat16", "float16"),
            fixed_at_start=True,
            by_bits={16: "bfloat16"},
            preload=("libiomp5.so",),  # recommended by vLLM's documentation for CPUs
        ),
        EngineSpec(
            "openvino",
            dtypes=("float32", "float16"),
            by_bits={16: "float16", 8: "int8", 4: "int4"},
            reads_gguf=True,
        ),
        EngineSpec(
            "llamacpp",
            dtypes=("float32", "bfloat16", "float16"),
            by_bits={16: "bfloat16", 8: "q8_0", 4: "q4_k_m"},
            reads_gguf=True,
        ),
    )
}
BITS = (16, 8, 4)
