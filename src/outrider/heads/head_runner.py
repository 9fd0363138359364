"""Run heads over their own KV cache, with the runner's ragged cache, attention and packed weights.

``RolloutRunner`` processes the target's features, then drafts a tree level by level. Heads that draft a block in one pass are
run by block_runner.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.heads.feature_head import FeatureHead, RolloutHead, Rotation
from outrider.heads.postprocessing import postprocess_of
from outrider.runner import ModelRunner, linear, quantized
from outrider.runner.attention import PassLayout, active_pass
from outrider.runner.forward import Program, described, example_layout
from outrider.runner.kv_cache import KVCache
from outrider.runner.layouts import Layouts
from outrider.runner.passes import ProgramRunner
from outrider.types import Request

CHUNK = 256  # entries of a request per pass during prefill

Head = TypeVar("Head", bound=FeatureHead)


class Step(NamedTuple):
    """Output of a head at one token: the feedback and the logits of the next token."""

    feedback: Tensor  # [..., H]: replaces the target's next feature
    logits: Tensor  # float32 [..., V], of the next token

    def view(self, *shape: int) -> Step:
        """Return the same with other leading dimensions."""
        return Step(*(each.view(*shape, each.shape[-1]) for each in self))


def newest(features: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the last ``count`` rows of each hidden state; there may be more, which the cache holds.

    Raises ``RuntimeError`` if there are fewer.
    """
    if len(features[0]) < count:
        raise RuntimeError("the features do not continue where the last ones ended")
    return [each[len(each) - count :] for each in features]


class HeadProgram(Program):
    """A pass of a head. Its modules include those of the target that the head uses."""

    def __init__(self, head: FeatureHead, cache: KVCache, target: PreTrainedModel) -> None:
        super().__init__()
        self._target = described(target)  # scales of its embedding and caps of its logits are compiled in
        self.head, self.target_modules = head, nn.ModuleList(head.target_modules)
        self.cache, self.num_layers = cache, len(head.layers)
        self.label = f"the pass of the {type(head).__name__}"

    def identity(self) -> object:
        return str(self.head), self.head.settings, self._target


