"""Convert a checkpoint to a Hugging Face folder in bfloat16."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from . import model, tokenizer
from .config import Preset, Shape


def export(checkpoint: Path, shape: Shape, preset: Preset, tokenizer_folder: Path, out: Path) -> None:
    """Write config, weights, generation config and tokenizer of a checkpoint. The run may still be training."""
    net = model.build(shape, preset, seed=0)
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["model"]
    net.load_state_dict(state)
    if out.exists():
        shutil.rmtree(out)
    write(net, tokenizer_folder, out)


def write(net: PreTrainedModel, tokenizer_folder: Path, out: Path) -> None:
    """Write a model in bfloat16 with its tokenizer."""
    net.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=False)
    net.to(torch.bfloat16).save_pretrained(out)
    tokenizer.load(tokenizer_folder).save_pretrained(out)
    tokenizer.write_config(out)
