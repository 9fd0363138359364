"""Measurements: bits per byte on held-out documents, and agreement of early exits and draft with the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .model import LlamaDecoder
from .tokenizer import token_bytes

ROWS = 16  # rows per pass


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows by source, and the length of each token in bytes."""

    rows: dict[str, Tensor]  # source -> [N, S + 1]
    weights: Mapping[str, float]
    token_bytes: Tensor  # [V]


def held_out(tokens: Path, learned: PreTrainedTokenizerFast, weights: Mapping[str, float], seq_len: int, limit: int) -> HeldOut:
    """Return rows of held-out text, up to `limit` tokens of each source."""
    rows = {}
    for name in weights:
        ids = torch.from_numpy(np.fromfile(tokens / f"val_{name}.bin", dtype=np.uint16)[: limit + 1].astype(np.int64))
        if len(ids) > seq_len:
            rows[name] = ids.unfold(0, seq_len + 1, seq_len)
    return HeldOut(rows, weights, torch.tensor(token_bytes(learned), dtype=torch.float64))


def bits_per_byte(model: LlamaForCausalLM, text: HeldOut) -> dict[str, float]:
    """Return bits per byte by source; `total` is the mean weighted by ``text.weights``."""
    device = next(model.parameters()).device
    found = {}
    for name, rows in text.rows.items():
        nats = size = 0.0
        for ids in rows.split(ROWS):
            labels = ids[:, 1:].to(device)
            logits = model(input_ids=ids[:, :-1].to(device), use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            nats += float(loss)
            size += float(text.token_bytes[ids[:, 1:]].sum())
        found[name] = round(nats / math.log(2) / max(size, 1.0), 4)
    total = sum(text.weights[name] for name in found)
    found["total"] = round(sum(found[name] * text.weights[name] for name in found) / total, 4)
    return found


def exit_agreement(model: LlamaForCausalLM, rows: Tensor) -> list[float]:
    """Return the share of positions at which each exit's greedy token is the full model's: L numbers."""
    decoder = LlamaDecoder(model)
    best = [decoder.logits(hidden).argmax(-1) for hidden in decoder.hidden_states(rows[:, :-1])]
    return [round(float((exit_best == best[-1]).float().mean()), 4) for exit_best in best]


def before_end(rows: Tensor, prompt: int, end: int) -> Tensor:
    """Return the mask of the continuation tokens up to and including the first end token: [N, S - prompt]."""
    ended = (rows[:, prompt:] == end).int().cumsum(1)
    return (ended - (rows[:, prompt:] == end).int()) == 0


@torch.no_grad()
def draft_matches(draft: LlamaForCausalLM, rows: Tensor, prompt: int) -> Tensor:
    """Return where the draft's greedy token, given the preceding text, is the next token of the text: bool [N, S - prompt]."""
    logits = draft(input_ids=rows[:, :-1], use_cache=False).logits
    matches: Tensor = logits[:, prompt - 1 :].argmax(-1) == rows[:, prompt:]
    return matches


def mean_acceptance_length(matches: Tensor, mask: Tensor, num_draft_tokens: int) -> float:
    """Return the tokens per round of greedy speculation on the target's own greedy text. This is exact, not an estimate.

    A round accepts drafts up to the first mismatch, at most `num_draft_tokens`, and adds one token.
    """
    rounds = emitted = 0
    for row, chosen in zip(matches.tolist(), mask.tolist(), strict=True):
        length, place = sum(chosen), 0
        while place < length:
            run = 0
            while run < num_draft_tokens and place + run < length - 1 and row[place + run]:
                run += 1
            place += run + 1
            rounds += 1
        emitted += length
    return round(emitted / max(rounds, 1), 3)
