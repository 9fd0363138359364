"""Prompts that the target continues to write the draft's training text. All are taken from the training text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

# A signature with its docstring, if any, which is what users of a code model type.
SIGNATURE = re.compile(r'\A(?:@.*\n)*def .*?\)(?: *->[^\n]*)?:\n(?:\s+[rR]?"""(?:.|\n)*?"""\n)?', re.DOTALL)
FUNCTION_SHARE = 0.7  # share of the prompts; the others are corpus prefixes cut at any token


def signature(function: str) -> str | None:
    """Return the part of a function that is used as a prompt."""
    found = SIGNATURE.match(function)
    return found.group() if found and len(found.group()) < 0.8 * len(function) else None


def function_prompts(stream: np.ndarray, tokenizer: PreTrainedTokenizerFast, length: int) -> Iterator[Tensor]:
    """Yield windows of `length` ids of a packed stream that end where a function's body begins."""
    end = tokenizer.eos_token_id
    ends = np.flatnonzero(np.asarray(stream) == end)
    for before, after in pairwise(ends):
        text = str(tokenizer.decode(stream[before + 1 : after].tolist()))
        prompt = signature(text)
        if prompt is None:
            continue
        stop = before + 1 + len(tokenizer.encode(prompt))
        if stop >= length:
            yield torch.from_numpy(np.asarray(stream[stop - length : stop]).astype(np.int64))


def mixed_prompts(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: int, length: int, others: Tensor) -> Tensor:
    """Return prompts [rows, length]: mostly function signatures, the rest from `others` [N, >= length]."""
    stream = np.memmap(folder / "train_functions.bin", dtype=np.uint16, mode="r")
    found = list(islice(function_prompts(stream, tokenizer, length), int(rows * FUNCTION_SHARE)))
    rest = others[: rows - len(found), :length]
    mixed = torch.cat([torch.stack(found), rest]) if found else rest
    return mixed[torch.randperm(len(mixed), generator=torch.Generator().manual_seed(len(mixed)))]
