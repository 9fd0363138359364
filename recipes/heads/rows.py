"""Training rows shared by everything trained on the embedded target: the target's continuations of corpus text."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from outrider.files import replaced
from outrider.heads.checkpoint import named_errors
from outrider.progress import shown
from outrider.runner import ModelRunner, RunnerConfig
from outrider.train.claims import check_or_record_identity, exclusive, fingerprint
from outrider.train.runs import Workspace
from outrider.train.text import regenerate
from outrider.types import OutriderError
from recipes import work_folder
from recipes.family import data, prompts, tokenizer
from recipes.family.config import SEED

SEQ_LEN, PROMPT_LEN, COUNT = 256, 96, 12000


def workspace(target: Path, tokens: Path, work: Path, count: int) -> Workspace:
    """Return target, tokenizer and rows. Recipes with the same ``work`` share them."""
    data.check_tokens(tokens)
    work_folder(work)
    runner = ModelRunner.load(target, RunnerConfig(max_batch=128, compile="auto"))
    learned = tokenizer.load(target)
    return Workspace(runner, learned, work, rows=training_rows(runner, learned, tokens, work, count))


def training_rows(runner: ModelRunner, learned: PreTrainedTokenizerFast, tokens: Path, work: Path, count: int) -> torch.Tensor:
    """Return beginnings of corpus text with the target's continuations, half greedy and half at temperature 1: [R, 256].

    Raises ``OutriderError`` if ``work`` contains rows of another target, or another number of rows.
    """
    path = work / "rows.pt"
    check_or_record_identity(work / "rows.json", {"target": fingerprint(runner.model)})
    if path.exists():
        found: torch.Tensor = torch.load(path, weights_only=True)
        if len(found) != count:
            raise OutriderError(f"{path} has {len(found)} rows, expected {count}: delete it or give another folder")
        return found
    others = data.training_mixture(tokens, SEED + 8).batch(0, count, PROMPT_LEN)
    starts = prompts.mixed_prompts(tokens, learned, count, PROMPT_LEN, others)
    filled = torch.zeros(len(starts), SEQ_LEN, dtype=torch.int32)
    filled[:, :PROMPT_LEN] = starts.int()
    written = []
    for temperature, part in zip((0.0, 1.0), filled.chunk(2), strict=True):
        folder = work / f"text_{temperature:g}"
        with exclusive(folder), shown(f"text at temperature {temperature:g}") as report:
            written.append(regenerate(runner, part, PROMPT_LEN, temperature, SEED, folder, report))
    rows = torch.cat(written)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]
    with named_errors(path), replaced(path) as unfinished:
        torch.save(rows, unfinished)
    return rows
