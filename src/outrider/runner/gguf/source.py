"""Find GGUF files, and load the config and the tokenizer that a file holds."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from outrider.files import expanded
from outrider.hub import is_cached_only
from outrider.memory import gguf_parts, weight_files
from outrider.runner.gguf.architectures import ARCHITECTURES
from outrider.runner.gguf.file import GgufFile
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

# The beginning of every file of llama.cpp: version, numbers of tensors and entries, and the first entry, a string.
FIRST_ENTRY = re.compile(rb"GGUF.{20}\x14\0{7}general\.architecture\x08\0{3}(.{8})(.*)", re.DOTALL)
# Rules for which GPT-2's gives the same tokens: merges learned from single digits never join two of them.
SPLIT_LIKE_GPT2 = ("gpt-2", "smollm")


def find(source: object) -> Path | None:
    """Return the GGUF file of a source: the file itself, or the only model in a folder without other weights; otherwise None.

    Of a file in parts it is the first part, whichever is named. Models are files of supported architectures, or all if none is.

    Raises ``OutriderError`` for a folder with several models in GGUF files.
    """
    if not isinstance(source, (str, Path)) or not str(source):
        return None
    path = expanded(source)
    files = weight_files(path)
    if not files or files[0].suffix != ".gguf":
        return None
    models = [each for each in files if architecture_of(each) in ARCHITECTURES] or files
    others = {*models}.difference(gguf_parts(models[0]))
    if others:
        raise OutriderError(f"{source} holds {len(models)} models in GGUF files: name one of them, such as {models[0]}")
    return models[0]


def architecture_of(path: Path) -> str:
    """Return the architecture of a GGUF file, by the first entry of its header; "" for other files."""
    try:
        with path.open("rb") as opened:
            found = FIRST_ENTRY.match(opened.read(256))
    except OSError:  # reported when the file is loaded
        return ""
    return found[2][: int.from_bytes(found[1], "little")].decode(errors="replace") if found else ""


def load_tokenizer(source: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, hub id or GGUF file, as ``AutoTokenizer`` does."""
    path = find(source)
    if path is None or _beside(source, path, "tokenizer.json", "tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=is_cached_only(source)
        )
    file = GgufFile.open(path)
    _warn_of_an_unknown_split(file)
    if file.architecture in ARCHITECTURES:  # not by from_pretrained, which would prefer a tokenizer.json beside the file
        kind: Any = TOKENIZER_MAPPING.get(CONFIG_MAPPING[file.record.model_type], TokenizersBackend)
        return kind(gguf_file=path.name, name_or_path=str(path.parent))  # type: ignore[no-any-return]
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)  # reads the whole header with gguf's own class


def _beside(source: str | Path, file: Path, *names: str) -> bool:
    """Return whether any of these files is next to a GGUF file. They count only if the folder was given."""
    return expanded(source).is_dir() and any((file.parent / name).exists() for name in names)


def load_config(source: str | Path, path: Path) -> PreTrainedConfig:
    """Read a model's config from config.json in the folder ``source``, else from the file.

    Raises ``OutriderError`` for a broken or unsupported file.
    """
    file = GgufFile.open(path)
    file.refuse_unsupported()
    config: PreTrainedConfig = (
        AutoConfig.from_pretrained(path.parent) if _beside(source, path, "config.json") else file.config()
    )
    for name, value in file.record.fixed.items():
        setattr(config, name, value)
    if file.is_quantized:
        config.quantization_config = {"quant_method": "gguf"}
    return config


def _warn_of_an_unknown_split(file: GgufFile) -> None:
    """Log a warning if transformers splits text before BPE by GPT-2's rule in place of the one that the file names."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = file.entry("tokenizer.ggml.pre")
    is_known = name in GGUF_PRE_TOKENIZER_SPLITS or name in SPLIT_LIKE_GPT2
    if file.entry("tokenizer.ggml.model") == "gpt2" and not is_known:
        logger.warning(
            "%s: its tokenizer splits text by the rule %r, which transformers does not know: text is split by GPT-2's"
            " rule and may give other token ids; pass the original model's folder as the tokenizer (--tokenizer)",
            file.path,
            name,
        )
