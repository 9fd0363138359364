"""Self-speculative drafting over the target's own cache: with its first layers, or with quantised weights.

Layer-skipping drafts whose states scoring reuses are those of LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).
Drafts write to the cache after the committed tokens, and the score of the same round overwrites them: no rollback is needed.
Hidden states after the first layers are returned as a ``PartialPass``, from which the score continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.runner.layer_span import LayerSpan
from outrider.runner.model_runner import ModelRunner, NextToken
from outrider.runner.passes import PassRunner
from outrider.types import OutriderError, PartialPass

logger = logging.getLogger(__name__)

TOLERANCE = 0.05  # relative to the largest logit: 16-bit kernels may round differently; a wrong layer differs by far more


class SelfDraft:
    """Drafts with the runner's own model and cache, with the interface of a draft model's runner."""

    def __init__(self, runner: ModelRunner, passes: PassRunner | None = None, depth: int | None = None) -> None:
        """``depth``: draft with the first layers and the head; otherwise with ``passes`` of a model with other weights."""
        self._runner, self._depth = runner, depth
        self.device, self.max_len, self.vocab_size = runner.device, runner.max_len, runner.vocab_size
        self.max_drafts = None  # no states are kept for drafts
        self._is_recurrent = runner.cache.shape.is_recurrent
        self.drafts_ahead = not self._is_recurrent  # the target's states end at the committed tokens
        self.passes = passes or runner.passes
        self._hidden = () if depth is None else (depth,)
        self._span = LayerSpan(0, depth)

    def rollout(
        self, request_ids: Sequence[str], sequences: Sequence[Sequence[int]], steps: int, next_token: NextToken
    ) -> PartialPass | None:
        """Feed token after token after each sequence, as ``ModelRunner.rollout`` does.

        Uncached tokens beyond one pass are first prefilled by the whole model. Return the output of the first layers; None if a
        model with other weights drafts.
        """
        runner = self._runner
        # In recurrent layers drafting overwrites the older states, but scoring starts from one of them.
        rows, pending = runner.catch_up(request_ids, sequences, draft_slots=0, to_last=self._is_recurrent)
        slots = [runner.cache.cached_lens[row] for row in rows]
        logits, hidden = runner.feed(self.passes, pending, rows, slots, self._hidden, self._span)
        bases = [slot + len(fed) for slot, fed in zip(slots, pending, strict=True)]
        run = self.passes.run_of(self._hidden, self._span)
        rolling = runner.decode_steps(run, rows, bases, logits, steps, next_token)
        if self._depth is None:
            for _ in rolling:
                pass
            return None
        # A copy with room for the steps: a captured graph overwrites its output.
        states = [torch.cat((each, each.new_empty(steps - 1, each.shape[1]))) for each in hidden[self._depth]]
        rolled = []
        for step, (token_ids, after_layers) in enumerate(rolling):
            for each, fed, new in zip(states, pending, after_layers[0], strict=True):
                each[len(fed) + step] = new
            rolled.append(token_ids.clone())
        drafted = torch.cat(rolled, 1).tolist() if rolled else [[]] * len(pending)
        tokens = [fed + more for fed, more in zip(pending, drafted, strict=True)]
        states = [each[: len(own)] for each, own in zip(states, tokens, strict=True)]
        starts, by_request = zip(request_ids, slots, strict=True), zip(request_ids, states, strict=True)
        return PartialPass(self._depth, dict(starts), dict(zip(request_ids, tokens, strict=True)), dict(by_request))

    def prefill(self, request_ids: Sequence[str], sequences: Sequence[Sequence[int]]) -> list[bool]:
        """Do nothing: the cache is the target's."""
        return [True] * len(sequences)

    def rollback(self, request_id: str, num_tokens: int) -> None:
        """Do nothing: drafts never count as cached."""

    def release(self, request_ids: Sequence[str]) -> None:
        """Do nothing: the rows are the runner's."""

    retire = release

    def prepare(self) -> None:
        """Compile or load the passes of drafting and of a score that starts after it."""
        self.passes.run_of(self._hidden, self._span)
        if self._depth is not None:
            self.passes.run_of(self._hidden, LayerSpan(0, self._depth, head=False))
            self.passes.run_of((), LayerSpan(self._depth))
        self.passes.compile_now()


@torch.inference_mode()
def exit_logits(runner: ModelRunner, token_ids: Sequence[int], depths: Sequence[int]) -> Iterator[Tensor]:
    """Return the model's logits after each token of a sequence, then those of an exit after each of ``depths`` layers.

    [T, V] float32 each, with the model's norm and head at every exit. Runs eagerly in a temporary cache row.
    """
    passes = PassRunner(runner.model, runner.cache, "never")
    with runner.cache.temporary_rows(1) as rows:
        inputs = runner.layouts.chain([list(token_ids)], rows, [0])
        places = torch.arange(len(token_ids), device=runner.device)
        logits, hidden = passes.run(inputs.ids, inputs.layout, tuple(depths), places)
        yield logits.float()
        for depth in depths:
            logits, _ = passes.run(hidden[depth][None], inputs.layout, (), places, LayerSpan(runner.num_layers))
            yield logits.float()


@torch.inference_mode()
def check_layers(runner: ModelRunner, depth: int) -> None:
    """Raise ``OutriderError`` unless the layers run in two parts give the whole model's output."""
    kind = type(runner.model).__name__
    passes = PassRunner(runner.model, runner.cache, "never")
    token_ids = [token % runner.vocab_size for token in (11, 7, 5, 3, 2)]
    places = torch.arange(len(token_ids), device=runner.device)
    try:
        with runner.cache.temporary_rows(1) as rows:
            inputs = runner.layouts.chain([token_ids], rows, [0])
            whole, _ = passes.run(inputs.ids, inputs.layout, (), places)
            _, hidden = passes.run(inputs.ids, inputs.layout, (depth,), places, LayerSpan(0, depth, head=False))
            parts, _ = passes.run(hidden[depth][None], inputs.layout, (), places, LayerSpan(depth))
        error = (whole - parts).abs().max() / whole.abs().max().clamp(min=1.0)
        is_same = parts.shape == whole.shape and bool(error <= TOLERANCE)
    except OutriderError:
        raise
    except Exception as failure:  # model code can fail when run in parts
        logger.debug("the layers of %s do not run in parts", kind, exc_info=failure)
        is_same = False
    if not is_same:
        raise OutriderError(
            f"unsupported model for partial passes: {kind} does not run its layers one after another on one hidden state"
        )
