"""GGUF checkpoints: one file with weights, config and tokenizer.

transformers maps most names of tensors and of config entries; ``architectures`` has the rest. Unsupported files are refused
before weights are read.
"""

from outrider.runner.gguf.file import PLAIN, GgufFile, tensors_by_parameter
from outrider.runner.gguf.source import architecture_of, find, load_config
from outrider.runner.gguf.tokenizer import load_tokenizer
from outrider.runner.gguf.weights import converter_undo, join_parts, load_weights, read_tensor

__all__ = [
    "PLAIN",
    "GgufFile",
    "architecture_of",
    "converter_undo",
    "find",
    "join_parts",
    "load_config",
    "load_tokenizer",
    "load_weights",
    "read_tensor",
    "tensors_by_parameter",
]
