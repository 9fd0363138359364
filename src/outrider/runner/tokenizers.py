"""Load and compare tokenizers, and map token ids to bytes.

A draft with another vocabulary would corrupt every proposal.
"""

from __future__ import annotations

import filecmp
import json
import re
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outrider.errors import first_line, is_failure
from outrider.files import object_in, read_object
from outrider.hub import TOKENIZER, fetch_configs, refuse_missing
from outrider.runner import gguf
from outrider.runner.checkpoint_files import check_config_file
from outrider.runner.gguf.tokenizer import SPACE
from outrider.runner.loading import load_config, refuse_custom_code
from outrider.types import OutriderError
from outrider.weight_files import on_this_machine

# Compared: the first in both folders.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
VOCABULARY_SUFFIXES = (".model", ".tiktoken", ".spm")
CONTINUED = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')  # a prefix that is not empty
BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token of SentencePiece for one byte
SENTENCEPIECE = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]

# Numbers of tokens in the files, by tokenizers of ``load_tokenizer``: its callers may add more.
_loaded_sizes: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()


class DifferentVocabulary(OutriderError):
    """Two tokenizers have different vocabularies; ``what`` describes the difference."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}; choose a draft made for this target's tokenizer, or a method that takes any")


def check_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """Raise ``DifferentVocabulary`` unless each token that training learned has the same id in both.

    Return how the special and other added tokens differ, as those of a base and a chat model do; None if they do not. They
    cannot change the output: drafts next to them are accepted less often.
    """
    if target is draft:
        return None
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    added = {**target.get_added_vocab(), **draft.get_added_vocab()}
    _check_learned(target_vocab, draft_vocab, added)
    differing = [repr(token) for token in added if target_vocab.get(token) != draft_vocab.get(token)]
    found = [f"{len(differing)} of them, the first {differing[0]}"] if differing else []
    for name in ("eos_token_id", "bos_token_id"):
        of_target, of_draft = getattr(target, name, None), getattr(draft, name, None)
        if of_target is not None and of_draft is not None and of_target != of_draft:
            found.append(f"{name} is {of_target} in the target, {of_draft} in the draft")
    return "special tokens differ: " + "; ".join(found) if found else None


def _check_learned(target: dict[str, int], draft: dict[str, int], added: Collection[str]) -> None:
    """Raise ``DifferentVocabulary`` unless the tokens that are not among the added ones have the same ids."""
    if target == draft:  # the usual case, and ten times as fast
        return
    learned = [{token: index for token, index in each.items() if token not in added} for each in (target, draft)]
    if learned[0] != learned[1]:
        raise DifferentVocabulary(f"draft and target have different vocabularies ({_difference(*learned)})")


def check_same_files(target: Path, draft: Path) -> None:
    """Raise ``DifferentVocabulary`` unless the tokenizers of two folders or GGUF files agree, without loading a tokenizer.

    It is also raised if there are no files to compare.
    """
    name = next((name for name in TOKENIZER_FILES if (target / name).exists() and (draft / name).exists()), None)
    if name is not None:
        if filecmp.cmp(target / name, draft / name, shallow=False):
            return
        if name != TOKENIZER_FILES[0]:
            raise DifferentVocabulary(f"draft and target have different files {name}")
    (target_vocab, added), (draft_vocab, added_to_draft) = _vocabulary(target), _vocabulary(draft)
    _check_learned(target_vocab, draft_vocab, added | added_to_draft)


def is_tokenizer_of(tokenizer: PreTrainedTokenizerBase, source: str | Path) -> bool:
    """Return whether ``load_tokenizer`` read a tokenizer from files equal to those of another source.

    False if tokens were added to it since: a draft has no embeddings for them.
    """
    if _loaded_sizes.get(tokenizer) != len(tokenizer):
        return False
    own, other = gguf.find(tokenizer.name_or_path), gguf.find(source)
    if own is not None and other is not None:
        return _stated(own) == _stated(other)
    folders = on_this_machine(tokenizer.name_or_path), on_this_machine(source)
    with suppress(OSError):  # a file is missing or unreadable; loading reports the latter
        if folders[0] is not None and folders[1] is not None:
            return all(filecmp.cmp(folders[0] / name, folders[1] / name, shallow=False) for name in TOKENIZER[1:])
    return False


def _stated(path: Path) -> tuple[object, ...]:
    """Return the vocabulary of a GGUF file and the ids of its beginning- and end-of-text tokens."""
    file = gguf.GgufFile.open(path)
    return file.vocabulary(), *(file.entry(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))


def load_tokenizer(source: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, hub id or GGUF file.

    Raises ``OutriderError`` if there is none, or if it cannot encode text.
    """
    refuse_missing(source)
    fetch_configs(source, TOKENIZER)
    folder = on_this_machine(source)
    if folder is not None:
        check_merges(folder)
    try:
        tokenizer = gguf.load_tokenizer(source, trust_remote_code)
        tokenizer.decode(tokenizer.encode("Text."))  # some errors in the files show only here
        found = tokenizer.encode("Text.", add_special_tokens=False)
        if not has_tokenizer(source) and set(found) <= set(tokenizer.all_special_ids):
            raise ValueError("it encodes no text")  # without files, transformers makes an empty one for some model types
    except BaseException as error:  # broken files can raise anything
        if not is_failure(error):
            raise
        # AutoTokenizer reads the config too: report an error in the config first
        if folder is not None and (folder / "config.json").is_file():
            check_config_file(folder / "config.json")
        if gguf.find(source) is not None or not isinstance(error, (OSError, ValueError, KeyError)):
            load_config(source, trust_remote_code)
        refuse_custom_code(source, error)
        what = f"cannot load a tokenizer from {str(source)!r}"
        why = first_line(error) if folder is None else _problem(folder, error, what)
        raise OutriderError(f"{what}: {why}") from error
    if folder is not None:
        _add_template(tokenizer, folder)
    _loaded_sizes[tokenizer] = len(tokenizer)
    return tokenizer