class HeadPass(HeadProgram):
    """One pass of a head that drafts one token after another."""

    head: RolloutHead

    def __init__(self, head: RolloutHead, cache: KVCache, target: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(head, cache, target)
        self._vocab_size = vocab_size

    def example(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        fc = self.head.fc
        layout, shapes = example_layout(self.cache, sees_earlier=True)
        hidden = torch.zeros(1, 5, fc.out_features, dtype=fc.weight.dtype)
        cos, sin = self.head.rotary_emb(hidden, layout.positions)
        inputs = (torch.zeros(1, 5, dtype=torch.long), hidden, cos, sin, torch.arange(4), *layout.tensors)
        return inputs, (*shapes[:1] * 4, {0: torch.export.Dim("m", min=1)}, shapes)

    def forward(
        self,
        token_ids: Tensor,  # [1, T]
        hidden: Tensor,  # [1, T, H]: features before them
        cos: Tensor,  # [1, T, D]
        sin: Tensor,  # [1, T, D]
        places: Tensor,  # [N]: the tokens that drafts follow
        *where: Tensor,  # of the layout
    ) -> tuple[Tensor, Tensor]:
        """Return feedback [N, H] and logits [N, V]."""
        layout = self.cache.pass_layout(where)
        with active_pass(layout):
            out = self.head(token_ids, hidden, layout.positions, (cos, sin))[0, places]
        return self.head.step(out, self._vocab_size)


class HeadRunner(ABC, Generic[Head]):
    """Runs one head for one target. Cache entries come from target features; drafted entries are overwritten."""

    lookahead: int  # see ``KVCache``

    def __init__(self, head: Head, target: ModelRunner, bits: int | None = None) -> None:
        """``bits``: see ``quantized.place_head``. Raises ``OutriderError`` if 8 bits are not supported."""
        self.head, self.dtype = head, quantized.place_head(head, target.model, bits)
        rotary: Any = head.rotary_emb  # built anew: frequencies rounded to 16 bits give wrong angles after a hundred tokens
        head.rotary_emb = type(rotary)(rotary.config).to(target.device)
        model, postprocess = target.model, postprocess_of(target.model) if head.uses_targets_output else None
        self._target = model
        head.share_target_modules(model.get_input_embeddings(), model.get_output_embeddings(), postprocess)
        self.device, self._max_len, self._vocab_size = target.device, target.max_len, target.vocab_size
        cache_dtype = linear.arithmetic(head)
        self.cache = KVCache(head.cache_shape, target.max_batch, target.max_len, cache_dtype, target.device)
        self.cache.lookahead = self.lookahead
        self.cache.keeps_prefixes = target.cache.keeps_prefixes
        self._layouts = Layouts(self.cache)
        self._rotations: Rotation | None = None  # rotations of the first positions, [S, D]
        self._programs = ProgramRunner(head, lambda _: self._program(), self.cache, target.config.compile)

    @abstractmethod
    def _program(self) -> Program:
        """Return the pass of drafting."""

    def prepare(self) -> None:
        """Compile, or load, the pass of drafting."""
        self._programs.run_of()
        self._programs.compile_now()

    def start(self, request: Request) -> int:
        """Start a new request from the longest cached prefix. Return the number of leading tokens whose features are in it."""
        return self.cache.cached_lens[self.cache.row_with_prefix(request.request_id, request.token_ids)]

    def _rotation_at(self, like: Tensor, positions: Tensor) -> Rotation:
        """Return cosines and sines [1, T, D] at positions [1, T].

        They are cached, because computing them takes as long as a matrix product, except for rotary types that depend on the
        sequence length.
        """
        rotary: Any = self.head.rotary_emb
        if rotary.rope_type in ("dynamic", "longrope"):
            cos, sin = rotary(like, positions)
            return cos, sin
        reach = min(self._max_len, self.cache.capacity)  # an upper bound of all positions
        if self._rotations is None or self._rotations[0].shape[0] < reach:
            like, places = torch.empty(0, dtype=self.dtype, device=self.device), torch.arange(reach, device=self.device)
            cos, sin = rotary(like, places[None])
            self._rotations = cos[0], sin[0]
        return self._rotations[0][positions], self._rotations[1][positions]


class RolloutRunner(HeadRunner[RolloutHead]):
    """Runs a head that drafts one token after another."""

    lookahead = 1  # an entry joins the features of a token with the next token

    def _program(self) -> Program:
        return HeadPass(self.head, self.cache, self._target, self._vocab_size)

    @torch.inference_mode()
    def extend(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]], features: Sequence[Sequence[Tensor]]) -> Step:
        """Add entries: for each request tokens [n_b] and, by hidden state, the features [n_b, Ht] before them; n_b >= 1.

        Return the step after each request's last entry, [B].
        """
        rows = [self.cache.row(request_id) for request_id in request_ids]
        fused = [self.head.fuse([each.to(self.device, self.dtype) for each in of_request]) for of_request in features]
        steps: list[tuple[list[int], Step]] = []  # of each chunk, and the requests in it
        longest = max(map(len, tokens))
        for start in range(0, longest, CHUNK):
            some = [b for b, ids in enumerate(tokens) if len(ids) > start]
            ids = [list(tokens[b][start : start + CHUNK]) for b in some]
            hidden = [fused[b][start : start + CHUNK] for b in some]
            step = self._extend_chunk([rows[b] for b in some], ids, hidden)
            if self._layouts.is_padded:  # the next pass of the same shape overwrites what a captured graph returned
                step = Step(*(each.clone() for each in step))
            steps.append((some, step))
            for b, new in zip(some, ids, strict=True):
                self.cache.cached_lens[rows[b]] += len(new)
        if len(steps) == 1:
            return steps[0][1]
        last = {b: (step.feedback[i], step.logits[i]) for some, step in steps for i, b in enumerate(some)}  # of the last chunk
        return Step(*map(torch.stack, zip(*(last[b] for b in range(len(rows))), strict=True)))

    def _extend_chunk(self, rows: list[int], ids: list[list[int]], hidden: list[Tensor]) -> Step:
        """Return the step after each request's last token, [B]."""
        inputs = self._layouts.chain(ids, rows, [self.cache.cached_lens[row] for row in rows])
        last = [start + len(own) - 1 for start, own in zip(inputs.starts, ids, strict=True)]
        return self._run(inputs.layout, inputs.ids, inputs.join(hidden), self._layouts.row_indices(last, [1] * len(last)))

    @torch.inference_mode()
    def level(self, request_ids: Sequence[str], token_ids: Tensor, hidden: Tensor, depth: int, sees: Tensor) -> Step:
        """Feed drafts [B, W] of one depth (1: children of the root) with their parents' feedback [B, W, H].

        Return the step after each of them, [B, W]. ``sees`` bool [B, W, M]: attention mask over the M drafts fed in this round,
        these W last.
        """
        rows = [self.cache.row(request_id) for request_id in request_ids]
        committed, (batch, width) = [self.cache.cached_lens[row] for row in rows], token_ids.shape
        self.cache.reserve(max(committed) + sees.shape[2], sees.shape[2])
        bases = [length + sees.shape[2] - width for length in committed]
        numbers = torch.tensor([*rows, *bases, *range(width, batch * width + 1, width)], device=self.device)
        row_ids, starts, ends = numbers.chunk(3)
        places = [min(length + depth, self._max_len) - 1 for length in committed for _ in range(width)]
        positions = torch.tensor(places, device=self.device)[None]
        layout = self.cache.pass_layout((positions, row_ids, starts, ends, sees, *self.cache.tensors))
        every = self._layouts.arange(0, batch * width)
        return self._run(layout, token_ids.reshape(1, -1), hidden.flatten(0, 1)[None], every).view(batch, width)

    def _run(self, layout: PassLayout, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Step:
        """Run one pass over tokens [1, T] and features [1, T, H]; return the step after the tokens at ``places`` [N]."""
        cos, sin = self._rotation_at(hidden, layout.positions)
        return Step(*self._programs.run_of()([token_ids, hidden, cos, sin, places, *layout.tensors]))
