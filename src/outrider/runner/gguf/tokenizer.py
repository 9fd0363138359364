"""Build the tokenizer that a GGUF file holds, with the token ids of the original model's tokenizer.

transformers builds those of SentencePiece. Byte-level ones are built here: transformers (5.21 to 5.24) gives special tokens
outside the byte alphabet other ids and lacks rules by which text is split, and its reading takes three times as long.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Replace as ReplaceInText
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Replace
from transformers import CONFIG_MAPPING, TOKENIZER_MAPPING, AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import gguf_tokenizer_mapping as transformers_gguf

from outrider.hub import is_cached_only
from outrider.runner.gguf.file import TOKENS, GgufFile
from outrider.runner.gguf.source import find, has_own_file
from outrider.runner.gguf.splits import ADDING_BOS, IGNORING_MERGES, NORMALISED, is_known, pre_tokenizer_of
from outrider.types import OutriderError

logger = logging.getLogger(__name__)

CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
ENDOFTEXT = "<|endoftext|>"  # GPT-2's only special token, for files without types
# Phi-3's other added tokens take the blanks after them. Files do not state it, and llama.cpp goes by the model's name.
KEEPING_BLANKS = ("<unk>", "<s>", ENDOFTEXT)
OWN_FILES = ("tokenizer.json", "tokenizer_config.json")  # in a folder they come before a GGUF file's header
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' names -> the header's


def load_tokenizer(source: str | Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, hub id or GGUF file, as ``AutoTokenizer`` does.

    Raises ``OutriderError`` for a GGUF file of an unsupported model.
    """
    path = find(source)
    if path is None or has_own_file(source, path, *OWN_FILES):
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=is_cached_only(source)
        )
    file = GgufFile.open(path)
    file.refuse_unsupported()
    _warn_of_an_unknown_split(file)
    # Not by from_pretrained, which would prefer a tokenizer.json beside the file.
    kind: Any = TOKENIZER_MAPPING.get(CONFIG_MAPPING[file.record.model_type], TokenizersBackend)
    entries, options = _entries(file, "tokenizer"), _entries(file, "tokenizer_config")
    _complete(options, entries, file)
    backend = _byte_level(entries) if entries.get("tokenizer_type") == "gpt2" else _by_transformers(entries, file.architecture)
    tokenizer: PreTrainedTokenizerBase = kind(tokenizer_object=backend, **options)
    tokenizer.name_or_path = str(path)  # not an argument: offline, transformers looks for a config.json in it, as a folder
    return tokenizer


def _entries(file: GgufFile, group: str) -> dict[str, Any]:
    """Return entries of the header by transformers' names: those of the tokenizer, or the options of its class."""
    found = {}
    for name, own in transformers_gguf.GGUF_TOKENIZER_MAPPING[group].items():
        key = f"tokenizer.{name}"
        found[own] = file.tokens if key == TOKENS else file.entry(key) if file.num_strings(key) is None else file.strings(key)
    return {own: value for own, value in found.items() if value is not None}


def _complete(options: dict[str, Any], entries: Mapping[str, Any], file: GgufFile) -> None:
    """Add special tokens, named chat templates, and whether text begins with BOS where the file lacks or misstates it."""
    kind = entries.get("tokenizer_type")
    if kind == "llama" or entries.get("pre_tokenizer_type") in ADDING_BOS:
        options.setdefault("add_bos_token", True)
    elif kind == "gemma4":
        options["add_bos_token"] = False  # the chat template writes it
    named = {name: file.entry(f"tokenizer.chat_template.{name}") for name in file.strings("tokenizer.chat_templates")}
    if named:
        templates = {"default": options.get("chat_template"), **named}
        options["chat_template"] = {name: template for name, template in templates.items() if template is not None}
    for name, key in SPECIAL_TOKENS.items():
        index = file.entry(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not 0 <= index < len(file.tokens):
            problem = f"its {key} token has the id {index}, but its vocabulary has {len(file.tokens)} tokens"
            raise OutriderError(f"{file.path} is damaged: {problem}; download it again")
        options[f"{name}_token"] = None if index is None else file.tokens[index]


def _by_transformers(entries: dict[str, Any], architecture: str) -> Tokenizer:
    """Return the tokenizer of SentencePiece, or Gemma's, of these entries."""
    # Nothing but the architecture tells whether text that begins with a space gets another: Phi-3's does, and Llama 2's.
    like = "gemma3" if architecture == "gemma3n" else architecture
    is_sentencepiece = entries.get("tokenizer_type") == "llama"
    of_phi = is_sentencepiece and like not in transformers_gguf.GGUF_SENTENCEPIECE_BUILDERS
    tokenizer: Tokenizer = transformers_gguf.convert_gguf_tokenizer("phi3" if of_phi else like, entries)[0]
    if of_phi and not entries.get("add_prefix_space", True):
        tokenizer.normalizer = Replace(" ", SPACE)
        tokenizer.decoder = Decoders([ReplaceInText(SPACE, " "), ByteFallback(), Fuse()])
    if is_sentencepiece and architecture == "phi3":
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content not in KEEPING_BLANKS]
        tokenizer.add_tokens([AddedToken(each.content, rstrip=True, normalized=False, special=each.special) for each in added])
    return tokenizer


def _byte_level(entries: Mapping[str, Any]) -> Tokenizer:
    """Return the byte-level BPE tokenizer of these entries."""
    tokens, rule, types = entries["tokens"], entries.get("pre_tokenizer_type"), entries.get("token_type") or ()
    added = {
        index: AddedToken(token, normalized=False, special=kind == CONTROL)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    }
    letters = bytes_to_unicode()  # the byte alphabet: added tokens may have other characters, such as DeepSeek's bars
    alphabet = set(letters.values())
    vocabulary = {
        token if index in added or alphabet.issuperset(token) else "".join([letters[byte] for byte in token.encode()]): index
        for index, token in enumerate(tokens)
    }
    merges = [tuple(merge.split(" ")) for merge in entries.get("merges", ())]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule in IGNORING_MERGES))
    if not types and ENDOFTEXT in vocabulary:
        added = {vocabulary[ENDOFTEXT]: AddedToken(ENDOFTEXT, normalized=False, special=True)}
    tokenizer.add_tokens(list(added.values()))
    if rule in NORMALISED:
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(rule)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def _warn_of_an_unknown_split(file: GgufFile) -> None:
    """Log a warning if text is split before BPE by GPT-2's rule in place of the one that the file names."""
    rule = file.entry("tokenizer.ggml.pre")
    if file.entry("tokenizer.ggml.model") == "gpt2" and not is_known(rule):
        logger.warning(
            "%s: its tokenizer splits text by the rule %r, which is not known here: text is split by GPT-2's"
            " rule and may give other token ids; give a folder with this file and the original model's tokenizer",
            file.path,
            rule,
        )
