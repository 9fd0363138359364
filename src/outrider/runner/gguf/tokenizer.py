"""Build the tokenizer that a GGUF file holds, with the token ids of the original model's tokenizer.

transformers reads the file; what it gets wrong (5.21 to 5.24) is mended here: special tokens outside the byte alphabet, merges
that Llama 3's rule ignores, the prefix space of Llama 2, and BOS where the file does not say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import CONFIG_MAPPING, TOKENIZER_MAPPING, AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.integrations.gguf import gguf_tokenizer_mapping as transformers_gguf

from outrider.hub import is_cached_only
from outrider.runner.gguf.architectures import ARCHITECTURES
from outrider.runner.gguf.file import GgufFile
from outrider.runner.gguf.source import find, is_beside

logger = logging.getLogger(__name__)

KNOWN_SPLITS: Mapping[str, str] = transformers_gguf.GGUF_PRE_TOKENIZER_SPLITS

# Rules by which text is split before merges, beyond transformers' own: expressions in turn, each for what the others left.
_CJK = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK)),
    **dict.fromkeys(("glm4", "glm5"), (KNOWN_SPLITS["llama3"],)),
    "hunyuan": (KNOWN_SPLITS["qwen2"],),
}
GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "mellum", "gigachat", "a.x-4.0", "granite-docling")
GPT2_AND_DIGITS = ("command-r", "starcoder", "refact", "smollm", "exaone", "codeshell", "minerva-7b")  # one by one
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
# As in llama.cpp's llama-vocab.cpp: a piece of text that is a token stays one, and BOS is added if the file does not say.
IGNORING_MERGES = (*LLAMA3, "tekken", "minicpm5", "youtu", "glm4", "glm5")
ADDING_BOS = (*LLAMA3, "tekken", "chameleon")
NORMALISED = ("qwen2", "deepseek-r1-qwen")  # by the original tokenizers, not by llama.cpp
CONTROL, USER_DEFINED = 3, 4  # types of tokens


def load_tokenizer(source: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, hub id or GGUF file, as ``AutoTokenizer`` does."""
    path = find(source)
    if path is None or is_beside(source, path, "tokenizer.json", "tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=is_cached_only(source)
        )
    file = GgufFile.open(path)
    _warn_of_an_unknown_split(file)
    if file.architecture not in ARCHITECTURES:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)  # reads the whole header with gguf's class
    # Not by from_pretrained, which would prefer a tokenizer.json beside the file.
    kind: Any = TOKENIZER_MAPPING.get(CONFIG_MAPPING[file.record.model_type], TokenizersBackend)
    architecture, entries, options = transformers_gguf.get_gguf_tokenizer(str(path))
    if entries.get("pre_tokenizer_type") in ADDING_BOS:
        options.setdefault("add_bos_token", True)
    backend = _backend(architecture, entries)
    return kind(tokenizer_object=backend, name_or_path=str(path.parent), **options)  # type: ignore[no-any-return]


def _backend(architecture: str, entries: Mapping[str, Any]) -> Tokenizer:
    """Return transformers' tokenizer of these entries of a header, mended."""
    if entries.get("tokenizer_type") != "gpt2":
        # Nothing but the architecture tells whether text that begins with a space gets another: Phi-3's does, and Llama 2's.
        has_prefix = entries.get("tokenizer_type") == "llama" and entries.get("add_prefix_space", True)
        of_phi = has_prefix and architecture not in transformers_gguf.GGUF_SENTENCEPIECE_BUILDERS
        return transformers_gguf.convert_gguf_tokenizer("phi3" if of_phi else architecture, dict(entries))[0]
    state = json.loads(transformers_gguf.convert_gguf_tokenizer(architecture, dict(entries))[0].to_str())
    tokens, rule, vocabulary = entries["tokens"], entries.get("pre_tokenizer_type"), state["model"]["vocab"]
    spelled = {index: token for token, index in vocabulary.items()}
    types = entries.get("token_type") or ()
    # If the file has no types: those of transformers, without GPT-2's own special token if the vocabulary lacks it.
    added = [] if types else [each for each in state["added_tokens"] if each["id"] < len(tokens)]
    for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind in (CONTROL, USER_DEFINED):
            # transformers spells every token in the byte alphabet that has other characters, such as DeepSeek's bars.
            vocabulary.pop(spelled[index], None)
            vocabulary[token] = index
            how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind == CONTROL}
            added.append({"id": index, "content": token, **how})
    state["added_tokens"] = added
    state["model"]["ignore_merges"] = rule in IGNORING_MERGES
    if rule in NORMALISED:
        state["normalizer"] = {"type": "NFC"}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    splits = (r"\p{N}",) if rule in GPT2_AND_DIGITS else SPLITS.get(rule or "", ())
    if splits:
        parts = [Split(Regex(each), "isolated") for each in splits]
        tokenizer.pre_tokenizer = Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=rule in GPT2_AND_DIGITS)])
    return tokenizer


def _warn_of_an_unknown_split(file: GgufFile) -> None:
    """Log a warning if text is split before BPE by GPT-2's rule in place of the one that the file names."""
    rule = file.entry("tokenizer.ggml.pre")
    is_known = any(rule in each for each in (KNOWN_SPLITS, SPLITS, GPT2, GPT2_AND_DIGITS))
    if file.entry("tokenizer.ggml.model") == "gpt2" and not is_known:
        logger.warning(
            "%s: its tokenizer splits text by the rule %r, which is not known here: text is split by GPT-2's"
            " rule and may give other token ids; give a folder with this file and the original model's tokenizer",
            file.path,
            rule,
        )
