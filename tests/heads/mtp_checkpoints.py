"""Tiny checkpoints with MTP heads under the published names, and a reference implementation on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, linear
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA | {"num_hidden_layers": 4},
    "qwen3_next": DELTA | EXPERTS | {"num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "deepseek_v3": LATENT | EXPERTS | {"n_routed_experts": 4, "num_key_value_heads": 4, "n_shared_experts": 1},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1},
    "qwen2": {},  # MiMo-7B has Qwen2's layers
}
# prefix, then the names of: fc, norm of the embedding, norm of the feature, final norm, decoder layer
NAMES = {
    "qwen": ("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
    "deepseek": ("model.layers.2.", "eh_proj", "enorm", "hnorm", "shared_head.norm", ""),
    "mimo": ("model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
}
LAYOUT_OF = dict(zip(FAMILIES, ("qwen", "qwen", "deepseek", "deepseek", "mimo"), strict=True))
ZERO_CENTRED = ("qwen3_5_text", "qwen3_next")  # norms whose scale is 1 + weight


def tiny_target(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(SMALL | FAMILIES[family] | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    return randomised(model)


def randomised(module: Any) -> Any:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return module


def write_checkpoint(family: str, folder: Path, model: PreTrainedModel, own_tables: bool = False) -> dict[str, Tensor]:
    """Save the target with a random head. Returns the head's tensors by their published names."""
    torch.manual_seed(3)
    prefix, *names, inner = NAMES[LAYOUT_OF[family]]
    hidden, last = int(model.config.hidden_size), model.model.layers[-1]
    layer = randomised(type(last)(model.config, model.config.num_hidden_layers - 1))
    if "e_score_correction_bias" in dict(layer.named_buffers()):
        raise AssertionError("unexpected name")
    tensors = {prefix + names[0] + ".weight": torch.randn(hidden, 2 * hidden) * 0.2}
    tensors |= {f"{prefix}{name}.weight": torch.rand(hidden) for name in names[1:]}
    for name, tensor in layer.state_dict().items():
        stem, _, stack = name.rpartition(".experts.")
        if not stem:
            tensors[prefix + inner + name] = tensor + 0.1 * torch.rand_like(tensor) if "norm" in name else tensor
            continue
        for expert, rows in enumerate(tensor):  # checkpoints store separate matrices per expert
            parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(parts, rows.chunk(len(parts)), strict=True):
                tensors[f"{prefix}{inner}{stem}.experts.{expert}.{part}.weight"] = matrix.clone()
    if LAYOUT_OF[family] == "deepseek":  # as in the published checkpoints
        tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
        if own_tables:
            tensors[f"{prefix}embed_tokens.weight"] = torch.randn(61, hidden)
            tensors[f"{prefix}shared_head.head.weight"] = torch.randn(61, hidden)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return tensors


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Reference:
    """Reference implementation over a whole sequence without a cache.

    The decoder layer is transformers', with eager attention.
    """

    def __init__(self, family: str, tensors: dict[str, Tensor], model: PreTrainedModel) -> None:
        self.model, self.tensors, self.family = model, tensors, family
        self.prefix, *self.names, inner = NAMES[LAYOUT_OF[family]]
        last = model.model.layers[-1]
        self.layer = type(last)(model.config, model.config.num_hidden_layers - 1).eval()
        for name, there in self.layer.state_dict().items():
            stem, _, stack = name.rpartition(".experts.")
            whole = f"{self.prefix}{inner}{stem}.experts."
            if not stem:
                there.copy_(tensors[self.prefix + inner + name])
            elif stack == "down_proj":
                there.copy_(torch.stack([tensors[f"{whole}{e}.down_proj.weight"] for e in range(len(there))]))
            else:
                pairs = [[tensors[f"{whole}{e}.{part}.weight"] for part in ("gate_proj", "up_proj")] for e in range(len(there))]
                there.copy_(torch.stack([torch.cat(pair) for pair in pairs]))

    def norm(self, index: int, x: Tensor) -> Tensor:
        scale = self.tensors[f"{self.prefix}{self.names[index]}.weight"] + (self.family in ZERO_CENTRED)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * scale

    @torch.no_grad()
    def out(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Map tokens [T] and the preceding features [T, H] to the head's outputs [T, H]."""
        table = self.tensors.get(f"{self.prefix}embed_tokens.weight", self.model.get_input_embeddings().weight)
        embeds, features = self.norm(1, embedding(tokens, table)), self.norm(2, features)
        halves = (features, embeds) if LAYOUT_OF[self.family] == "mimo" else (embeds, features)
        x = linear(torch.cat(halves, -1), self.tensors[f"{self.prefix}{self.names[0]}.weight"])[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self.norm(3, (out[0] if isinstance(out, tuple) else out)[0])

    def logits(self, out: Tensor) -> Tensor:
        return linear(out, self.tensors.get(f"{self.prefix}shared_head.head.weight", self.model.lm_head.weight))
