"""Heads that draft a block in one pass: DFlash (arXiv 2602.06036, z-lab), DSpark (arXiv 2607.05147, DeepSeek) and DFlash 2
(inco.ai/blog/dflash2 and z-lab/dflash).

A small transformer reads several hidden states of the target, joined by ``fc`` and a norm to one feature per committed token.
Every layer has keys and values for all features and the block, and queries for the block only: the last committed token, whose
features the target has not computed yet, and mask tokens, which attend to each other in both directions. Embedding and output
head are the target's. In DFlash, the position of a mask token predicts that token. In DSpark, every position predicts the next
token, and a low-rank bias on the logits depends on the previous token, so a block is sampled in order. DFlash 2 is DFlash with
short convolutions over the block around attention and MLP, and with a path selector: a low-rank score of each pair of the
previous token and one of the most likely candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

BELOW = 1e4  # distance of other tokens' logits below those of candidates


@dataclass(frozen=True)
class BlockShape:
    """Shape and variant of a head."""

    config: Qwen3Config  # of its layers; vocab_size is the target's
    target_hidden_size: int
    hidden_states: tuple[int, ...]  # target hidden states it reads, numbered as in types.Scores
    block_size: int  # tokens of a whole block, the last committed one included
    mask_token_id: int
    draft_vocab_size: int
    windows: tuple[int, ...]  # by layer: number of previous positions that a token attends to; 0: all
    causal_windows: bool = False  # whether the block's tokens attend only to earlier ones in layers with a window
    predicts_next: bool = False  # whether a position predicts the next token instead of its own
    markov_rank: int = 0  # rank of the bias for the previous token; 0: none
    conv_taps: int = 0  # tokens of a convolution, its own included; 0: no convolutions
    conv_group: int = 1  # channels that share the part of a convolution's kernel that depends on the token
    selector_rank: int = 0  # rank of the path selector's pair scores; 0: no selector
    num_candidates: int = 0  # tokens that the path selector chooses from
    output_scale: float = 1.0  # factor of the output head's values
    softcap: float = 0.0  # limit of the logits; 0: none
    reduced: bool = False  # whether its vocabulary is a part of the target's
    own_embedding: bool = False
    own_output: bool = False

    @property
    def num_kv_heads(self) -> int:
        return int(self.config.num_key_value_heads or self.config.num_attention_heads)

    @property
    def in_order(self) -> bool:
        """Return whether a draft depends on the previous draft."""
        return self.markov_rank > 0 or self.selector_rank > 0

    @property
    def max_drafts(self) -> int:
        """Return the number of drafts in a whole block."""
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
        return self.o_proj(attend(self, query, key, value).flatten(2))


class GroupedConv(nn.Module):
    """Convolutions over the tokens of a block, before and after a sublayer.

    A coefficient is a learned one of its channel plus one of its group of channels, computed from the sublayer's input.
    Tokens before the block count as zero.
    """

    def __init__(self, hidden_size: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        identity = torch.zeros(2, taps, hidden_size)
        identity[:, 0] = 1.0
        self.base_kernel = nn.Parameter(identity)  # [before or after, taps, H]
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * hidden_size // group, bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], hidden: Tensor, block_index: Tensor) -> Tensor:
        """Apply a sublayer to [B, T, H]. ``block_index``: the index of each token in its block, [1 or B, T]."""
        own = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        before, after = (self.base_kernel.to(hidden.dtype) + own).unbind(-3)  # [B, T, taps, H] each
        return _convolved(sublayer(_convolved(hidden, before, block_index)), after, block_index)


def _convolved(values: Tensor, kernel: Tensor, block_index: Tensor) -> Tensor:
    """Sum over taps i: values [B, T, H] of i tokens before times kernel [B, T, taps, H] at i."""
    out = kernel[..., 0, :] * values
    for tap in range(1, kernel.shape[-2]):
        earlier = values.roll(tap, 1).masked_fill((block_index < tap)[..., None], 0.0)
        out = out + kernel[..., tap, :] * earlier
    return out


class BlockLayer(nn.Module):
    """A layer over the block; it does not change the context."""

    def __init__(self, shape: BlockShape, layer_idx: int) -> None:
        super().__init__()
        config = shape.config
        self.self_attn, self.mlp = BlockAttention(shape, layer_idx), Qwen3MLP(config)
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv, self.mlp_conv = (
            GroupedConv(config.hidden_size, shape.conv_taps, shape.conv_group) if shape.conv_taps else None for _ in range(2)
        )

    def forward(self, hidden: Tensor, context: Tensor, rotation: Rotation, attend: Attend, block_index: Tensor) -> Tensor:
        def attention(normed: Tensor) -> Tensor:
            return self.self_attn(normed, context, rotation, attend)

        sublayers = (
            (self.input_layernorm, attention, self.attention_conv),
            (self.post_attention_layernorm, self.mlp, self.mlp_conv),
        )
        for norm, sublayer, conv in sublayers:
            normed = norm(hidden)
            hidden = hidden + (sublayer(normed) if conv is None else conv.around(sublayer, normed, block_index))
        return hidden


class MarkovHead(nn.Module):
    """A low-rank bias on the logits that depends on the previous token (DSpark's "vanilla" Markov head)."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map tokens [...] of the target to [..., Vd]."""
        return self.markov_w2(self.markov_w1(token_ids))


class CandidateSelector(nn.Module):
    """DFlash 2's path selector: scores each of a draft's most likely tokens together with the previous token.

    The score of b after a is U(b) + <A(a) * H(h), B(b)>: U are the head's logits, h is its output, H a projection, A and B are
    tables. All other tokens are below all candidates, in the order of their logits: they are drafted if a grammar or a ban
    excludes every candidate.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, num_candidates: int) -> None:
        super().__init__()
        self.num_candidates = num_candidates
        self.predecessor_codebook, self.successor_codebook = (nn.Parameter(torch.randn(vocab_size, rank)) for _ in range(2))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def scores(self, out: Tensor, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates [..., C] and their scores, for outputs [..., H], logits [..., V] and previous tokens [...]."""
        best = logits.topk(self.num_candidates, -1, sorted=False)
        before = self.predecessor_codebook[token_ids].to(out.dtype) * self.hidden_projection(out)  # [..., R]
        pairs = self.successor_codebook[best.indices].to(out.dtype) @ before[..., None]  # [..., C, 1]
        return best.indices, best.values + pairs.squeeze(-1)

    def forward(self, out: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Return logits [..., V] with the candidates' scores, for the arguments of ``scores``."""
        candidates, scores = self.scores(out, logits, token_ids)
        wide = torch.promote_types(logits.dtype, torch.float32)  # 16 bits cannot order numbers around -10,000
        return (logits.to(wide) - BELOW).scatter(-1, candidates, scores.to(wide))


class BlockHead(FeatureHead):
    """The head's modules, under the names of z-lab's checkpoints."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape, self.target_hidden_size, self.hidden_states = shape, shape.target_hidden_size, shape.hidden_states
        self.settings, self.uses_targets_output = shape, not shape.own_output
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
        self.candidate_selector = (
            CandidateSelector(config.vocab_size, hidden, shape.selector_rank, shape.num_candidates)
            if shape.selector_rank
            else None
        )
        self.register_buffer("draft_ids", torch.arange(shape.draft_vocab_size) if shape.reduced else None)
        dim = int(config.head_dim)
        self.cache_shape = CacheShape.uniform(int(config.num_hidden_layers), shape.num_kv_heads, dim, dim)

    @property
    def attentions(self) -> Iterator[BlockAttention]:
        """Yield the attention of each layer."""
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            yield layer.self_attn

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return self.hidden_norm(self.fc(torch.cat(list(features), -1)))

    def forward(self, hidden: Tensor, context: Tensor, rotation: Rotation, attend: Attend, block_index: Tensor) -> Tensor:
        """Map the embeddings of blocks [B, T, H], in the context of fused features [B, C, H], to the input of ``logits``.

        ``rotation``: cosines and sines [B, C + T, D] at the positions of both, the context's first; ``block_index``: the index
        of each token in its block, [1 or B, T].
        """
        for layer in self.layers:
            hidden = layer(hidden, context, rotation, attend, block_index)
        return self.norm(hidden)

    def logits(self, out: Tensor) -> Tensor:
        """Map [..., H] to logits [..., Vd] for ``logits_after``."""
        scale, cap = self.shape.output_scale, self.shape.softcap
        logits: Tensor
        if self.shape.own_output:
            logits = self.lm_head(out)
        else:  # a config with any post-processing settings has all of them
            logits = self.target_logits(out) if (scale, cap) == (1.0, 0.0) else self.target_modules[1](out)
            logits = logits if self.draft_ids is None else logits[..., self.draft_ids]
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap == 0.0 else (logits / cap).tanh() * cap

    def logits_after(self, out: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logits [..., Vd] of drafts after these tokens of the target [...].

        ``logits``: logits of the outputs ``out`` [..., H] alone.
        """
        if self.markov_head is not None:
            logits = logits + self.markov_head(token_ids)
        return logits if self.candidate_selector is None else self.candidate_selector(out, logits, token_ids)

    def check_fit(self, target: TargetSizes) -> None:
        super().check_fit(target)
        shape, name = self.shape, target.name
        self.check_vocabulary(shape.config.vocab_size, target)
        if not (shape.own_embedding and shape.own_output):
            self.check_shared_size(shape.config.hidden_size, target)
        if not 0 <= shape.mask_token_id < target.vocab_size:
            raise OutriderError(f"the head's mask token is {shape.mask_token_id}, but {name} has {target.vocab_size} tokens")
