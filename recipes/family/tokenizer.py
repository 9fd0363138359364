"""Byte-level BPE tokenizer for Python and English, saved as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .config import ASSISTANT, END, SPECIAL_TOKENS, USER
from .corpus import SOURCES, Split, digest

# Words include one preceding space, underscore, dot or bracket; digits are separate. A run of spaces (indentation) and a run of
# newlines are separate pieces, so that a prompt that ends in a newline continues naturally.
PIECES = r"[ _.(]?\p{L}+|\p{N}| {2,}|\t+|\n+| ?[^\s\p{L}\p{N}]+|\s"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "\n{{ message['content'] }}" + END + "\n"
    "{% else %}" + USER + "\n{{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "\n{% endif %}"
)
SETTINGS = {
    "bos_token": END,
    "eos_token": END,
    "pad_token": END,
    "additional_special_tokens": [USER, ASSISTANT],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
    "chat_template": CHAT_TEMPLATE,
}


def balanced_sample(splits: dict[str, Split], characters: int) -> Iterator[str]:
    """Yield training documents in the proportions of the mixture, at most `characters` in total."""
    for source in SOURCES:
        left = source.weight * characters
        for text in sorted(splits[source.name].train, key=lambda text: digest(text[::-1])):
            if left <= 0:
                break
            left -= len(text)
            for special in SPECIAL_TOKENS:
                text = text.replace(special, "")
            yield text


def train(texts: Iterator[str], vocab: int) -> PreTrainedTokenizerFast:
    """Learn the merges. The alphabet has all 256 bytes, so any UTF-8 text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SETTINGS)


def write_config(folder: Path) -> None:
    """Rewrite tokenizer_config.json with the keys that transformers 4 and other engines need."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the number of bytes of each token; special tokens have none."""
    special = set(tokenizer.all_special_ids)
    # A byte-level token has one printable character per byte.
    return [0 if i in special else len(tokenizer.convert_ids_to_tokens(i)) for i in range(len(tokenizer))]


def load(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer saved in `folder`."""
    learned: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return learned