def _add_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Set a tokenizer's chat template from chat_template.json, where older multimodal models have it, if it has no other."""
    if tokenizer.chat_template:
        return
    found = object_in(folder / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        tokenizer.chat_template = found


def has_tokenizer(source: str | Path) -> bool:
    """Return whether a folder, a hub id in the download cache or a GGUF file holds a vocabulary, readable or not."""
    folder = on_this_machine(source)
    return gguf.find(source) is not None or (folder is not None and bool(_vocabulary_files(folder)))


def _vocabulary_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that may hold a vocabulary, those of ``TOKENIZER_FILES`` first."""
    others = {file.name for file in folder.iterdir() if file.suffix in VOCABULARY_SUFFIXES}.difference(TOKENIZER_FILES)
    return [name for name in (*TOKENIZER_FILES, *sorted(others)) if (folder / name).is_file()]


def check_merges(folder: Path) -> None:
    """Raise ``OutriderError`` for merges in a folder's tokenizer.json that make the tokenizers library abort the process.

    It removes ``continuing_subword_prefix`` from each second part of a merge without checking that the part has it.
    """
    file = folder / "tokenizer.json"
    try:
        content = file.read_bytes()
        model = json.loads(content)["model"] if CONTINUED.search(content) else {}
        prefix, merges = model.get("continuing_subword_prefix"), model.get("merges") or []
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        broken = next((pair for pair in pairs if prefix and not str(pair[-1]).startswith(prefix)), None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # reported when it is loaded
        return
    if broken is not None:
        raise OutriderError(f"{file}: the merge {broken} must continue with the continuing_subword_prefix {prefix!r}")


def _problem(folder: Path, error: BaseException, what: str) -> str:
    """Say why the tokenizer in a folder cannot be loaded: name a file that is missing, else quote the error.

    Raises ``OutriderError``, whose message begins with ``what``, for a file that is not JSON.
    """
    present = _vocabulary_files(folder)
    for name in (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json"):
        if name.endswith(".json") and (folder / name).is_file():
            read_object(folder / name, what)
    if not present:
        files = f"{', '.join(TOKENIZER_FILES[:-1])} or {TOKENIZER_FILES[-1]}"
        if not (folder / "config.json").is_file():
            return f"the folder has no config.json and no {files}: give the folder of a model"
        return f"the folder has no {files}: copy the tokenizer's files from the model's repository"
    return f"{present[0]} lacks {error}" if isinstance(error, KeyError) else first_line(error)


def _vocabulary(source: Path) -> tuple[dict[str, int], set[str]]:
    """Return the id of each token in a folder's tokenizer.json or in a GGUF file, and the added tokens.

    Raises ``DifferentVocabulary`` if there is neither.
    """
    file = source / TOKENIZER_FILES[0]
    if not file.exists():
        model = gguf.find(source)
        if model is None:
            raise DifferentVocabulary(f"the tokenizers cannot be compared: {source} has no {TOKENIZER_FILES[0]}")
        return gguf.GgufFile.open(model).vocabulary()
    status = file.stat()
    return _parsed_vocabulary(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)  # the target's, with which all candidates are compared, and the last candidate's
def _parsed_vocabulary(file: Path, *_version: int) -> tuple[dict[str, int], set[str]]:
    """See ``_vocabulary``. ``_version``: numbers that change with the file."""
    content = json.loads(file.read_bytes())
    tokens = content["model"]["vocab"]
    ids = dict(tokens) if isinstance(tokens, dict) else {token: index for index, (token, _) in enumerate(tokens)}
    added = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
    return ids | added, set(added)


def _difference(target: dict[str, int], draft: dict[str, int]) -> str:
    if len(target) != len(draft):
        counts = f"{len(target):,} tokens in the target, {len(draft):,} in the draft"
    else:
        counts = f"{len(target):,} tokens each"
    only = sorted(set(target) - set(draft), key=target.__getitem__)
    if only:
        return f"{counts}; {len(only):,} of the target's are unknown to the draft, the first {only[0]!r}"
    extra = sorted(set(draft) - set(target), key=draft.__getitem__)
    if extra:
        return f"{counts}; {len(extra):,} of the draft's are unknown to the target, the first {extra[0]!r}"
    token = min((t for t in target if target[t] != draft[t]), key=target.__getitem__)
    return f"{counts}; {token!r} is {target[token]} in the target and {draft[token]} in the draft"


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return ids of special tokens: begin, end, chat roles."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}


class ByteTable(dict[int, bytes]):
    """Each token's bytes, empty for special tokens and unknown ids, found at first use: a vocabulary may have 150,000 tokens.

    The first space of a text counts (see ``strips_first_space``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, is_byte_level: bool) -> None:
        super().__init__()
        self._tokenizer, self._is_byte_level = tokenizer, is_byte_level
        self._special, self._added = special_ids(tokenizer), frozenset(tokenizer.added_tokens_decoder)

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._special else self._tokenizer.convert_ids_to_tokens(token)
        found = self[token] = b"" if text is None else self._bytes(token, str(text))
        return found

    def _bytes(self, token: int, text: str) -> bytes:
        if not self._is_byte_level:
            byte = BYTE.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()
        letters = [] if token in self._added else [byte_alphabet().get(letter, 256) for letter in text]
        return bytes(letters) if letters and max(letters) < 256 else text.encode()  # 256: not a letter of the alphabet


def byte_table(tokenizer: PreTrainedTokenizerBase) -> ByteTable | None:
    """Return the bytes of the tokens of byte-level BPE and SentencePiece, None for other tokenizers."""
    parts = _decoder(tokenizer)
    is_byte_level = [each["type"] for each in parts] == ["ByteLevel"]
    return ByteTable(tokenizer, is_byte_level) if is_byte_level or parts[:3] == SENTENCEPIECE else None


def strips_first_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text loses the space with which it begins, as with Llama 2's tokenizer."""
    return {"type": "Strip", "content": " ", "start": 1, "stop": 0} in _decoder(tokenizer)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the settings of the parts of a tokenizer's decoder; none if it has no such decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    settings = json.loads(decoder.__getstate__())
    return list(settings.get("decoders", [settings]))


def _names(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """Return the tokens of all ids up to the highest; None for unused ids."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    return list(tokenizer.convert_ids_to_tokens(list(range(highest + 1))))


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Return the map from GPT-2's printable characters to bytes."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """Return the bytes that each token appends to a non-empty text; empty for special tokens."""
    table, names = byte_table(tokenizer), _names(tokenizer)
    if table is not None:
        return [table[token] for token in range(len(names))]
    special = special_ids(tokenizer)
    # Decode after another token, because many tokenizers strip a leading space.
    before = next(iter(tokenizer.encode("a", add_special_tokens=False)), 0)
    alone = str(tokenizer.decode([before], clean_up_tokenization_spaces=False))
    pairs = [str(tokenizer.decode([before, token], clean_up_tokenization_spaces=False)) for token in range(len(names))]
    found = []
    for token, (name, text) in enumerate(zip(names, pairs, strict=True)):
        byte = BYTE.fullmatch(name or "")
        if token in special or name is None:
            found.append(b"")
        elif byte:
            found.append(bytes([int(byte[1], 16)]))
        else:
            found.append(text.removeprefix(alone).encode() if text.startswith(alone) and BROKEN not in text else b"")
    return found


class Spelling:
    """A tokenizer as a byte encoder: bytes of each id, and ids of a text.

    ``ids`` maps each byte string that is a token to one id, never a special one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.table = token_bytes(tokenizer)
        names = _names(tokenizer)
        self.special = {token: names[token] for token in sorted(special_ids(tokenizer)) if token < len(names)}
        self.ids: dict[bytes, int] = {}
        # A token of text has precedence over the fallback for the same byte.
        for token in sorted(range(len(names)), key=lambda token: str(names[token]).startswith("<0x")):
            if self.table[token]:
                self.ids.setdefault(self.table[token], token)
        self._longest = max(map(len, self.ids), default=0)
        self.adds_space = self.joined(self._encode("a")) == b" a"  # to a text without a leading space

    def joined(self, token_ids: list[int]) -> bytes:
        """Return the bytes of tokens; ids outside the vocabulary (embedding padding) have none."""
        table = self.table
        return b"".join([table[token] for token in token_ids if token < len(table)])

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Encode a text without special tokens; ``is_start``: whether it starts the sequence."""
        if self.adds_space and not is_start and text.startswith(" "):
            text = text[1:]
        return self._encode(text)

    def segment(self, data: bytes) -> list[int] | None:
        """Encode any bytes greedily, including incomplete characters; None if a byte has no token."""
        token_ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self.ids), 0)
            if not size:
                return None
            token_ids.append(self.ids[data[at : at + size]])
            at += size
        return token_ids

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False)) if text else []
