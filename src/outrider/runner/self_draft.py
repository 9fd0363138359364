"""A model that drafts for itself, over its own cache: by its first layers, or by another form of its weights.

What such a draft writes stands behind the committed text, where the score of the same round writes again: nothing of it stays,
and there is nothing to take back. What the model's own first layers have computed is not computed again: the score takes it
over and begins behind them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.runner.layer_span import LayerSpan, behind
from outrider.runner.passes import PassRunner
from outrider.types import OutriderError

if TYPE_CHECKING:
    from outrider.runner.model_runner import ModelRunner, Pick

logger = logging.getLogger(__name__)

TOLERANCE = 0.05  # of the largest logit: 16-bit kernels may round differently, and a wrong layer is off by far more


@dataclass
class FirstLayers:
    """What the first ``depth`` layers gave for tokens behind the cached text, of requests in the order of ``places``."""

    depth: int
    places: dict[str, int]  # request id -> row a
    bases: list[int]  # slot of each request's first token
    tokens: list[list[int]]  # fed in one pass, then
    rolled: list[Tensor] = field(default_factory=list)  # [A, 1] each: one more token a request
    hidden: list[Tensor] = field(default_factory=list)  # [T_a, H] each

    def complete(self, runner: ModelRunner, request_ids: Sequence[str], tokens: Sequence[list[int]]) -> list[Tensor] | None:
        """Hidden states [n_b, H] of each request's tokens behind its cached text.

        Those that are missing are run now. None where hardly any are at hand: a whole pass is the better bet.
        """
        have = self._at_hand(runner, request_ids, tokens)
        if not any(have):
            return None
        found = [
            [self.hidden[self.places[request_id]][:count]] if count else []
            for request_id, count in zip(request_ids, have, strict=True)
        ]
        short = [b for b, text in enumerate(tokens) if have[b] < len(text)]
        if short:
            parts = [tokens[b][have[b] :] for b in short]
            slots = [runner.cache.cached_len(request_ids[b]) + have[b] for b in short]
            rows = [runner.cache.row(request_ids[b]) for b in short]
            last, span = behind(self.depth), LayerSpan(0, self.depth, head=False)
            _, hidden = runner.feed(runner.passes, parts, rows, slots, (last,), span)
            for b, states in zip(short, hidden[last], strict=True):
                found[b].append(states)
        return [torch.cat(states) for states in found]

    def _at_hand(self, runner: ModelRunner, request_ids: Sequence[str], tokens: Sequence[list[int]]) -> list[int]:
        """Of how many of each request's leading tokens the hidden states are known."""
        rolled = torch.cat(self.rolled, 1).tolist() if self.rolled else [[]] * len(self.tokens)
        counts = []
        for b, request_id in enumerate(request_ids):
            a = self.places.get(request_id)
            count = 0
            if a is not None and self.bases[a] == runner.cache.cached_len(request_id):
                for token, known in zip(tokens[b], self.tokens[a] + rolled[a], strict=False):
                    if token != known:
                        break
                    count += 1
            counts.append(count)
        return counts


