"""Run a head that drafts a block in one pass. Its cache holds keys and values of target features, never those of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.heads.block import BlockAttention, BlockHead
from outrider.heads.feature_head import Rotation
from outrider.heads.head_runner import CHUNK, HeadRunner
from outrider.runner.attention import active_pass, attend
from outrider.runner.layouts import Texts
from outrider.types import OutriderError


class BlockRunner(HeadRunner[BlockHead]):
    """Each committed token's features enter the cache once. A block is written after them and overwritten by the next one."""

    @torch.inference_mode()
    def extend(self, request_ids: Sequence[str], features: Sequence[Sequence[Tensor]]) -> None:
        """Add to the cache: for each request, by hidden state, the features [n_b, Ht] of its next tokens."""
        new = _NewContext(self, request_ids, features)
        for start in range(0, new.total, CHUNK):
            part = slice(start, start + CHUNK)
            context, rotation = new.fused[:, part], self._rotation_at(new.fused, new.positions[:, part])
            for attention in self.head.attentions:
                _, key, value = attention.project(context, context.shape[1], rotation)
                self._store(attention, key, value, new.rows[part], new.positions[0, part])
        new.commit()

    @torch.inference_mode()
    def draft(
        self,
        request_ids: Sequence[str],
        features: Sequence[Sequence[Tensor]],
        last_tokens: Sequence[int],
        num_drafts: Sequence[int],
    ) -> Tensor:
        """Add features as ``extend`` does, and run a block for ``num_drafts[b]`` >= 1 drafts after each ``last_tokens[b]``.

        Return the head's output for each draft, [B, max(num_drafts), H]; beyond ``num_drafts[b]`` the last one is repeated.
        """
        shape, new = self.head.shape, _NewContext(self, request_ids, features)
        masks = [count if not shape.predicts_next else count - 1 for count in num_drafts]
        ids = [[token] + [shape.mask_token_id] * count for token, count in zip(last_tokens, masks, strict=True)]
        block = self._layouts.chain(ids, new.cache_rows, new.ends)
        both_ways = self._visible([len(each) for each in ids], block.layout.visible.shape[1])
        earlier_only = both_ways & block.layout.visible
        layouts = {False: replace(block.layout, visible=both_ways), True: replace(block.layout, visible=earlier_only)}
        positions = torch.cat((new.positions, block.layout.positions), 1)

        def attend_block(layer: BlockAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._store(layer, key[:, :, : new.total], value[:, :, : new.total], new.rows, new.positions[0])
            own = key[:, :, new.total :], value[:, :, new.total :]
            with active_pass(layouts[layer.sees_earlier_only]):
                return attend(layer, query, *own, None, sliding_window=layer.window)[0]

        hidden = self.head.embed(block.ids, new.fused)
        within = torch.tensor([[place for length in block.lens for place in range(length)]], device=self.device)
        out = self.head(hidden, new.fused, self._rotation_at(hidden, positions), attend_block, within)[0]
        new.commit()
        return self._per_draft(out, block, num_drafts)

    @torch.inference_mode()
    def after(self, out: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Return float32 [..., V]: the logits of outputs [..., H] and [..., Vd] after these tokens of the target [...]."""
        return self.head.spread(self.head.logits_after(out, logits, token_ids), self._vocab_size)

    def _per_draft(self, out: Tensor, block: Texts, num_drafts: Sequence[int]) -> Tensor:
        """Return rows [B, K, H] of the outputs [T, H] of a pass's tokens."""
        first, most = 0 if self.head.shape.predicts_next else 1, max(num_drafts)
        index = [
            [start + first + min(draft, count - 1) for draft in range(most)]
            for start, count in zip(block.starts, num_drafts, strict=True)
        ]
        return out[torch.tensor(index, device=out.device)]

    def _visible(self, lens: Sequence[int], width: int) -> Tensor:
        """Return bool [B, W, W]: the tokens of a block attend to each other, but not to padding."""
        count = torch.tensor(lens, device=self.device)
        return (torch.arange(width, device=self.device) < count[:, None])[:, None].expand(-1, width, -1)

    def _store(self, layer: BlockAttention, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Write keys and values [1, Hkv, C, D] of features to these cache rows and slots, [C] each."""
        place = self.cache.shape.places[layer.layer_idx]
        assert place is not None
        kind, index = place
        for store, new in zip(self.cache.stores[2 * kind : 2 * kind + 2], (key, value), strict=True):
            store[index][rows, :, slots] = new[0].transpose(0, 1).to(store.dtype)

    def _rotation_at(self, like: Tensor, positions: Tensor) -> Rotation:
        """Return cosines and sines [1, T, D] at positions [1, T]."""
        known = self._rotation(positions)
        if known is None:
            cos, sin = self.head.rotary_emb(like, positions)
            return cos, sin
        return known


class _NewContext:
    """Features of requests that are not in the cache yet, fused and concatenated: C in total."""

    def __init__(self, runner: BlockRunner, request_ids: Sequence[str], features: Sequence[Sequence[Tensor]]) -> None:
        cache, device = runner.cache, runner.device
        self._cache, self.cache_rows = cache, [cache.row(request_id) for request_id in request_ids]
        lens = [len(of_request[0]) for of_request in features]
        starts = [cache.cached_lens[row] for row in self.cache_rows]
        self.ends = [start + length for start, length in zip(starts, lens, strict=True)]  # entries of each request
        if max(self.ends) > cache.max_len:
            raise OutriderError(f"{max(self.ends)} tokens exceed the context of {cache.max_len}")
        cache.reserve(max(self.ends))
        self.total, head = sum(lens), runner.head
        if self.total:
            by_state = [torch.cat([each.to(device, runner.dtype) for each in same]) for same in zip(*features, strict=True)]
            self.fused = head.fuse(by_state)[None]  # [1, C, H]
        else:
            self.fused = torch.empty(1, 0, head.shape.config.hidden_size, dtype=runner.dtype, device=device)
        slots = [slot for start, end in zip(starts, self.ends, strict=True) for slot in range(start, end)]
        rows = [row for row, length in zip(self.cache_rows, lens, strict=True) for _ in range(length)]
        self.positions = torch.tensor([slots], dtype=torch.long, device=device)  # [1, C], which are their slots too
        self.rows = torch.tensor(rows, dtype=torch.long, device=device)  # [C]

    def commit(self) -> None:
        """Mark the features as cached."""
        for row, end in zip(self.cache_rows, self.ends, strict=True):
            self._cache.cached_lens[row] = end
