"""The user's text as rows of tokens, as it is or written anew by the target."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.runner import ModelRunner
from outrider.train.claims import claim, digest, fingerprint
from outrider.types import OutriderError

Report = Callable[[float, dict[str, Any]], None]  # how far, and what to show
GOLDEN = 0.6180339887498949


def read_documents(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Documents of a text file (one), or of a JSONL file: ``text``, ``prompt`` + ``completion``, or chat ``messages``.

    Raises ``OutriderError`` naming the line that holds none of them.
    """
    if not path.is_file():
        raise OutriderError(f"no text file at {path}")
    if path.suffix not in (".jsonl", ".json"):
        yield path.read_text(encoding="utf-8", errors="replace")
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield _document(json.loads(line), tokenizer)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    hint = 'each line is JSON with "text", "prompt" and "completion", or "messages"'
                    raise OutriderError(f"{path}, line {number}: {hint} ({type(error).__name__}: {error})") from None


def _document(entry: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    if "text" in entry:
        return str(entry["text"])
    messages = entry.get("messages") or entry.get("conversations")
    if messages is not None:
        roles = {"human": "user", "gpt": "assistant"}
        chat = [
            {
                "role": roles.get(m.get("role") or m["from"], m.get("role") or m["from"]),
                "content": m.get("content", m.get("value")),
            }
            for m in messages
        ]
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    return str(entry["prompt"]) + str(entry["completion"])


def token_rows(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, seq_len: int, max_tokens: int) -> Tensor:
    """Text files -> int32 [R, seq_len]: documents one after the other, an end token between, cut into rows.

    Raises ``OutriderError`` where there is not one row.
    """
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for path in paths:
        for document in read_documents(path, tokenizer):
            ids += tokenizer.encode(document)
            if end is not None:
                ids.append(int(end))
            if len(ids) >= max_tokens:
                break
    return rows_of(np.array(ids[:max_tokens], dtype=np.int32), seq_len)


def rows_of(ids: np.ndarray, seq_len: int) -> Tensor:
    """A stream of ids -> int32 [R, seq_len]."""
    count = len(ids) // seq_len
    if count < 2:
        raise OutriderError(f"the text has {len(ids)} tokens: training needs two rows of {seq_len} at least")
    return torch.from_numpy(np.ascontiguousarray(ids[: count * seq_len]).astype(np.int32)).view(count, seq_len)


def held_out(num_rows: int) -> int:
    """How many of so many rows, the last ones, are kept for measuring."""
    return max(1, min(num_rows // 20, 64))


def spread(first: int, count: int, total: int) -> Tensor:
    """Which of ``total`` rows the next ``count`` draws take, int64 [count]: the i-th is frac(i * golden ratio) on."""
    return torch.tensor([int((i * GOLDEN + 0.5) % 1.0 * total) for i in range(first, first + count)])


class TextRows:
    """Training rows [R, S] themselves, spread evenly at every moment; the last ones are held out."""

    def __init__(self, rows: Tensor) -> None:
        self.num_training, self.seq_len = len(rows) - held_out(len(rows)), rows.shape[1]
        self.held_out = rows[self.num_training :].long()
        self.rows_drawn = {"rows": 0}
        self.whole = rows

    def batch(self, step: int, rows: int, seq_len: int) -> Tensor:
        """int64 [rows, S]."""
        first = self.rows_drawn["rows"]
        self.rows_drawn["rows"] += rows
        return self.whole[spread(first, rows, self.num_training)].long()


def regenerate(
    runner: ModelRunner, rows: Tensor, prompt_len: int, temperature: float, seed: int, folder: Path, report: Report
) -> Tensor:
    """Rows [R, S] of which the target writes all but the first ``prompt_len`` tokens itself, at a temperature (0: greedy).

    Kept batch by batch in ``folder``, so that an interrupted run goes on where it stopped. Raises ``OutriderError`` for
    numbers that make no text, and where the folder holds what was written by another target, of another text or otherwise.
    """
    if not 1 <= prompt_len < rows.shape[1]:
        raise OutriderError(f"rows of {rows.shape[1]} tokens leave nothing to write after prompts of {prompt_len}")
    if temperature < 0:
        raise OutriderError(f"text at temperature {temperature:g}: 0 (greedy) or above")
    how = {"prompt length": prompt_len, "temperature": temperature, "seed": seed, "batch": runner.max_batch}
    claim(folder / "text.json", {"target": fingerprint(runner), "text": digest(rows), **how})
    written: list[Tensor] = []
    for number, batch in enumerate(rows.split(runner.max_batch)):
        file = folder / f"text_{number:05}.safetensors"
        is_there = file.exists()
        if not is_there:
            ids = _written(runner, batch, prompt_len, temperature, torch.Generator().manual_seed(seed + number))
            partial = file.with_suffix(".partial")
            save_file({"ids": ids}, partial)
            partial.replace(file)
        written.append(load_file(file)["ids"])
        if not is_there:  # what an earlier run wrote says nothing of the time that is left
            done = sum(map(len, written))
            report(done / len(rows), {"rows": done})
    return torch.cat(written)


def _written(runner: ModelRunner, batch: Tensor, prompt_len: int, temperature: float, generator: torch.Generator) -> Tensor:
    names = [f"written-{index}" for index in range(len(batch))]
    ids = batch.clone()
    steps = batch.shape[1] - prompt_len

    def pick(logits: Tensor, step: int) -> Tensor:
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            probs = (logits[:, 0] / temperature).softmax(-1).cpu()
            token = torch.multinomial(probs, 1, replacement=True, generator=generator).to(logits.device)  # [B, 1]
        ids[:, prompt_len + step] = token[:, 0].cpu().int()
        return token

    try:
        logits = runner.extend(names, batch[:, :prompt_len].tolist())
        runner.rollout(names, logits, steps, pick)
    finally:
        runner.release(names)
    return ids
