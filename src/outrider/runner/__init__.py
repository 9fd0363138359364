"""Executing a model: loading, KV cache, fixed-shape passes. This room does not know where drafts come from."""

from outrider.runner.config import RunnerConfig
from outrider.runner.model_runner import ModelRunner

__all__ = ["ModelRunner", "RunnerConfig"]
