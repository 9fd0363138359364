"""Find GGUF files, and load the config that a file holds."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from outrider.files import expanded
from outrider.runner.gguf.architectures import ARCHITECTURES
from outrider.runner.gguf.file import GgufFile
from outrider.types import OutriderError
from outrider.weight_files import gguf_parts, weight_files

# The beginning of every file of llama.cpp: version, numbers of tensors and entries, and the first entry, a string.
FIRST_ENTRY = re.compile(rb"GGUF.{20}\x14\0{7}general\.architecture\x08\0{3}(.{8})(.*)", re.DOTALL)


def find(source: object) -> Path | None:
    """Return the GGUF file of a source: the file itself, or the only model in a folder without other weights; otherwise None.

    Of a file in parts it is the first part, whichever is named. Only files of supported architectures count as models; if there
    are none, every file counts, so that the error names it.

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


def has_own_file(source: str | Path, file: Path, *names: str) -> bool:
    """Return whether the folder that the user gave holds any of these files next to its GGUF file.

    False if the file itself was given.
    """
    return expanded(source).is_dir() and any((file.parent / name).exists() for name in names)


def load_config(source: str | Path, path: Path) -> PreTrainedConfig:
    """Read a model's config from config.json in the folder ``source``, else from the file.

    Raises ``OutriderError`` for a broken or unsupported file.
    """
    file = GgufFile.open(path)
    file.refuse_unsupported()
    config = _language_config(path.parent) if has_own_file(source, path, "config.json") else file.config()
    for name, value in file.record.fixed.items():
        setattr(config, name, value)
    if file.is_quantized:
        config.quantization_config = {"quant_method": "gguf"}
    return config


def _language_config(folder: Path) -> PreTrainedConfig:
    """Return the config of the language model in a folder's config.json: files hold no other part of a multimodal model."""
    whole = AutoConfig.from_pretrained(folder)
    text: PreTrainedConfig = whole.get_text_config(decoder=True)
    for name in ("tie_word_embeddings", "eos_token_id"):  # of a multimodal model in the outer config
        if getattr(whole, name, None) is not None:
            setattr(text, name, getattr(whole, name))
    return text
