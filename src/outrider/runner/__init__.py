"""Model execution: loading, KV cache, passes. Independent of drafting methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.lazy import lazy_exports
from outrider.runner.config import RunnerConfig

if TYPE_CHECKING:
    from outrider.runner.model_runner import ModelRunner

__all__ = ["ModelRunner", "RunnerConfig"]
__getattr__ = lazy_exports(__name__, {"outrider.runner.model_runner": ("ModelRunner",)})
