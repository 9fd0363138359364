"""Measuring: bits per byte on held-out documents, agreement of exits and draft with the target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from . import model as models


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows by source and what each token weighs in bytes."""

    rows: dict[str, Tensor]  # name -> [N, S + 1]
    weights: dict[str, float]
    token_bytes: Tensor  # [V]


def bits_per_byte(model: LlamaForCausalLM, data: HeldOut, batch: int = 16) -> dict[str, float]:
    """Bits per byte by source; `total` weighs the sources as in training."""
    device = next(model.parameters()).device
    found = {}
    for name, rows in data.rows.items():
        nats = size = 0.0
        for ids in rows.split(batch):
            labels = ids[:, 1:].to(device)
            hidden = models.hidden_states(model, ids[:, :-1].to(device))[-1]
            loss = functional.cross_entropy(models.logits(model, hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")
            nats += float(loss)
            size += float(data.token_bytes[ids[:, 1:]].sum())
        found[name] = round(nats / math.log(2) / max(size, 1.0), 4)
    total = sum(data.weights[name] for name in found)
    found["total"] = round(sum(found[name] * data.weights[name] for name in found) / total, 4)
    return found


def exit_agreement(model: LlamaForCausalLM, rows: Tensor, prompt: int = 0) -> list[float]:
    """Share of positions after `prompt` where each exit's greedy token is the full model's: L numbers."""
    states = models.hidden_states(model, rows[:, :-1])
    best = [models.logits(model, hidden[:, prompt:]).argmax(-1) for hidden in states]
    return [round(float((exit_best == best[-1]).float().mean()), 4) for exit_best in best]


def greedy_agreement(draft: LlamaForCausalLM, target: LlamaForCausalLM, rows: Tensor, mask: Tensor) -> float:
    """Share of masked positions where draft and target have the same greedy token; mask [N, S]."""
    same = total = 0.0
    for ids, chosen in zip(rows.split(16), mask.split(16), strict=True):
        with torch.no_grad():
            said = [models.logits(m, models.hidden_states(m, ids[:, :-1])[-1]).argmax(-1) for m in (draft, target)]
        same += float(((said[0] == said[1]) & chosen).sum())
        total += float(chosen.sum())
    return same / max(total, 1.0)
