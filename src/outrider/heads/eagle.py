"""EAGLE's autoregressive head: one decoder layer over the target's features, with its own small cache.

EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858) share their weights: fc over the next token's embedding
and the target's last feature, one decoder layer, the target's own output head. EAGLE-3 (arXiv 2503.01840) reads three layers of
the target, has its own norm and output head over a part of the vocabulary, and feeds itself back without imitating features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from outrider.heads.checkpoint import TargetSizes
from outrider.heads.feature_head import Norm, RolloutHead, Rotation
from outrider.runner.kv_cache import CacheShape
from outrider.types import OutriderError


@dataclass(frozen=True)
class EagleShape:
    """Shape and variant of a head."""

    generation: int  # 1 (EAGLE-1 and EAGLE-2) or 3
    config: LlamaConfig  # of its layers; vocab_size is the target's
    target_hidden_size: int
    hidden_states: tuple[int, ...]  # target hidden states it reads, numbered as in types.Scores
    draft_vocab_size: int
    fc_bias: bool = False
    out_bias: bool = False  # with attention_bias: whether the output projection also has a bias (Qwen2's does not)
    norm_before_residual: bool = False  # generation 3: the residual is the normed feature
    norm_before_fc: bool = False  # one norm over all features together
    fc_norm: bool = False  # one norm per feature
    norm_output: bool = False  # the feedback passes the final norm (EAGLE-3.1)
    first_layer_norm: bool = False  # generation 1: whether the first layer has an input norm
    reduced: bool = False  # drafts a part of the vocabulary
    own_embedding: bool = False
    own_output: bool = True  # generation 3: False if it uses the target's output head


def _with_short_norms(layer: LlamaDecoderLayer) -> LlamaDecoderLayer:
    for name in ("input_layernorm", "post_attention_layernorm"):
        if not isinstance(getattr(layer, name), nn.Identity):
            setattr(layer, name, Norm(layer.hidden_size, eps=layer.self_attn.config.rms_norm_eps))
    return layer


class FusedLayer(LlamaDecoderLayer):
    """transformers' decoder layer with the concatenated normed embedding and feature as attention input."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__(config, 0)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual
        attention = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, outputs, bias=config.attention_bias))

    def forward(self, embeds: Tensor, hidden: Tensor, **options: Any) -> Tensor:  # type: ignore[override]
        """[B, W, H] embeddings and features -> [B, W, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended, _ = self.self_attn(hidden_states=torch.cat((self.input_layernorm(embeds), normed), -1), **options)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(RolloutHead):
    """Projection, decoder layers and norms; an embedding and an output head of its own if the checkpoint has them."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape, self.target_hidden_size, self.hidden_states = shape, shape.target_hidden_size, shape.hidden_states
        self.settings = shape
        self.imitates_features = shape.generation == 1
        self.uses_targets_output = shape.generation == 1 or not shape.own_output
        config, hidden, features = shape.config, shape.config.hidden_size, len(shape.hidden_states)

        def norm(size: int) -> Norm:
            return Norm(size, eps=config.rms_norm_eps)

        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        rest = [LlamaDecoderLayer(config, index) for index in range(1, config.num_hidden_layers)]
        if shape.generation == 1:
            self.fc = nn.Linear(2 * hidden, hidden, bias=shape.fc_bias)
            first = LlamaDecoderLayer(config, 0)
            if not shape.first_layer_norm:
                first.input_layernorm = nn.Identity()  # type: ignore[assignment]
        else:
            self.fc = nn.Linear(features * shape.target_hidden_size, hidden, bias=shape.fc_bias)
            if shape.norm_before_fc:
                self.input_norm = norm(features * shape.target_hidden_size)
            if shape.fc_norm:
                self.fc_norm = nn.ModuleList([norm(shape.target_hidden_size) for _ in range(features)])
            first = FusedLayer(config, shape.norm_before_residual)
            self.norm = norm(hidden)
            if shape.own_output:
                self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        self.layers = nn.ModuleList([_with_short_norms(layer) for layer in (first, *rest)])
        if config.attention_bias and not shape.out_bias:
            for layer in (first, *rest):
                output = layer.self_attn.o_proj
                layer.self_attn.o_proj = nn.Linear(output.in_features, output.out_features, bias=False)
        self.register_buffer("draft_ids", torch.arange(shape.draft_vocab_size) if shape.reduced else None)
        dim = int(getattr(config, "head_dim", None) or hidden // config.num_attention_heads)
        heads = int(config.num_key_value_heads or config.num_attention_heads)
        self.cache_shape = CacheShape.uniform(int(config.num_hidden_layers), heads, dim, dim)

    def embedding_table(self) -> Tensor:
        """Return [V, H]: its own embedding, or the target's output per token (some targets scale their weights)."""
        if self.shape.own_embedding:
            return self.embed_tokens.weight
        table: Tensor = self.target_modules[0](torch.arange(self.shape.config.vocab_size, device=self.fc.weight.device))
        return table.to(self.fc.weight.dtype)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        if self.shape.generation == 1:
            return features[0]
        if self.shape.fc_norm:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), -1)
        return self.fc(self.input_norm(joined) if self.shape.norm_before_fc else joined)

    def forward(self, token_ids: Tensor, hidden: Tensor, position_ids: Tensor, rotation: Rotation | None = None) -> Tensor:
        embeds = self.embed(token_ids, hidden)
        options = {"position_ids": position_ids, "position_embeddings": rotation or self.rotary_emb(hidden, position_ids)}
        first, *rest = self.layers
        if self.shape.generation == 1:
            hidden = first(self.fc(torch.cat((embeds, hidden), -1)), **options)
        else:
            hidden = first(embeds, hidden, **options)
        for layer in rest:
            hidden = layer(hidden, **options)
        return hidden

    def feedback(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.shape.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        if self.shape.generation == 3:
            out = self.norm(out)
            if self.shape.own_output:
                return self.lm_head(out)
        return self.target_logits(out)

    def set_attention(self, name: str) -> None:
        """Set the attention function of its layers, by its name in transformers."""
        self.shape.config._attn_implementation = name

    def check_fit(self, target: TargetSizes) -> None:
        super().check_fit(target)
        shape, name = self.shape, target.name
        if not shape.own_embedding or self.uses_targets_output:
            self.check_shared_size(shape.config.hidden_size, target)
        if shape.own_embedding and shape.config.vocab_size < target.vocab_size:
            raise OutriderError(f"the head has {shape.config.vocab_size} embeddings, but {name} has {target.vocab_size} tokens")


def check_hidden_states(states: tuple[int, ...], head: EagleHead, num_layers: int) -> None:
    """Raise ``OutriderError`` unless these hidden states of a target can replace those in the config of a head."""
    expected = len(head.hidden_states)
    if len(states) != expected or not 0 <= min(states) <= max(states) <= num_layers:
        raise OutriderError(f"invalid hidden_states {states}: expected {expected} numbers from 0 to {num_layers}")


def default_hidden_states(num_layers: int) -> tuple[int, int, int]:
    """Return the default hidden states of EAGLE-3's authors: 2, n // 2, n - 3.

    Raises ``OutriderError`` for a target without such layers.
    """
    if num_layers < 6:
        raise OutriderError(f"no default hidden states for a target with {num_layers} layers: name three of them")
    return 2, num_layers // 2, num_layers - 3
