"""Runs a head over its own KV cache: catches up with the target's features, and drafts a tree level by level behind them.

Built from the runner's parts: the ragged cache, Outrider's attention and packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.heads.eagle import EagleHead, Rotation
from outrider.heads.own_logits import finish_of
from outrider.runner import ModelRunner, linear
from outrider.runner.attention import PassLayout, active_pass
from outrider.runner.kv_cache import CacheShape, KVCache

CHUNK = 256  # entries of a request per pass while its prompt is read


class HeadRunner:
    """One head beside one target. An entry of its cache is made from the target's own feature; drafted ones are overwritten."""

    def __init__(self, head: EagleHead, target: ModelRunner) -> None:
        self.head, self.dtype = head, linear.place(head, target.model)
        # Moved to 16 bits, the frequencies were rounded too: a hundred tokens on, angles would be off.
        head.rotary_emb = LlamaRotaryEmbedding(head.shape.llama).to(target.device)
        model, finish = target.model, finish_of(target.model) if head.uses_targets_output else None
        head.lend(model.get_input_embeddings(), model.get_output_embeddings(), finish)
        self.device, self._max_len, self._vocab_size = target.device, target.max_len, target.vocab_size
        self.cache = KVCache(_cache_shape(head.shape.llama), target.max_batch, target.max_len, self.dtype, target.device)
        self._rotations: Rotation | None = None  # of the first positions, [S, D]

    def cached_len(self, request_id: str) -> int:
        """Entries of a request made from the target's features."""
        return self.cache.cached_len(request_id)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forgets requests."""
        self.cache.release(request_ids)

    @torch.inference_mode()
    def extend(
        self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]], features: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """Adds entries: of each request the tokens [n_b] and, by hidden state, the features [n_b, Ht] before them; n_b >= 1.

        Returns what the head puts out at each request's last entry: [B, H].
        """
        rows = [self.cache.row(request_id) for request_id in request_ids]
        fused = [self.head.fuse([each.to(self.device, self.dtype) for each in of_request]) for of_request in features]
        last: list[Tensor | None] = [None] * len(rows)
        longest = max(map(len, tokens))
        for start in range(0, longest, CHUNK):
            some = [b for b, ids in enumerate(tokens) if len(ids) > start]
            ids = [list(tokens[b][start : start + CHUNK]) for b in some]
            hidden = [fused[b][start : start + CHUNK] for b in some]
            out = self._chain([rows[b] for b in some], ids, hidden)
            for i, b in enumerate(some):
                self.cache.cached_lens[rows[b]] += len(ids[i])
                if len(tokens[b]) <= start + CHUNK:
                    last[b] = out[i][-1]
        return torch.stack([each for each in last if each is not None])

    def _chain(self, rows: list[int], ids: list[list[int]], hidden: list[Tensor]) -> Sequence[Tensor]:
        """What the head puts out at each request's tokens: [n_b, H] each."""
        bases, lens = [self.cache.cached_lens[row] for row in rows], list(map(len, ids))
        token_ids = torch.tensor([token for each in ids for token in each], device=self.device)
        positions = [place for base, length in zip(bases, lens, strict=True) for place in range(base, base + length)]
        width = max(lens)
        visible = torch.ones(width, width, dtype=torch.bool, device=self.device).tril().expand(len(rows), -1, -1)
        places = torch.tensor(positions, device=self.device)
        each: tuple[Tensor, ...] = self._run(rows, bases, lens, token_ids, torch.cat(hidden), places, visible).split(lens)
        return each

    @torch.inference_mode()
    def level(self, request_ids: Sequence[str], token_ids: Tensor, hidden: Tensor, depth: int, sees: Tensor) -> Tensor:
        """Feeds drafts [B, W] of one depth (1: children of the root) with their parents' feedback [B, W, H] -> [B, W, H].

        ``sees`` bool [B, W, M]: which of the M drafts fed in this round, these W at their end, each of them sees.
        """
        rows = [self.cache.row(request_id) for request_id in request_ids]
        committed, width = [self.cache.cached_lens[row] for row in rows], token_ids.shape[1]
        positions = torch.tensor([length + depth - 1 for length in committed for _ in range(width)], device=self.device)
        bases = [length + sees.shape[2] - width for length in committed]
        out = self._run(rows, bases, [width] * len(rows), token_ids.flatten(), hidden.flatten(0, 1), positions, sees)
        return out.view_as(hidden)

    def _run(
        self,
        rows: list[int],
        bases: list[int],
        lens: list[int],
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        visible: Tensor,
    ) -> Tensor:
        """One pass over tokens [T] and features [T, H] at ``positions`` [T], of which request b has ``lens[b]`` -> [T, H]."""
        reach = max(bases) + visible.shape[1]
        self.cache.reserve(reach)
        if reach > self._max_len:
            positions.clamp_(max=self._max_len - 1)
        row_ids, starts, ends = torch.tensor([*rows, *bases, *accumulate(lens)], device=self.device).chunk(3)
        layout = PassLayout(self.cache.keys, self.cache.values, row_ids, starts, ends, positions[None], visible)
        rotation = self._rotation(positions[None], min(reach, self._max_len))
        with active_pass(layout):
            out: Tensor = self.head(token_ids[None], hidden[None], positions[None], rotation)
        return out[0]

    def _rotation(self, positions: Tensor, reach: int) -> Rotation | None:
        """Cosines and sines at ``positions``, all below ``reach``: looked up, since working them out takes as long as a matrix.

        None for the kinds of rotation that change with the length of the text.
        """
        rotary = self.head.rotary_emb
        if rotary.rope_type in ("dynamic", "longrope"):
            return None
        if self._rotations is None or self._rotations[0].shape[0] < reach:
            places = torch.arange(min(self._max_len, max(2 * reach, 256)), device=self.device)[None]
            cos, sin = rotary(torch.empty(0, dtype=self.dtype, device=self.device), places)
            self._rotations = cos[0], sin[0]
        return self._rotations[0][positions], self._rotations[1][positions]

    @torch.inference_mode()
    def logits(self, out: Tensor) -> Tensor:
        """[..., H] -> float32 [..., V] over the target's vocabulary."""
        return self.head.spread(self.head.logits(out), self._vocab_size)


def _cache_shape(config: LlamaConfig) -> CacheShape:
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return CacheShape(int(config.num_hidden_layers), int(config.num_key_value_heads or config.num_attention_heads), dim, dim)
