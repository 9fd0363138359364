"""Run heads over their own KV cache, with the runner's ragged cache, attention and packed weights.

``RolloutRunner`` processes the target's features, then drafts a tree level by level. Heads that draft a block in one pass are
run by block_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from outrider.heads.feature_head import FeatureHead, RolloutHead, Rotation
from outrider.heads.own_logits import finish_of
from outrider.runner import ModelRunner, linear, quantized
from outrider.runner.attention import PassLayout, active_pass
from outrider.runner.kv_cache import KVCache
from outrider.runner.layouts import Layouts

CHUNK = 256  # entries of a request per pass during prefill

Head = TypeVar("Head", bound=FeatureHead)


class HeadRunner(Generic[Head]):
    """Runs one head for one target. Cache entries come from target features; drafted entries are overwritten."""

    def __init__(self, head: Head, target: ModelRunner, bits: int | None = None) -> None:
        """``bits``: 8, or None for the target's weight type. Raises ``OutriderError`` if 8 bits are not supported."""
        self.head, self.dtype = head, quantized.place_head(head, target.model, bits)
        rotary: Any = head.rotary_emb  # built anew: frequencies rounded to 16 bits give wrong angles after a hundred tokens
        head.rotary_emb = type(rotary)(rotary.config).to(target.device)
        model, finish = target.model, finish_of(target.model) if head.uses_targets_output else None
        head.lend(model.get_input_embeddings(), model.get_output_embeddings(), finish)
        self.device, self._max_len, self._vocab_size = target.device, target.max_len, target.vocab_size
        cache_dtype = linear.arithmetic(head)
        self.cache = KVCache(head.cache_shape, target.max_batch, target.max_len, cache_dtype, target.device)
        self._layouts = Layouts(self.cache, self.device, self._max_len)
        self._rotations: Rotation | None = None  # rotations of the first positions, [S, D]

    def _rotation(self, positions: Tensor) -> Rotation | None:
        """Return cached cosines and sines at ``positions``; computing them takes as long as a matrix product.

        None for rotary types that depend on the sequence length.
        """
        rotary = self.head.rotary_emb
        if rotary.rope_type in ("dynamic", "longrope"):
            return None
        reach = min(self._max_len, self.cache.capacity)  # an upper bound of all positions
        if self._rotations is None or self._rotations[0].shape[0] < reach:
            like, places = torch.empty(0, dtype=self.dtype, device=self.device), torch.arange(reach, device=self.device)
            cos, sin = rotary(like, places[None])
            self._rotations = cos[0], sin[0]
        return self._rotations[0][positions], self._rotations[1][positions]

    @torch.inference_mode()
    def logits(self, out: Tensor) -> Tensor:
        """Map [..., H] to float32 logits [..., V] over the target's vocabulary."""
        return self.head.spread(self.head.logits(out), self._vocab_size)


class RolloutRunner(HeadRunner[RolloutHead]):
    """Runs a head that drafts one token after another."""

    @torch.inference_mode()
    def extend(
        self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]], features: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """Add entries: for each request tokens [n_b] and, by hidden state, the features [n_b, Ht] before them; n_b >= 1.

        Return the head's output at each request's last entry, [B, H].
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

    def _chain(self, rows: list[int], ids: list[list[int]], hidden: list[Tensor]) -> list[Tensor]:
        """Return the head's output at each request's tokens, [n_b, H] each."""
        texts = self._layouts.chain(ids, rows, [self.cache.cached_lens[row] for row in rows])
        out = self._run(texts.layout, texts.ids, texts.join(hidden)).split(texts.lens)
        return [each[: len(text)] for each, text in zip(out, ids, strict=True)]

    @torch.inference_mode()
    def level(self, request_ids: Sequence[str], token_ids: Tensor, hidden: Tensor, depth: int, sees: Tensor) -> Tensor:
        """Feed drafts [B, W] of one depth (1: children of the root) with their parents' feedback [B, W, H]; return [B, W, H].

        ``sees`` bool [B, W, M]: attention mask over the M drafts fed in this round, these W last.
        """
        rows = [self.cache.row(request_id) for request_id in request_ids]
        committed, (batch, width) = [self.cache.cached_lens[row] for row in rows], token_ids.shape
        self.cache.reserve(max(committed) + sees.shape[2], sees.shape[2])
        bases = [length + sees.shape[2] - width for length in committed]
        numbers = torch.tensor([*rows, *bases, *range(width, batch * width + 1, width)], device=self.device)
        row_ids, starts, ends = numbers.chunk(3)
        places = [min(length + depth, self._max_len) - 1 for length in committed for _ in range(width)]
        positions = torch.tensor(places, device=self.device)[None]
        layout = PassLayout(self.cache.stores, self.cache.shape.places, row_ids, starts, ends, positions, sees)
        return self._run(layout, token_ids.reshape(1, -1), hidden.flatten(0, 1)[None]).view_as(hidden)

    def _run(self, layout: PassLayout, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Run one pass over tokens [1, T] and features [1, T, H]; return [T, H]."""
        with active_pass(layout):
            out: Tensor = self.head(token_ids, hidden, layout.positions, self._rotation(layout.positions))
        return out[0]
