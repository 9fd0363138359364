"""What a benchmark generates from: built-in prompts by kind of text, or the user's file.

The built-in prompts were written for Outrider. They are text to be continued, so that a model without instruction training can
be measured too; those of the kind ``chat`` go through the tokenizer's chat template where it has one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.types import OutriderError

SEPARATOR = "\n%%\n"
WORKLOADS = {
    "code": "complete a Python function from its signature",
    "edit": "write a text again with a small change: repeats its prompt",
    "json": "go on with records of one form: repeats its prompt",
    "summary": "sum up a paragraph",
    "math": "solve an arithmetic word problem",
    "chat": "answer a question",
    "story": "go on with a story",
}
CHAT = "chat"


@dataclass(frozen=True)
class Prompt:
    """One text to continue, or one user turn to answer (``is_chat``)."""

    workload: str
    text: str
    is_chat: bool = False


def builtin(workload: str, num_prompts: int | None = None) -> list[Prompt]:
    """The first ``num_prompts`` (all by default) built-in prompts of a kind. Raises ``OutriderError`` for an unknown kind."""
    if workload not in WORKLOADS:
        raise OutriderError(f"unknown workload {workload!r}; known: {', '.join(WORKLOADS)}")
    text = files("outrider.bench").joinpath("prompts", f"{workload}.txt").read_text(encoding="utf-8")
    return [Prompt(workload, item.rstrip("\n"), workload == CHAT) for item in text.split(SEPARATOR)][:num_prompts]


def from_file(path: str | Path, num_prompts: int | None = None) -> list[Prompt]:
    """Prompts of a JSONL file, plain or gzipped, in order.

    Each line is an object with ``prompt`` (text to continue; HumanEval's files are like this), or with ``turns`` or
    ``question`` (a user's turn, the first of ``turns``, as in MT-Bench and GSM8K). An optional ``workload`` names its group in
    the results. Raises ``OutriderError`` with the line's number where a line is none of these.
    """
    path = Path(path)
    name = path.name.split(".")[0]
    prompts = []
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), name))
        except (json.JSONDecodeError, KeyError, TypeError, IndexError):
            raise OutriderError(
                f'{path}, line {number}: not a JSON object with a text under "prompt", "question" or "turns"'
            ) from None
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise OutriderError(f"{path} holds no prompts")
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from enumerate(file, start=1)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise OutriderError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _prompt(item: Mapping[str, Any], default_workload: str) -> Prompt:
    workload = item.get("workload", default_workload) if isinstance(item, dict) else default_workload
    if "prompt" in item:
        text, is_chat = item["prompt"], False
    elif "turns" in item:
        text, is_chat = item["turns"][0], True
    else:
        text, is_chat = item["question"], True
    if not isinstance(text, str) or not text or not isinstance(workload, str):
        raise TypeError
    return Prompt(workload, text, is_chat)


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's token ids; a chat without a template becomes a plain dialogue."""
    if not prompt.is_chat:
        return list(tokenizer(prompt.text)["input_ids"])
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(f"Question: {prompt.text}\n\nAnswer:")["input_ids"])
