"""Executing a model: loading, KV cache, fixed-shape passes. This room does not know where drafts come from."""

from outrider.runner.model_runner import ModelRunner, RunnerConfig

__all__ = ["ModelRunner", "RunnerConfig"]
