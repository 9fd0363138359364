"""Prompts as token ids, read from a JSONL file (plain or gzipped), including HumanEval's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.engine.config import load_tokenizer
from outrider.files import READ_ERRORS, open_text

TEXT_KEYS = ("prompt", "text", "question", "turns")


class BadInput(Exception):
    """Invalid user input; the message is one line."""


def read_prompts(path: Path, target: Path, count: int, max_prompt_tokens: int) -> list[list[int]]:
    """Return the first `count` prompts that fit.

    Each line holds `token_ids` or a text, tokenized with the target's tokenizer.
    """
    texts_or_ids = [_prompt_of(row, path, number) for number, row in enumerate(_rows(path), start=1)]
    tokenizer = None
    prompts: list[list[int]] = []
    for value in texts_or_ids:
        if len(prompts) == count:
            break
        if isinstance(value, str):
            tokenizer = tokenizer or load_tokenizer(target)
            value = tokenizer.encode(value)
        if 0 < len(value) <= max_prompt_tokens:
            prompts.append(value)
    if not prompts:
        raise BadInput(f"{path}: no prompt of at most {max_prompt_tokens} tokens")
    return prompts


def windows(stream: list[int], length: int, count: int) -> list[list[int]]:
    """Return ``count`` consecutive prompts of ``length`` tokens each from a stream that repeats at its end."""
    if not stream:
        raise BadInput("the prompts have no tokens")
    return [[stream[(number * length + i) % len(stream)] for i in range(length)] for number in range(count)]


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    try:
        with open_text(path) as file:
            return [json.loads(line) for line in file if line.strip()]
    except (json.JSONDecodeError, *READ_ERRORS) as error:
        raise BadInput(f"{path}: not JSON lines: {error}") from None


def _prompt_of(row: Any, path: Path, number: int) -> str | list[int]:
    if isinstance(row, dict):
        if isinstance(row.get("token_ids"), list):
            return list(row["token_ids"])
        for key in TEXT_KEYS:
            value = row.get(key)
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, str):
                return value
    raise BadInput(f"{path}: line {number}: expected one of token_ids, {', '.join(TEXT_KEYS)}")
