"""The loop, the scheduler, statistics and the ``LLM`` facade. This room knows no method's name."""

from outrider.engine.engine import Emission, Engine, Observation
from outrider.engine.llm import LLM
from outrider.engine.outputs import Chunk, Completion, GenerationInterrupted
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
    "GenerationInterrupted",
    "GenerationStats",
    "LengthPolicy",
    "Observation",
    "RoundResult",
    "Scheduler",
]
