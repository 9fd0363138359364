"""Train a small hybrid of Qwen3.5's shape on the family's text: `python -m recipes.hybrid --minutes 60`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from outrider.train.plan import TrainingPlan
from outrider.train.precision import arithmetic_dtype
from outrider.train.trainer import Batches, Trainer
from recipes import run
from recipes.family import data, tokenizer
from recipes.family.config import TOKEN_IDS
from recipes.family.model import text_loss, write

app = typer.Typer(add_completion=False, help=__doc__)

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 1024,
}


def build(vocab_size: int, seed: int, **changes: Any) -> Qwen3_5ForCausalLM:
    """Return a new model; three of four layers are Gated DeltaNet."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(vocab_size=vocab_size, tie_word_embeddings=True, **TOKEN_IDS, **(SHAPE | changes))
    model: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM(config).float()
    return model


def training(model: PreTrainedModel, batches: Batches, plan: TrainingPlan, folder: Path) -> Trainer:
    """Return the training run."""
    return Trainer("hybrid", model, batches, text_loss(model, arithmetic_dtype(model.device)), plan, folder)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(help="of training")] = 60.0,
    family: Annotated[Path, typer.Option(help="the family recipe's work folder: tokens and tokenizer")] = Path("build/family"),
    work: Annotated[Path, typer.Option(help="folder of the checkpoint, with the model in model/")] = Path("build/hybrid"),
) -> None:
    """Train and export. Run again to resume."""
    data.check_tokens(family / "tokens")
    plan = TrainingPlan(10**9, 4096, ((1.0, 256),), minutes=minutes, muon_lr=0.01, adam_lr=0.0025, warmup=0.02)
    model = build(len(tokenizer.load(family / "tokenizer")), plan.seed)
    nn.Module.to(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    training(model, data.training_mixture(family / "tokens", plan.seed), plan, work).run()
    write(model, family / "tokenizer", work / "model")


if __name__ == "__main__":
    run(app)
