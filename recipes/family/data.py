"""Tokenised text on disk, and batches drawn from it.

Every draw is a function of (seed, number of rows drawn), so a resumed run reads the same rows as an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from outrider.train.text import golden_fraction, golden_order
from outrider.types import OutriderError

from .corpus import SOURCES, Split


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], path: Path) -> int:
    """Write documents as uint16 ids, each followed by the end token. Returns the number of tokens."""
    end = tokenizer.eos_token_id
    total = 0
    with open(path, "wb") as file:
        for start in range(0, len(documents), 512):
            batch = tokenizer.backend_tokenizer.encode_batch_fast(list(documents[start : start + 512]))
            ids = np.concatenate([np.array([*piece.ids, end], dtype=np.uint16) for piece in batch])
            ids.tofile(file)
            total += len(ids)
    return total


def encode_all(tokenizer: PreTrainedTokenizerFast, splits: dict[str, Split], folder: Path) -> dict[str, int]:
    """Tokenise every source into `folder`. Returns source -> number of training tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, documents in splits.items():
        counts[name] = encode(tokenizer, documents.train, folder / f"train_{name}.bin")
        encode(tokenizer, documents.held_out, folder / f"val_{name}.bin")
    (folder / "tokens.json").write_text(json.dumps(counts, indent=1))
    return counts


class Mixture:
    """Rows drawn from several token streams by weight.

    The i-th row of a stream starts at the fraction frac(i * golden ratio) of its length. Unlike random offsets, these starts
    are evenly spread after any number of rows, and the state is one counter per stream.
    """

    def __init__(self, streams: Mapping[str, np.ndarray], weights: Mapping[str, float], seed: int) -> None:
        self.streams = streams
        self.names = list(streams)
        total = sum(weights[name] for name in self.names)
        self.shares = np.array([weights[name] / total for name in self.names])
        self.rows_drawn = dict.fromkeys(self.names, 0)
        self.seed = seed

    def batch(self, step: int, rows: int, seq_len: int) -> Tensor:
        """Return the ids of one step: [rows, seq_len + 1]."""
        rng = np.random.default_rng((self.seed, step))
        chosen = rng.choice(len(self.names), size=rows, p=self.shares)
        out = np.empty((rows, seq_len + 1), dtype=np.int64)
        for row, index in enumerate(chosen):
            name = self.names[index]
            stream = self.streams[name]
            start = int(golden_fraction(self.rows_drawn[name]) * (len(stream) - seq_len - 1))
            out[row] = stream[start : start + seq_len + 1]
            self.rows_drawn[name] += 1
        return torch.from_numpy(out)


def check_tokens(folder: Path) -> None:
    """Raise ``OutriderError`` unless the text is tokenised."""
    if not (folder / "tokens.json").exists():
        raise OutriderError(f"no tokenised text in {folder}: run `python -m recipes.family tokenizer` first")


def training_mixture(folder: Path, seed: int) -> Mixture:
    """Return the mixture of `SOURCES` over the tokenised training files."""
    streams = {s.name: np.memmap(folder / f"train_{s.name}.bin", dtype=np.uint16, mode="r") for s in SOURCES}
    return Mixture(streams, {s.name: s.weight for s in SOURCES}, seed)


class DistillationRows:
    """Corpus rows mixed with rows written by the target, which are used whole."""

    def __init__(self, corpus: Mixture, generated: Tensor, share: float) -> None:
        self.corpus = corpus
        self.generated = generated  # [N, S + 1]
        self.share = share if len(generated) else 0.0
        self.rows_drawn = corpus.rows_drawn
        self.rows_drawn["generated"] = 0

    def batch(self, step: int, rows: int, seq_len: int) -> Tensor:
        """Return the ids of one step: [rows, seq_len + 1]."""
        count = round(rows * self.share)
        first = self.rows_drawn["generated"]
        self.rows_drawn["generated"] += count
        parts = [self.corpus.batch(step, rows - count, seq_len)]
        if count:
            parts.append(self.generated[golden_order(first, count, len(self.generated)), : seq_len + 1].to(torch.int64))
        return torch.cat(parts)
