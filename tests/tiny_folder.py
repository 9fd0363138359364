"""Tiny random model folders with a real byte-level BPE tokenizer, made in milliseconds and without a network."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TEXT = (
    "def add(first, second):\n    return first + second\n\n"
    "The ship left the harbour at dawn, and nobody on the quay waved. naïve café 12 + 30 = 42\n"
    '{"name": "Ada", "born": 1815}\nfor i in range(10):\n    print(i)\n'
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|end|>"


def make_tokenizer(vocab_size: int = 320, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of ``vocab_size`` entries with one special token, ``<|end|>`` (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = chat_template
    return fast


def make_folder(folder: Path, *, seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None, **config: Any) -> Path:
    """Save a random Llama (default: hidden 16, 2 layers, context 256) with a tokenizer."""
    tokenizer = tokenizer or make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "float32",
        "initializer_range": 0.3,  # large, so that the random model's greedy tokens vary
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(shape | config)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def letter_tokenizer(vocab_size: int, seed: int, pairs: int | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters and pairs of them (default: a third of all), in an order that depends on the seed."""
    choose = random.Random(seed)
    num_pairs = vocab_size // 3 if pairs is None else pairs
    letters = string.ascii_letters[: vocab_size - num_pairs]
    joined = choose.sample([first + second for first in letters for second in letters], num_pairs)
    words = [*letters, *joined]
    choose.shuffle(words)
    merges = [(pair[0], pair[1]) for pair in joined]
    tokenizer = Tokenizer(models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
