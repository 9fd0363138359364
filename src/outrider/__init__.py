"""Outrider: lossless speculative decoding for Hugging Face causal language models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from outrider.lazy import lazy_exports

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Chunk, Completion, Generation, GenerationInterrupted
    from outrider.engine.stats import GenerationStats
    from outrider.errors import OutriderError
    from outrider.proposers.base import Proposer, ScriptedProposer, chain_proposal
    from outrider.proposers.plain import PlainProposer
    from outrider.sampling_params import SamplingParams
    from outrider.types import Context, Proposal, Verdict

__version__ = "0.1.0"

# Otherwise torch's OpenMP threads spin after each operation on cores that the kernels' own threads need: prefill took 1.4 times
# as long. OpenMP reads the variable when torch is loaded, so it has no effect if torch was imported before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Context",
    "Generation",
    "GenerationInterrupted",
    "GenerationStats",
    "OutriderError",
    "PlainProposer",
    "Proposal",
    "Proposer",
    "SamplingParams",
    "ScriptedProposer",
    "Verdict",
    "chain_proposal",
]
_MODULES = {
    "outrider.engine.llm": ("LLM",),
    "outrider.engine.outputs": ("Chunk", "Completion", "Generation", "GenerationInterrupted"),
    "outrider.engine.stats": ("GenerationStats",),
    "outrider.errors": ("OutriderError",),
    "outrider.proposers.base": ("Proposer", "ScriptedProposer", "chain_proposal"),
    "outrider.proposers.plain": ("PlainProposer",),
    "outrider.sampling_params": ("SamplingParams",),
    "outrider.types": ("Context", "Proposal", "Verdict"),
}
__getattr__ = lazy_exports(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
