"""Registry of export engines by name. They are imported on use."""

from __future__ import annotations

from outrider.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "vllm": "outrider.export.vllm:Vllm",
        "sglang": "outrider.export.sglang:Sglang",
        "transformers": "outrider.export.transformers:Transformers",
    },
)
