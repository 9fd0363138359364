"""Export plans to other engines: the same models and drafting method as their files and commands."""

from outrider.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "vllm": "outrider.export.vllm:Vllm",
        "sglang": "outrider.export.sglang:Sglang",
        "transformers": "outrider.export.transformers:Transformers",
    },
)
