"""Outrider: lossless speculative decoding for any Hugging Face causal language model. The same text, faster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Chunk, Completion, GenerationInterrupted
    from outrider.engine.shortcuts import from_transformers, generate, stream
    from outrider.engine.stats import GenerationStats
    from outrider.proposers.base import Proposer, ScriptedProposer
    from outrider.proposers.plain import PlainProposer
    from outrider.types import Context, OutriderError, Proposal, SamplingParams, Verdict

__version__ = "0.1.0"

# Imported on first use: `import outrider` must not cost the seconds that torch and transformers take.
_HOMES = {
    "LLM": "outrider.engine.llm",
    "Chunk": "outrider.engine.outputs",
    "Completion": "outrider.engine.outputs",
    "Context": "outrider.types",
    "GenerationInterrupted": "outrider.engine.outputs",
    "GenerationStats": "outrider.engine.stats",
    "OutriderError": "outrider.types",
    "PlainProposer": "outrider.proposers.plain",
    "Proposal": "outrider.types",
    "Proposer": "outrider.proposers.base",
    "SamplingParams": "outrider.types",
    "ScriptedProposer": "outrider.proposers.base",
    "Verdict": "outrider.types",
    "from_transformers": "outrider.engine.shortcuts",
    "generate": "outrider.engine.shortcuts",
    "stream": "outrider.engine.shortcuts",
}

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Context",
    "GenerationInterrupted",
    "GenerationStats",
    "OutriderError",
    "PlainProposer",
    "Proposal",
    "Proposer",
    "SamplingParams",
    "ScriptedProposer",
    "Verdict",
    "from_transformers",
    "generate",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
