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

# torch's OpenMP threads would spin after each of its operations on cores that the kernels' own threads need: prompts took 1.4
# times as long. Read when torch is loaded; without effect if that was before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Imported lazily: `import outrider` must not take the seconds that importing torch and transformers takes.
_HOMES = {
    "LLM": "outrider.engine.llm",
    "Chunk": "outrider.engine.outputs",
    "Completion": "outrider.engine.outputs",
    "Context": "outrider.types",
    "Generation": "outrider.engine.outputs",
    "GenerationInterrupted": "outrider.engine.outputs",
    "GenerationStats": "outrider.engine.stats",
    "OutriderError": "outrider.errors",
    "PlainProposer": "outrider.proposers.plain",
    "Proposal": "outrider.types",
    "Proposer": "outrider.proposers.base",
    "SamplingParams": "outrider.sampling_params",
    "ScriptedProposer": "outrider.proposers.base",
    "Verdict": "outrider.types",
    "chain_proposal": "outrider.proposers.base",
}

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
__getattr__ = lazy_exports(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
