"""GGUF checkpoints: one file with weights, config and tokenizer.

transformers maps most names of tensors and of config entries; ``architectures`` has the rest. Unsupported files are refused
before weights are read.
"""

from outrider.runner.gguf.file import PLAIN, GgufFile, by_parameter
from outrider.runner.gguf.source import architecture_of, find, load_config
from outrider.runner.gguf.tokenizer import load_tokenizer
from outrider.runner.gguf.weights import fill, restorer, rows_of, values_of

__all__ = [
    "PLAIN",
    "GgufFile",
    "architecture_of",
    "by_parameter",
    "fill",
    "find",
    "load_config",
    "load_tokenizer",
    "restorer",
    "rows_of",
    "values_of",
]
