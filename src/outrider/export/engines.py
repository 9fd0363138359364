"""The engines that a plan can be written for, by name; imported when asked for."""

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
