"""Build, load and export the two Llamas, and run them layer by layer, using transformers' modelling code."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.train.decoder import Decoder
from outrider.train.layer_skip import EarlyExitLoss, drop_rates, in_turn
from outrider.train.precision import arithmetic
from outrider.train.trainer import Loss

from . import tokenizer
from .config import TOKEN_IDS, Growth, Preset, Shape

CPU = torch.device("cpu")


def build(shape: Shape, preset: Preset, seed: int, device: torch.device = CPU) -> LlamaForCausalLM:
    """Return a new model. Residual branches start at zero, which suits short runs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=preset.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        intermediate_size=shape.intermediate,
        max_position_embeddings=preset.max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        # at 256 tokens, the backward pass of torch's attention on CPUs takes a third of a step, plain matrix products a tenth
        **TOKEN_IDS | {"attn_implementation": "sdpa" if torch.cuda.is_available() else "eager"},
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return nn.Module.to(model, device)


def load(folder: Path, device: torch.device = CPU) -> LlamaForCausalLM:
    """Load an exported model in float32, for measurements."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return nn.Module.to(model, device)


def export(checkpoint: Path, shape: Shape, preset: Preset, tokenizer_folder: Path, out: Path) -> None:
    """Write config, weights, generation config and tokenizer of a checkpoint. The run may still be training."""
    net = build(shape, preset, seed=0)
    net.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["model"])
    if out.exists():
        shutil.rmtree(out)
    write(net, tokenizer_folder, out)


def write(net: PreTrainedModel, tokenizer_folder: Path, out: Path) -> None:
    """Write a model in bfloat16 with its tokenizer."""
    net.generation_config = GenerationConfig(**TOKEN_IDS, do_sample=False)
    net.bfloat16().save_pretrained(out)
    tokenizer.load(tokenizer_folder).save_pretrained(out)
    tokenizer.write_config(out)


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile each layer in place. One graph per shape serves all depths, exits and skipped layers."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def text_loss(model: PreTrainedModel, dtype: torch.dtype) -> Loss:
    """Return the mean cross entropy of ids [B, S + 1], computed in a dtype."""

    def loss(ids: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        with arithmetic(ids.device, dtype):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            found = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return found, {"loss": found.detach()}

    return loss


class LlamaDecoder(Decoder):
    """A decoder whose head can be compiled: it consists of two modules instead of a whole model's forward."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the model's final norm and head to the hidden state of any layer: [B, S, H] -> [B, S, V]."""
        out: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return out


def plain_first(share: float, plain: Loss, later: Loss) -> Loss:
    """Return a loss that is ``plain`` for the first share of a run."""

    def loss(ids: Tensor, step: int, pass_index: int, progress: float) -> tuple[Tensor, dict[str, Any]]:
        return (plain if progress < share else later)(ids, step, pass_index, progress)

    return loss


@dataclass
class GrowingExitLoss(EarlyExitLoss):
    """Early-exit loss of a model that grows: exits of the layers added so far, computed on a share of the rows.

    A layer is dropped for all rows of a step, so that compiled layers see one shape.
    """

    growth: Growth = field(default_factory=Growth)

    def exit_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of an early exit on a share of the rows."""
        rows = max(1, int(len(hidden) * self.growth.exit_share))
        return super().exit_loss(hidden[:rows], labels[:rows])

    def exits(self, step: int, progress: float) -> list[int]:
        """Return the early exits trained in a step, as layer indices."""
        first, every = (1, 1) if progress >= self.growth.grow_at else (2, 2)
        return in_turn(range(first, len(self.decoder.layers) - 1, every), self.options.rotation, step)

    def runs(self, rows: int, pass_index: int, progress: float) -> Tensor:
        """Return bool [L, B]: the rows that each layer runs for; others are dropped, or the layer is not grown yet."""
        over_time = 2**progress - 1 if self.growth.from_scratch else 1.0  # equation 3
        rates = over_time * np.array(drop_rates(len(self.decoder.layers), self.options.max_drop))
        drawn = np.random.default_rng((self.seed, pass_index, 1)).random((len(rates), 1))
        runs = torch.from_numpy(drawn >= rates[:, None]).repeat(1, rows)
        if progress < self.growth.grow_at:
            runs[1::2] = False
        return runs
