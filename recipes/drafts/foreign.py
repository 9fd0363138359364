"""A draft with its own vocabulary: a byte-level BPE tokenizer of another size, and a small Llama trained with it on text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from outrider.runner.tokenizers import BROKEN
from outrider.train import plots
from outrider.train.shrink import shrink
from outrider.train.trainer import Trainer
from recipes.family import corpus, data, evaluate, model, tokenizer
from recipes.family.config import PRESETS, SEED

WRITTEN_SHARE = 0.5  # share of rows written by the target, if there are any
SAMPLE = 12_000_000  # characters that the tokenizer is trained on


def prepare(folder: Path, texts: Path, megabytes: float, vocab: int, written: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer, and tokenise the family's and the target's text with it, unless this was done already."""
    if not (folder / "tokens" / "tokens.json").exists():
        splits = corpus.load(texts, megabytes)
        learned = tokenizer.train(tokenizer.balanced_sample(splits, SAMPLE), vocab)
        learned.save_pretrained(folder / "tokenizer")
        if written:  # before the others, whose last file says that all are complete
            (folder / "tokens").mkdir(exist_ok=True)
            data.encode(learned, written, folder / "tokens" / "train_written.bin")
        data.encode_all(learned, splits, folder / "tokens")
    return tokenizer.load(folder / "tokenizer")


def mixture(tokens: Path) -> data.Mixture:
    """Return the family's text mixture with the target's own text added."""
    mixed = data.training_mixture(tokens, SEED + 11)
    own = tokens / "train_written.bin"
    if not own.exists():
        return mixed
    weights = {name: (1 - WRITTEN_SHARE) * share for name, share in zip(mixed.names, mixed.shares.tolist(), strict=True)}
    streams = dict(mixed.streams) | {"written": np.memmap(own, dtype=np.uint16, mode="r")}
    return data.Mixture(streams, weights | {"written": WRITTEN_SHARE}, SEED + 11)


def pieces(own: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast) -> Tensor:
    """Return each token of ``own`` as the mean of the target tokens that spell it: [Vd, V]."""
    table = torch.zeros(len(own), len(target))
    for index, token in enumerate(own.convert_ids_to_tokens(list(range(len(own))))):
        text = own.decode([index])
        whole = token in own.all_special_tokens or BROKEN not in text
        ids: Any = target.encode(text) if whole else target.convert_tokens_to_ids(list(token))
        for piece in ids:
            table[index, piece] += 1 / len(ids)
    return table


def train(folder: Path, family: Path, minutes: float, out: Path) -> None:
    """Train the draft on the output of ``prepare`` in ``folder`` and write it to ``out``."""
    learned, of_target = tokenizer.load(folder / "tokenizer"), tokenizer.load(family / "target")
    preset = replace(PRESETS["cpu"], vocab=len(learned))
    net = model.build(preset.draft, preset, SEED + 11)
    shrink(model.load(family / "target"), net, preset.distillation.layers, pieces(learned, of_target))
    plan = replace(preset.draft_plan, max_tokens=20_000_000, minutes=minutes, eval_every_s=120.0, seed=SEED + 11)
    found = evaluate.held_out(folder / "tokens", learned, {each.name: each.weight for each in corpus.SOURCES}, 256, 4_096)
    loss = model.text_loss(net, torch.float32)

    def measure(final: bool) -> dict[str, Any]:
        return {"bpb": evaluate.bits_per_byte(net, found)}

    Trainer("foreign", net, mixture(folder / "tokens"), loss, plan, folder / "foreign", measure).run()
    model.export(folder / "foreign" / "checkpoint.pt", preset.draft, preset, folder / "tokenizer", out)
    plots.draw("foreign", folder / "foreign", out)
    with torch.no_grad():
        bits = evaluate.bits_per_byte(net, found)["total"]
    common = len(set(learned.get_vocab()) & set(of_target.get_vocab()))
    measured = {"vocabulary": len(learned), "tokens_in_common": common, "bits_per_byte": bits}
    (out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
