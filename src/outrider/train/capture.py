"""Capture the target's hidden states over the training text once, through the runner, in shards on disk.

A shard contains the ids of its rows and, for each hidden state, bfloat16 features [rows, S, H]. Shards are written atomically,
so an interrupted capture resumes; rows are read by index without loading a shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.heads.checkpoint import save_tensors
from outrider.memory import size
from outrider.progress import Report
from outrider.runner import ModelRunner
from outrider.train.claims import damaged_file_errors, digest, fingerprint, read_or_create_json
from outrider.train.text import RowOrder, held_out
from outrider.types import Context, OutriderError, Proposal, Request, SamplingParams

logger = logging.getLogger(__name__)

SHARD_ROWS, SHARD_TOKENS = 64, 16384  # at most: the hidden states of a shard are collected in memory


class FeatureCache(RowOrder):
    """Rows of ids and features by index, and the order in which they are trained; the last ones are held out."""

    def __init__(self, folder: Path, num_rows: int, seq_len: int) -> None:
        super().__init__(num_rows - held_out(num_rows), seq_len)
        self.held_out = range(self.num_training, num_rows)  # indices of rows
        self._shard_rows = shard_rows(seq_len)
        self._folder = folder
        self._open: dict[int, Any] = {}

    def read(
        self, rows: Sequence[int], layers: Sequence[int], device: torch.device | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return ids int64 [R, S] and float32 features {layer: [R, S, H]} of the rows with these indices."""
        ids: list[Tensor] = []
        features: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        for row in rows:
            shard, at = self._shard(row // self._shard_rows), row % self._shard_rows
            ids.append(shard.get_slice("ids")[at : at + 1])
            for layer, found in features.items():
                found.append(shard.get_slice(f"hidden_{layer}")[at : at + 1])
        return torch.cat(ids).long().to(device), {layer: torch.cat(each).float().to(device) for layer, each in features.items()}

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            file = self._folder / _name(number)
            with damaged_file_errors(file):
                self._open[number] = safe_open(file, "pt")
        return self._open[number]


def _name(number: int) -> str:
    return f"features_{number:05}.safetensors"


def shard_rows(seq_len: int) -> int:
    """Return the rows per shard."""
    return max(1, min(SHARD_ROWS, SHARD_TOKENS // seq_len))


def missing_shards(folder: Path, rows: Tensor) -> dict[int, Path]:
    """Return the shards of rows [R, S] that a folder lacks: index of the first row -> file."""
    per_shard = shard_rows(rows.shape[1])
    files = {start: folder / _name(start // per_shard) for start in range(0, len(rows), per_shard)}
    return {start: file for start, file in files.items() if not file.exists()}


def missing_bytes(folder: Path, rows: Tensor, num_layers: int, hidden_size: int) -> int:
    """Return the size of that many hidden states of rows [R, S] that a folder lacks."""
    num_rows = len(missing_shards(folder, rows)) * shard_rows(rows.shape[1])
    return num_rows * rows.shape[1] * num_layers * hidden_size * torch.bfloat16.itemsize


def check_captured(runner: ModelRunner, layers: Sequence[int], seq_len: int) -> None:
    """Raise ``OutriderError`` for invalid hidden states, or rows longer than the context."""
    if min(layers) < 0 or max(layers) > runner.num_layers:
        raise OutriderError(f"invalid hidden states {tuple(layers)}: {runner.name} has 0 to {runner.num_layers}")
    if seq_len > runner.max_len:
        raise OutriderError(f"rows of {seq_len} tokens exceed the target's context of {runner.max_len}")


def capture(runner: ModelRunner, rows: Tensor, layers: Sequence[int], folder: Path, report: Report) -> FeatureCache:
    """Run the target over rows [R, S] and store these hidden states (numbered as in types.Scores) in ``folder``.

    Raises ``OutriderError`` for invalid layers, and for a folder of another target or text.
    """
    check_captured(runner, layers, rows.shape[1])
    about: dict[str, Any] = {
        "target": fingerprint(runner.model),
        "text": digest(rows),
        "rows": len(rows),
        "seq_len": rows.shape[1],
        "layers": list(layers),
        "shard_rows": shard_rows(rows.shape[1]),
    }
    known = read_or_create_json(folder / "features.json", lambda: about)
    if {**known, "layers": 0} != {**about, "layers": 0}:
        problem = f"{folder} has features of another target or text, or in shards of another size"
        raise OutriderError(f"{problem}: give another folder (--work) or delete it")
    if not set(layers) <= set(known["layers"]):
        raise OutriderError(
            f"{folder} has hidden states {_joined(known['layers'])}, and this run reads {_joined(layers)}:"
            " give another folder (--work), or delete this one, so that all of them are captured"
        )
    left = missing_shards(folder, rows)
    if left:
        needed = missing_bytes(folder, rows, len(known["layers"]), runner.hidden_size)
        logger.info("hidden states of %d rows of %d tokens: %s in %s", *rows.shape, size(needed), folder)
    for start, file in left.items():
        part = rows[start : start + shard_rows(rows.shape[1])]

        def captured(count: int, start: int = start) -> None:
            report(start + count, len(rows), "")

        save_tensors(file, _captured(runner, part, tuple(known["layers"]), captured))
    return FeatureCache(folder, *rows.shape)


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _captured(runner: ModelRunner, rows: Tensor, layers: tuple[int, ...], captured: Callable[[int], None]) -> dict[str, Tensor]:
    """Return the ids and hidden states of the rows; call ``captured`` with their number after each batch."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for batch in rows.split(runner.max_batch):
        requests = tuple(
            Request(f"captured-{index}", ids, len(ids), SamplingParams(), 0) for index, ids in enumerate(batch.tolist())
        )
        # Nothing is sampled, so the context needs no sampler.
        context = Context(requests, (0,) * len(requests), None)  # type: ignore[arg-type]
        try:
            scores = runner.score(context, Proposal.empty(len(requests)), layers)
        finally:
            runner.release(context.request_ids)
        for layer, chunks in found.items():
            chunks.append(torch.stack(list(scores.hidden[layer])).to("cpu", torch.bfloat16))
        captured(sum(map(len, found[layers[0]])))
    return {"ids": rows.int().clone()} | {f"hidden_{layer}": torch.cat(chunks).contiguous() for layer, chunks in found.items()}
