"""Building the two Llamas and running them layer by layer. The modelling code is transformers' own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.train.decoder import Decoder

from .config import Preset, Shape


def build(shape: Shape, preset: Preset, seed: int) -> LlamaForCausalLM:
    """A fresh model; residual branches start at zero, which suits short runs."""
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
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        # the backward pass of torch's own attention on CPUs costs a third of a step at 256 tokens, plain products a tenth
        attn_implementation="sdpa" if torch.cuda.is_available() else "eager",
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def load(folder: Path) -> LlamaForCausalLM:
    """An exported model, in float32 for measuring."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile each layer in place: one graph a shape serves all depths, exits and skipped layers."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


class LlamaDecoder(Decoder):
    """The same with a head that can be compiled: it is two modules, not a whole model's forward."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own final norm and head on any layer's hidden state: [B, S, H] -> [B, S, V]."""
        out: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return out
