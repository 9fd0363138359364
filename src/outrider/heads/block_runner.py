"""Run a head that drafts a block in one pass. Its cache holds keys and values of target features, never those of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.heads.block import BlockAttention, BlockHead
from outrider.heads.head_runner import CHUNK, HeadProgram, HeadRunner
from outrider.runner.attention import active_pass, attend
from outrider.runner.forward import Program, example_layout
from outrider.runner.layouts import STEP, ranges
from outrider.types import OutriderError


class BlockPass(HeadProgram):
    """The pass over the blocks of B requests, T tokens, and the C features that are new in their contexts.

    Blocks and features are inputs of their own: what precedes attention is computed for all features, then for all tokens.
    Attention takes each request's features, then its tokens, in the order of the cache.
    """

    head: BlockHead

    def example(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (layout, where_shapes), hidden = example_layout(self.cache), int(self.head.shape.config.hidden_size)
        dtype = self.head.fc.weight.dtype
        rotation = torch.stack(self.head.rotary_emb(torch.zeros(1, 5, hidden, dtype=dtype), layout.positions))
        # two requests with one new feature each, and with blocks of one and two tokens
        own = rotation[:, :, :3].contiguous(), rotation[:, :, :2].contiguous()
        inputs = (torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 2, hidden, dtype=dtype), *own)
        where = (torch.tensor([[0, 0, 1]]), torch.tensor([0, 2, 1, 3, 4]), torch.tensor([1, 3, 4]))
        tokens, features = torch.export.Dim("k", min=1), torch.export.Dim("c", min=0)
        shapes = ({1: tokens}, {1: features}, {2: tokens}, {2: features}, {1: tokens}, {0: where_shapes[0][1]}, {0: tokens})
        mask, its_shape = layout.visible.clone(), where_shapes[4]  # the same tensor twice would be exported as one input
        return (*inputs, *where, mask, *layout.tensors), (*shapes, its_shape, where_shapes)

    def forward(  # noqa: PLR0913 - the tensors of a layout are inputs
        self,
        token_ids: Tensor,  # [1, T]
        context: Tensor,  # [1, C, H]: fused features
        rotation: Tensor,  # [2, 1, T, D]: cosines and sines at the tokens' positions
        context_rotation: Tensor,  # [2, 1, C, D]
        block_index: Tensor,  # [1, T]: index of each token in its block
        order: Tensor,  # [N]: indices among features, then tokens, in the order of the cache: request by request
        places: Tensor,  # [T]: the tokens' places in that order
        earlier_only: Tensor,  # [B, W, W]: the visibility for layers in which a token attends only to earlier ones
        *where: Tensor,  # of the layout, of N tokens
    ) -> tuple[Tensor]:
        """Return the head's output for the tokens of the blocks, [1, T, H]."""
        layouts = {False: self.cache.pass_layout(where), True: replace(self.cache.pass_layout(where), visible=earlier_only)}

        def attend_block(layer: BlockAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            unused = query.new_zeros(1, query.shape[1], context.shape[1], query.shape[3])
            q, k, v = (each.index_select(2, order) for each in (torch.cat((unused, query), 2), key, value))
            with active_pass(layouts[layer.sees_earlier_only]):
                out = attend(layer, q, k, v, None, sliding_window=layer.window)[0]
            return out.index_select(1, places)

        cos, sin = torch.cat((context_rotation, rotation), 2).unbind(0)
        return (self.head(self.head.embed(token_ids, context), context, (cos, sin), attend_block, block_index),)


class BlockRunner(HeadRunner[BlockHead]):
    """Each committed token's features enter the cache once. A block is written after them and overwritten by the next one."""

    lookahead = 0

    def _program(self) -> Program:
        return BlockPass(self.head, self.cache, self._target)

    @torch.inference_mode()
    def extend(self, request_ids: Sequence[str], features: Sequence[Sequence[Tensor]]) -> None:
        """Add to the cache: for each request, by hidden state, the features [n_b, Ht] of its next tokens."""
        new = _NewContext(self, request_ids, features)
        rows, positions = new.places()
        for start in range(0, new.total, CHUNK):
            part = slice(start, start + CHUNK)
            context, rotation = new.fused[:, part], self._rotation_at(new.fused, positions[:, part])
            for attention in self.head.attentions:
                _, key, value = attention.project(context, context.shape[1], rotation)
                self._store(attention, key, value, rows[part], positions[0, part])
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
        sizes = [count if shape.predicts_next else count + 1 for count in num_drafts]  # of the blocks
        placeholders = [[0] * (count + size) for count, size in zip(new.lens, sizes, strict=True)]  # only their number is used
        inputs = self._layouts.chain(placeholders, new.cache_rows, new.starts)
        layout = inputs.layout
        # In the cache each request's features precede its block; the pass takes all features, then all blocks.
        feature_places, token_places = ranges(inputs.starts, new.lens), ranges(map(add, inputs.starts, new.lens), sizes)
        spare = -new.total % STEP if self._layouts.is_padded else 0  # features that no token reads
        index_at = [0] * layout.positions.shape[1]
        for first, places in (0, feature_places), (new.total + spare, token_places):
            for index, place in enumerate(places, first):
                index_at[place] = index
        feature_places += [0] * spare
        ids: list[int] = []
        for last, size in zip(last_tokens, sizes, strict=True):
            ids += [last, *[shape.mask_token_id] * (size - 1)]
        in_block = ranges([0] * len(sizes), sizes)
        numbers = torch.tensor([*ids, *in_block, *token_places, *feature_places, *index_at], device=self.device)
        lens = [len(ids)] * 3 + [len(feature_places), len(index_at)]
        token_ids, block_index, token_at, feature_at, order = numbers.split(lens)
        rotations = [torch.stack(self._rotation_at(new.fused, layout.positions[:, at])) for at in (token_at, feature_at)]
        fused = functional.pad(new.fused, (0, 0, 0, spare))
        block = replace(layout, visible=self._visible(new.lens, sizes, layout.visible))
        tensors = [token_ids[None], fused, *rotations, block_index[None], order, token_at, layout.visible, *block.tensors]
        out = self._programs.run_of()(tensors)[0][0]
        new.commit()
        return self._per_draft(out, sizes, num_drafts)

    @torch.inference_mode()
    def after(self, out: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Return float32 [..., V]: the logits of outputs [..., H] and [..., Vd] after these tokens of the target [...]."""
        return self.head.to_target_vocabulary(self.head.logits_after(out, logits, token_ids), self._vocab_size)

    def _per_draft(self, out: Tensor, sizes: Sequence[int], num_drafts: Sequence[int]) -> Tensor:
        """Return rows [B, K, H] of the outputs [T, H] of the blocks' tokens."""
        first, most = 0 if self.head.shape.predicts_next else 1, max(num_drafts)
        starts = accumulate(sizes, initial=0)
        index = [
            [start + first + min(draft, count - 1) for draft in range(most)]
            for start, count in zip(starts, num_drafts, strict=False)
        ]
        return out[torch.tensor(index, device=out.device)]

    def _visible(self, contexts: Sequence[int], sizes: Sequence[int], causal: Tensor) -> Tensor:
        """Return bool [B, W, W] from the causal mask: the tokens of a block attend to each other and to all of the context."""
        visible = causal.clone()
        for seen, context, size in zip(visible, contexts, sizes, strict=True):
            seen[context : context + size, : context + size] = True
        return visible

    def _store(self, layer: BlockAttention, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Write keys and values [1, Hkv, C, D] of features to these cache rows and slots, [C] each."""
        place = self.cache.shape.layer_places[layer.layer_idx]
        assert place is not None
        kind, index = place
        for store, new in zip(self.cache.stores[2 * kind : 2 * kind + 2], (key, value), strict=True):
            store[index][rows, :, slots] = new[0].transpose(0, 1).to(store.dtype)


class _NewContext:
    """Features of requests that are not in the cache yet, fused and concatenated: C in total."""

    def __init__(self, runner: BlockRunner, request_ids: Sequence[str], features: Sequence[Sequence[Tensor]]) -> None:
        cache, device = runner.cache, runner.device
        self._cache, self.cache_rows = cache, [cache.row(request_id) for request_id in request_ids]
        self.lens = [len(of_request[0]) for of_request in features]
        self.starts = [cache.cached_lens[row] for row in self.cache_rows]
        self.ends = list(map(add, self.starts, self.lens))  # entries of each request
        if max(self.ends) > cache.max_len:
            raise OutriderError(f"{max(self.ends)} tokens exceed the context of {cache.max_len}")
        cache.reserve(max(self.ends))
        self.total, head = sum(self.lens), runner.head
        if self.total:
            by_state = [torch.cat([each.to(device, runner.dtype) for each in same]) for same in zip(*features, strict=True)]
            self.fused = head.fuse(by_state)[None]  # [1, C, H]
        else:
            self.fused = torch.empty(1, 0, head.shape.config.hidden_size, dtype=runner.dtype, device=device)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the cache rows [C] of the features, and their positions [1, C], which are their slots too."""
        rows = [row for row, length in zip(self.cache_rows, self.lens, strict=True) for _ in range(length)]
        numbers = torch.tensor([rows, ranges(self.starts, self.lens)], dtype=torch.long, device=self.fused.device)
        return numbers[0], numbers[1:]

    def commit(self) -> None:
        """Mark the features as cached."""
        for row, end in zip(self.cache_rows, self.ends, strict=True):
            self._cache.cached_lens[row] = end
