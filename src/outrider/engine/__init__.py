"""Engine loop, scheduler, statistics and the ``LLM`` facade. Independent of drafting methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.lazy import lazy_exports

if TYPE_CHECKING:
    from outrider.engine.engine import Engine, Observation
    from outrider.engine.llm import LLM
    from outrider.engine.options import Speculation
    from outrider.engine.outputs import Chunk, Completion, Emission, Generation, GenerationInterrupted
    from outrider.engine.policy import FixedLength, LengthPolicy
    from outrider.engine.round import RoundResult
    from outrider.engine.scheduler import Scheduler
    from outrider.engine.stats import GenerationStats

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Emission",
    "Engine",
    "FixedLength",
    "Generation",
    "GenerationInterrupted",
    "GenerationStats",
    "LengthPolicy",
    "Observation",
    "RoundResult",
    "Scheduler",
    "Speculation",
]
__getattr__ = lazy_exports(
    __name__,
    {
        "outrider.engine.engine": ("Engine", "Observation"),
        "outrider.engine.llm": ("LLM",),
        "outrider.engine.options": ("Speculation",),
        "outrider.engine.outputs": ("Chunk", "Completion", "Emission", "Generation", "GenerationInterrupted"),
        "outrider.engine.policy": ("FixedLength", "LengthPolicy"),
        "outrider.engine.round": ("RoundResult",),
        "outrider.engine.scheduler": ("Scheduler",),
        "outrider.engine.stats": ("GenerationStats",),
    },
)