class SelfDraft:
    """Drafts with the runner's own model over its own cache; to a proposer it looks like a draft model's runner."""

    def __init__(self, runner: ModelRunner, passes: PassRunner | None = None, depth: int | None = None) -> None:
        """``depth``: the first so many layers and the head draft; else ``passes``: those of another form of the weights."""
        self._runner, self._depth = runner, depth
        self.passes = passes or runner.passes
        self._layers = () if depth is None else (behind(depth),)
        self._span = LayerSpan(0, depth)
        self._rows: list[int] = []
        self._bases: list[int] = []

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def max_len(self) -> int:
        return self._runner.max_len

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def extend(self, request_ids: Sequence[str], texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of each text: [B, V] float32.

        Uncached text longer than a pass is read by the whole model before.
        """
        runner = self._runner
        runner.first_layers = None
        rows, pending = runner.catch_up(request_ids, texts, spare=0)
        slots = [runner.cache.cached_lens[row] for row in rows]
        logits, hidden = runner.feed(self.passes, pending, rows, slots, self._layers, self._span)
        self._rows, self._bases = rows, [slot + len(text) for slot, text in zip(slots, pending, strict=True)]
        if self._depth is not None:
            places = {request_id: a for a, request_id in enumerate(request_ids)}
            first = FirstLayers(self._depth, places, slots, pending, hidden=hidden[behind(self._depth)])
            runner.first_layers = first
        return logits

    def rollout(self, request_ids: Sequence[str], logits: Tensor, steps: int, pick: Pick) -> None:
        """Feeds token after token behind what ``extend`` fed, as ``ModelRunner.rollout`` does."""
        runner, first = self._runner, self._runner.first_layers
        rolling = runner.roll(self.passes.runner_of(self._layers, self._span), self._rows, self._bases, logits, steps, pick)
        if first is None:
            for _ in rolling:
                pass
            return
        # A copy, with room for the steps: a captured graph writes to the same memory again.
        first.hidden = [torch.cat((states, states.new_empty(steps - 1, states.shape[1]))) for states in first.hidden]
        for step, (token_ids, hidden) in enumerate(rolling):
            for states, text, new in zip(first.hidden, first.tokens, hidden[0], strict=True):
                states[len(text) + step] = new
            first.rolled.append(token_ids.clone())

    def read(self, request_ids: Sequence[str], texts: Sequence[Sequence[int]]) -> list[bool]:
        """All of it: what the target has read is read."""
        return [True] * len(texts)

    def fork(self, source_id: str, new_id: str, num_tokens: int) -> None:
        """Nothing to copy: the cache is the runner's."""

    def keep_len(self, request_id: str, num_tokens: int) -> None:
        """Nothing to take back: what was drafted never counted as cached."""

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing to forget: the rows are the runner's."""

    def retire(self, request_ids: Sequence[str]) -> None:
        """Nothing to keep either."""

    def prepare(self) -> None:
        """Compiles, or loads, the passes of drafting and of a score that begins behind it."""
        self.passes.runner_of(self._layers, self._span)
        if self._depth is not None:
            self.passes.runner_of(self._layers, LayerSpan(0, self._depth, head=False))
            self.passes.runner_of(self._runner.needs_hidden, LayerSpan(self._depth))
        self.passes.compile_now()


@torch.inference_mode()
def exit_logits(runner: ModelRunner, text: Sequence[int], depths: Sequence[int]) -> Iterator[Tensor]:
    """What the model says after each token of a text, then what it would say if it ended behind each of ``depths`` layers.

    [T, V] float32 each; the model's own norm and head follow every exit. Eager, in a row of the cache that is given back.
    """
    passes, name = PassRunner(runner.model, runner.cache, "never"), "exit-probe"
    try:
        texts = runner.layouts.chain([list(text)], [runner.cache.row(name)], [0])
        places = torch.arange(len(text), device=runner.device)
        logits, hidden = passes.run(texts.ids, texts.layout, tuple(map(behind, depths)), places)
        yield logits.float()
        for depth in depths:
            logits, _ = passes.run(hidden[behind(depth)][None], texts.layout, (), places, LayerSpan(runner.num_layers))
            yield logits.float()
    finally:
        runner.cache.release([name])


@torch.inference_mode()
def check_layers(runner: ModelRunner, depth: int) -> None:
    """Raises ``OutriderError`` unless the layers, run in two parts, say what the whole model says."""
    name = "layers-probe"
    kind = type(runner.model).__name__
    passes = PassRunner(runner.model, runner.cache, "never")
    text = [token % runner.vocab_size for token in (11, 7, 5, 3, 2)]
    try:
        rows, places = [runner.cache.row(name)], torch.arange(len(text), device=runner.device)
        texts = runner.layouts.chain([text], rows, [0])
        whole, _ = passes.run(texts.ids, texts.layout, (), places)
        _, hidden = passes.run(texts.ids, texts.layout, (behind(depth),), places, LayerSpan(0, depth, head=False))
        parts, _ = passes.run(hidden[behind(depth)][None], texts.layout, (), places, LayerSpan(depth))
        error = (whole - parts).abs().max() / whole.abs().max().clamp(min=1.0)
        is_same = parts.shape == whole.shape and bool(error <= TOLERANCE)
    except OutriderError:
        raise
    except Exception as failure:  # a model's own code, called in a way that it does not know
        logger.debug("the layers of %s do not run in parts", kind, exc_info=failure)
        is_same = False
    finally:
        runner.cache.release([name])
    if not is_same:
        raise OutriderError(f"{kind} does not run its layers one after another on one hidden state: no part of them can draft")
