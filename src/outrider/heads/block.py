"""Heads that draft a block in one pass: DFlash (arXiv 2602.06036, z-lab) and DSpark (arXiv 2607.05147, DeepSeek).

A small transformer reads several hidden states of the target, joined by ``fc`` and a norm to one feature per committed token.
The keys and values of every layer are those of all features and of the block; queries are those of the block alone: the last
committed token, whose features the target has not computed yet, and mask tokens, which see each other both ways. Embedding and
output head are the target's. In DFlash the position of a mask token predicts that token; in DSpark every position predicts the
token after it, and a bias of low rank on the logits depends on the token before, so that a block is sampled in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding, rotate_half

from outrider.heads.checkpoint import TargetSizes
from outrider.heads.feature_head import FeatureHead, Norm, Rotation
from outrider.runner.kv_cache import CacheShape
from outrider.types import OutriderError


@dataclass(frozen=True)
class BlockShape:
    """Shape and variant of a head."""

    config: Qwen3Config  # of its layers; vocab_size is the target's
    target_hidden_size: int
    hidden_states: tuple[int, ...]  # target hidden states it reads, numbered as in types.Scores
    block_size: int  # tokens of a whole block, the last committed one included
    mask_token_id: int
    draft_vocab_size: int
    windows: tuple[int, ...]  # by layer: how many positions before a token it sees; 0: all
    causal_windows: bool = False  # whether in layers with a window the block's tokens see only those before them
    predicts_next: bool = False  # whether a position predicts the token after it, instead of its own
    markov_rank: int = 0  # rank of the bias by the token before; 0: none
    reduced: bool = False  # drafts a part of the vocabulary
    own_embedding: bool = False
    own_output: bool = False

    @property
    def num_kv_heads(self) -> int:
        return int(self.config.num_key_value_heads or self.config.num_attention_heads)

    @property
    def max_drafts(self) -> int:
        """Return how many tokens a whole block predicts."""
        return self.block_size if self.predicts_next else self.block_size - 1


class Attend(Protocol):
    """Attention of a block: query [B, heads, T, D]; key, value [B, Hkv, C + T, D], the context's first -> [B, T, heads, D]."""

    def __call__(self, layer: BlockAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class BlockAttention(nn.Module):
    """Attention with a norm within heads, as Qwen3's, over context and block."""

    def __init__(self, shape: BlockShape, layer_idx: int) -> None:
        super().__init__()
        config, self.layer_idx = shape.config, layer_idx
        hidden, bias, self.head_dim = config.hidden_size, bool(config.attention_bias), int(config.head_dim)
        self.window = shape.windows[layer_idx]
        self.sees_earlier_only = bool(self.window) and shape.causal_windows
        heads, kv_heads = config.num_attention_heads * self.head_dim, shape.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, heads, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, hidden, bias=bias)
        self.q_norm, self.k_norm = (Norm(self.head_dim, eps=config.rms_norm_eps) for _ in range(2))

    def project(self, rows: Tensor, num_context: int, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, heads, T, D] of the last T rows, and keys and values [B, Hkv, C + T, D] of rows [B, C + T, H]."""

        def by_head(values: Tensor) -> Tensor:
            return values.view(*values.shape[:-1], -1, self.head_dim)

        cos, sin = rotation[0].unsqueeze(1), rotation[1].unsqueeze(1)  # [B, 1, C + T, D]
        query = self.q_norm(by_head(self.q_proj(rows))[:, num_context:]).transpose(1, 2)
        key = self.k_norm(by_head(self.k_proj(rows))).transpose(1, 2)
        value = by_head(self.v_proj(rows)).transpose(1, 2)
        own = cos[:, :, num_context:], sin[:, :, num_context:]
        return query * own[0] + rotate_half(query) * own[1], key * cos + rotate_half(key) * sin, value

    def forward(self, hidden: Tensor, context: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        # One product for both, so that the weights are read once. Query, key and value share their input: it is one tensor.
        rows = torch.cat((context, hidden), 1)
        query, key, value = self.project(rows, context.shape[1], rotation)
        out: Tensor = self.o_proj(attend(self, query, key, value).flatten(2))
        return out


class BlockLayer(nn.Module):
    """A layer over the block; the context stays as it is."""

    def __init__(self, shape: BlockShape, layer_idx: int) -> None:
        super().__init__()
        config = shape.config
        self.self_attn, self.mlp = BlockAttention(shape, layer_idx), Qwen3MLP(config)
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rotation, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class MarkovHead(nn.Module):
    """A bias on the logits that depends on the token before, of low rank (DSpark's "vanilla" Markov head)."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map tokens [...] of the target to [..., Vd]."""
        out: Tensor = self.markov_w2(self.markov_w1(token_ids))
        return out


class BlockHead(FeatureHead):
    """The head's modules, under the names of z-lab's checkpoints."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        config, hidden = shape.config, shape.config.hidden_size
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.fc = nn.Linear(len(shape.hidden_states) * shape.target_hidden_size, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(shape, index) for index in range(config.num_hidden_layers)])
        self.norm = Norm(hidden, eps=config.rms_norm_eps)
        if shape.own_output:
            self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        self.markov_head = (
            MarkovHead(config.vocab_size, shape.draft_vocab_size, shape.markov_rank) if shape.markov_rank else None
        )
        self.register_buffer("draft_ids", torch.arange(shape.draft_vocab_size) if shape.reduced else None)

    @property
    def attentions(self) -> Iterator[BlockAttention]:
        """Yield the attention of each layer."""
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            yield layer.self_attn

    @property
    def hidden_states(self) -> tuple[int, ...]:
        return self.shape.hidden_states

    @property
    def uses_targets_output(self) -> bool:
        return not self.shape.own_output

    @property
    def cache_shape(self) -> CacheShape:
        config = self.shape.config
        dim = int(config.head_dim)
        return CacheShape.uniform(int(config.num_hidden_layers), self.shape.num_kv_heads, dim, dim)

    def exact_rotary(self) -> nn.Module:
        return Qwen3RotaryEmbedding(self.shape.config)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(list(features), -1)))
        return fused

    def forward(self, hidden: Tensor, context: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Map the block's embeddings [B, T, H], in the context of fused features [B, C, H], to the input of ``logits``.

        ``rotation``: cosines and sines [B, C + T, D] at the positions of both, the context's first.
        """
        for layer in self.layers:
            hidden = layer(hidden, context, rotation, attend)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, out: Tensor) -> Tensor:
        """Map [..., H] to logits [..., Vd], to which ``bias_after`` is added."""
        if self.shape.own_output:
            return self.lm_head(out)  # type: ignore[no-any-return]
        logits = self.target_logits(out)
        return logits if self.draft_ids is None else logits[..., self.draft_ids]

    def bias_after(self, token_ids: Tensor) -> Tensor | None:
        """Return what is added to the logits after these tokens of the target: [...] -> [..., Vd]; None: nothing."""
        return None if self.markov_head is None else self.markov_head(token_ids)

    def check_fit(self, target: TargetSizes) -> None:
        shape, name = self.shape, target.name
        if shape.target_hidden_size != target.hidden_size:
            raise OutriderError(f"the head expects hidden size {shape.target_hidden_size}, but {name} has {target.hidden_size}")
        if shape.config.vocab_size != target.vocab_size:
            raise OutriderError(f"the head was made for {shape.config.vocab_size} tokens, but {name} has {target.vocab_size}")
        if shape.config.hidden_size != target.hidden_size and not (shape.own_embedding and shape.own_output):
            raise OutriderError(
                f"the head has hidden size {shape.config.hidden_size} but no embedding or output head of that size"
            )
        if not 0 <= shape.mask_token_id < target.vocab_size:
            raise OutriderError(f"the head's mask token is {shape.mask_token_id}, but {name} has {target.vocab_size} tokens")
        self.check_hidden_states(target)
        self.check_draft_ids(target)
