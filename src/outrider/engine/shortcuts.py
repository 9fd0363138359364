"""One call from a prompt to text: ``outrider.generate`` and ``outrider.stream``, and the door for a model you already have."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from outrider.engine.llm import LLM, Params, Prompts
from outrider.engine.outputs import Chunk, Completion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from outrider.engine.config import ModelSource

_last: list[tuple[tuple[ModelSource | None, dict[str, Any]], LLM]] = []  # loading costs seconds: the last one is kept


def generate(prompts: Prompts, params: Params = None, target: ModelSource | None = None, **options: Any) -> list[Completion]:
    """``LLM(target, **options).generate(prompts, params)``, keeping the models while target and options stay the same."""
    return _llm(target, options).generate(prompts, params)


def stream(
    prompts: Prompts, params: Params = None, target: ModelSource | None = None, **options: Any
) -> Generator[Chunk, None, None]:
    """``LLM(target, **options).stream(prompts, params)``, keeping the models while target and options stay the same."""
    return _llm(target, options).stream(prompts, params)


def from_transformers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> LLM:
    """An ``LLM`` around an already loaded transformers model (quantised or sharded ones too) and its tokenizer."""
    return LLM(model, tokenizer, **options)


def _llm(target: ModelSource | None, options: dict[str, Any]) -> LLM:
    key = (target, options)
    if not _last or _last[0][0] != key:
        _last.clear()
        _last.append((key, LLM(target, **options)))
    return _last[0][1]
